"""A prepared corpus: token ids in files of one size, memory-mapped, and a meta.json that describes them."""

import bisect
import contextlib
import copy
import errno
import hashlib
import itertools
import json
import mmap
import os
from pathlib import Path

import numpy as np

from gpt.config import Mistake
from gpt.tokenizer import identity
from gpt.training.files import flush, read_json, write

META = "meta.json"  # written last: a folder that has it is whole
PROGRESS = ".progress.json"
PART = ".part"


class Shards:
    """The ids of several files behind one another, read like a one-dimensional array: `len`; slices, which read
    nothing; np.asarray of a slice, which reads that much. `digest` tells one corpus from another."""

    def __init__(self, files: list[mmap.mmap], dtype: np.dtype, digest: str):
        self.files, self.maps, self.digest = files, [np.frombuffer(file, dtype) for file in files], digest
        self.ends = np.cumsum([len(ids) for ids in self.maps]).tolist()
        self.start, self.stop = 0, self.ends[-1]
        self.reads = itertools.count(1)  # of all slices together

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, part: slice):
        start, stop, _ = part.indices(len(self))
        view = copy.copy(self)
        view.start, view.stop = self.start + start, self.start + max(start, stop)
        return view

    def __array__(self, dtype=None, copy=None):
        if next(self.reads) % 1000 == 0 and hasattr(mmap, "MADV_DONTNEED"):
            for file in self.files:  # or what was read would count as this process's memory
                file.madvise(mmap.MADV_DONTNEED)
        parts, start, shard = [], self.start, bisect.bisect_right(self.ends, self.start)
        while start < self.stop:
            ids, end = self.maps[shard], self.ends[shard]
            first = end - len(ids)
            parts.append(ids[start - first : self.stop - first])
            start, shard = end, shard + 1
        return np.concatenate(parts, dtype=dtype) if parts else np.array([], dtype)


def are_in(folder: Path) -> bool:
    """Whether the folder is a prepared corpus, or a part of one. Other programs write a meta.json too."""
    ours = os.path.exists(folder / META) or os.path.exists(folder / PROGRESS)
    return ours and not any(folder.glob("*.txt"))


def clear(folder: Path):
    """Delete a prepared corpus, and no other file of the folder."""
    for path in (folder / META, folder / PROGRESS, folder / PART, *folder.glob("[0-9][0-9][0-9][0-9][0-9]*.bin")):
        path.unlink(missing_ok=True)


def read(folder: Path, tokenizer) -> Shards:
    """The ids of a prepared corpus. Raises Mistake if it is not whole, or was prepared for another tokenizer."""
    if not (folder / META).exists():
        raise Mistake(f"the corpus is not prepared to its end ({folder.absolute()}). Start data/prepare.py again.")
    meta = read_json(folder / META)
    with contextlib.suppress(ImportError, OSError, ValueError):  # each shard is a file that stays open
        import resource

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        theirs, dtype = meta["tokenizer"], np.dtype(meta["dtype"]).newbyteorder("<")
        if dtype.kind != "u" or np.iinfo(dtype).max < theirs["vocab_size"] - 1:
            raise Mistake(f"{dtype} for {theirs['vocab_size']} ids")
        files = []
        for shard in meta["shards"]:
            path = folder / Path(shard["name"]).name
            if path.stat().st_size != shard["tokens"] * dtype.itemsize:
                raise Mistake(f"{path.name} has {path.stat().st_size} bytes, not {shard['tokens'] * dtype.itemsize}")
            with open(path, "rb") as file:
                files.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        shards = Shards(files, dtype, hashlib.sha256(json.dumps(meta, sort_keys=True).encode("utf-8")).hexdigest())
    except (LookupError, TypeError, OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EMFILE:
            raise Mistake(f"too many shards ({len(meta['shards'])}). Allow more open files: ulimit -n.") from None
        found = f"{folder.absolute()}: {error}"
        raise Mistake(f"the prepared corpus is damaged ({found}). Prepare it again: data/prepare.py") from None
    if theirs != identity(tokenizer):
        found = f"{theirs.get('name')}, not {tokenizer.name}"
        raise Mistake(
            f"the corpus was prepared for another tokenizer ({found}). Give --tokenizer {theirs.get('name')}."
        )
    return shards


class Writer:
    """Writes ids into files of `size` tokens. A file gets its name when it is full and on the disk; what it took is
    then noted beside it, so that another Writer of the same `source`, a JSON-able description of the input, goes on
    from there: the ids of `position`, the number of calls of `add`, but for the first `skip`. Raises Mistake if the
    folder has ids of another source."""

    def __init__(self, folder: Path, tokenizer, size: int, source: dict):
        self.folder, self.size = folder, size
        self.identity, self.dtype = identity(tokenizer), np.dtype(tokenizer.dtype)
        self.source = source | {"tokenizer": self.identity, "size": size}
        self.shards, self.position, self.skip = [], 0, 0
        if (folder / PROGRESS).exists():
            progress = read_json(folder / PROGRESS)
            if progress.get("source") != self.source:
                raise Mistake(f"the folder has a part of another corpus ({folder.absolute()}). Give --overwrite.")
            self.shards, self.position, self.skip = (progress[name] for name in ("shards", "position", "skip"))
        self._new()

    def add(self, ids: np.ndarray):
        """Take the ids of the next position."""
        taken, self.skip = self.skip, 0
        while len(ids) - taken:
            part = ids[taken : taken + self.size - self.tokens]
            content = part.astype(self.dtype.newbyteorder("<")).tobytes()
            self.file.write(content)
            self.sha256.update(content)
            self.tokens, taken = self.tokens + len(part), taken + len(part)
            if self.tokens == self.size:
                self.skip = taken
                self._finish()
                self._note()
                self._new()
        self.position, self.skip = self.position + 1, 0

    def close(self, **counts):
        """Finish the last file and the folder; `counts` go into its meta.json, which is returned."""
        if self.tokens:
            self._finish()
        self.file.close()
        self.path.unlink(missing_ok=True)
        meta = {"tokenizer": self.identity, "dtype": self.dtype.name, "shards": self.shards, **counts}
        meta["tokens"] = sum(shard["tokens"] for shard in self.shards)
        write(self.folder / META, json.dumps(meta, indent=1))
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return meta

    def _new(self):
        self.path = self.folder / PART
        self.file, self.tokens, self.sha256 = open(self.path, "wb"), 0, hashlib.sha256()

    def _finish(self):
        self.file.close()
        flush(self.path)
        name = f"{len(self.shards):05d}.bin"
        os.replace(self.path, self.folder / name)
        self.shards.append({"name": name, "tokens": self.tokens, "sha256": self.sha256.hexdigest()})

    def _note(self):
        progress = {"source": self.source, "shards": self.shards, "position": self.position, "skip": self.skip}
        write(self.folder / PROGRESS, json.dumps(progress))
