"""A prepared corpus: token ids in files of one size, and a meta.json that describes them."""

import bisect
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from gpt.config import Failure, Mistake
from gpt.tokenizer import identity
from gpt.training.files import flush, read_json, write

META = "meta.json"  # written last: a folder that has it is whole
PROGRESS = ".progress.json"
PART = ".part"


class Shards:
    """The ids of several files, one file after another, read like a one-dimensional array: `len`; slices without a
    step, which read nothing; np.asarray of a slice, which reads the slice. `digest` tells one corpus from another.

    A read opens its files and closes them again. It raises Failure if one was changed after read() made the Shards."""

    def __init__(self, files: list[tuple[Path, int]], bounds: list[int], dtype: np.dtype, digest: str, span: range):
        self.files = files  # the path, and when the file was last changed (ns)
        self.bounds = bounds  # the position of each file's first id, and the number of all ids
        self.dtype, self.digest = dtype, digest
        self.span = span  # the positions that this slice has

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, part: slice) -> "Shards":
        return Shards(self.files, self.bounds, self.dtype, self.digest, self.span[part])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        parts, start = [np.array([], self.dtype)], self.span.start
        while start < self.span.stop:
            number = bisect.bisect_right(self.bounds, start) - 1
            stop = min(self.span.stop, self.bounds[number + 1])
            parts.append(self._read(*self.files[number], start - self.bounds[number], stop - start))
            start = stop
        return np.concatenate(parts, dtype=dtype)

    def _read(self, path: Path, changed: int, first: int, count: int) -> np.ndarray:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime_ns != changed:  # perhaps another corpus was prepared in its place
                raise Failure(f"the prepared corpus was changed during the run ({path}). Put it back and --resume.")
            file.seek(first * self.dtype.itemsize)
            return np.frombuffer(file.read(count * self.dtype.itemsize), self.dtype)


def are_in(folder: Path) -> bool:
    """Whether the folder is a prepared corpus, or a part of one. Other programs write a meta.json as well."""
    prepared = os.path.exists(folder / META) or os.path.exists(folder / PROGRESS)
    return prepared and not any(folder.glob("*.txt"))


def clear(folder: Path):
    """Delete a prepared corpus, and no other file of the folder."""
    for path in (folder / META, folder / PROGRESS, folder / PART, *folder.glob("[0-9][0-9][0-9][0-9][0-9]*.bin")):
        path.unlink(missing_ok=True)


def read(folder: Path, tokenizer) -> Shards:
    """The ids of a prepared corpus. Raises Mistake if it is not whole, or was prepared for another tokenizer."""
    folder = folder.absolute()
    if not (folder / META).exists():
        raise Mistake(f"the corpus is not prepared to its end ({folder}). Start data/prepare.py again.")
    meta = read_json(folder / META)
    try:
        stored, dtype = meta["tokenizer"], np.dtype(meta["dtype"]).newbyteorder("<")
        if dtype.kind != "u" or np.iinfo(dtype).max < stored["vocab_size"] - 1:
            raise ValueError(f"{dtype} for {stored['vocab_size']} ids")
        files, bounds = [], [0]
        for shard in meta["shards"]:
            path, size = folder / Path(shard["name"]).name, shard["tokens"] * dtype.itemsize
            status = path.stat()
            if status.st_size != size:
                raise ValueError(f"{path.name} has {status.st_size} bytes, not {size}")
            files.append((path, status.st_mtime_ns))
            bounds.append(bounds[-1] + shard["tokens"])
        digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode("utf-8")).hexdigest()
        ids, name = Shards(files, bounds, dtype, digest, range(bounds[-1])), stored["name"]
    except (LookupError, TypeError, OSError, ValueError) as error:
        reason = f"{folder}: {error}"
        raise Mistake(f"the prepared corpus is damaged ({reason}). Prepare it again: data/prepare.py") from None
    if stored != identity(tokenizer):
        names = f"{name}, not {tokenizer.name}"
        raise Mistake(f"the corpus was prepared for another tokenizer ({names}). Give --tokenizer {name}.")
    return ids


class Writer:
    """Writes ids into files of `size` tokens. A file gets its name when it is full and on the disk.

    After each file, .progress.json records how many calls of add() are done (`position`) and how many ids of the next
    call are written (`skip`). A Writer of the same `source`, a JSON-able description of the input, goes on from there
    and wants the calls from `position` on. Raises Mistake if the folder has ids of another source."""

    def __init__(self, folder: Path, tokenizer, size: int, source: dict):
        self.folder, self.size = folder, size
        self.tokenizer, self.dtype = identity(tokenizer), np.dtype(tokenizer.dtype)
        self.source = source | {"tokenizer": self.tokenizer, "size": size}
        self.shards, self.position, self.skip = [], 0, 0
        if (folder / PROGRESS).exists():
            progress = read_json(folder / PROGRESS)
            if progress.get("source") != self.source:
                raise Mistake(f"the folder has a part of another corpus ({folder.absolute()}). Give --overwrite.")
            self.shards, self.position, self.skip = (progress[name] for name in ("shards", "position", "skip"))
        (folder / PART).unlink(missing_ok=True)
        self.tokens, self.sha256 = 0, hashlib.sha256()  # of the file in the making

    def add(self, ids: np.ndarray):
        """Take the ids of the next position."""
        done, self.skip = self.skip, 0
        while done < len(ids):
            part = ids[done : done + self.size - self.tokens]
            content = part.astype(self.dtype.newbyteorder("<")).tobytes()
            with open(self.folder / PART, "ab") as file:
                file.write(content)
            self.sha256.update(content)
            self.tokens, done = self.tokens + len(part), done + len(part)
            if self.tokens == self.size:
                self.skip = done
                self._finish_file()
        self.position, self.skip = self.position + 1, 0

    def finish(self, **counts) -> dict:
        """Finish the last file and the folder; `counts` go into its meta.json, which is returned."""
        if self.tokens:
            self._finish_file()
        meta = {"tokenizer": self.tokenizer, "dtype": self.dtype.name, "shards": self.shards, **counts}
        meta["tokens"] = sum(shard["tokens"] for shard in self.shards)
        write(self.folder / META, json.dumps(meta, indent=1))
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return meta

    def _finish_file(self):
        flush(self.folder / PART)
        name = f"{len(self.shards):05d}.bin"
        os.replace(self.folder / PART, self.folder / name)
        self.shards.append({"name": name, "tokens": self.tokens, "sha256": self.sha256.hexdigest()})
        progress = {"source": self.source, "shards": self.shards, "position": self.position, "skip": self.skip}
        write(self.folder / PROGRESS, json.dumps(progress))
        self.tokens, self.sha256 = 0, hashlib.sha256()
