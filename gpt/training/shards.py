"""A prepared corpus: token ids in files of one size, and a meta.json that describes them."""

import bisect
import copy
import errno
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

from gpt.config import Failure, Mistake
from gpt.files import courtesy, flush, read_json, read_text, write
from gpt.tokenizer import identity

META = "meta.json"  # written last: a folder that has it is whole
PROGRESS = ".progress.json"  # beside the meta.json of an old corpus while a new one is made
PART = ".part"
NAME = re.compile(r"\d{5,}\.bin")
CHECKED = 2**31  # bytes whose checksums are computed at the start of a run: about four seconds


class Shards:
    """The ids of several files, one file after another, read like a one-dimensional array: `len`; slices without a
    step, which read nothing; np.asarray of a slice, which reads the slice. `digest` tells one corpus from another.

    A read opens its files and closes them again. It raises Failure if one was changed after read() made the Shards, or
    has an id outside of the vocabulary."""

    def __init__(self, files: list[tuple[Path, int]], bounds: list[int], dtype: np.dtype, vocab_size: int, digest: str):
        self.files = files  # the path, and when the file was last changed (ns)
        self.bounds = bounds  # the position of each file's first id, and the number of all ids
        self.dtype, self.vocab_size, self.digest = dtype, vocab_size, digest
        self.span = range(bounds[-1])  # the positions that this slice has
        self.checked = 0  # bytes whose checksums are right

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, part: slice) -> "Shards":
        other = copy.copy(self)
        other.span = self.span[part]
        return other

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        parts, start = [np.array([], self.dtype)], self.span.start
        while start < self.span.stop:
            number = bisect.bisect_right(self.bounds, start) - 1
            stop = min(self.span.stop, self.bounds[number + 1])
            parts.append(self._read(*self.files[number], start - self.bounds[number], stop - start))
            start = stop
        return np.concatenate(parts, dtype=dtype)

    def _read(self, path: Path, changed: int, first: int, count: int) -> np.ndarray:
        try:
            with open(path, "rb") as file:
                same = os.fstat(file.fileno()).st_mtime_ns == changed
                file.seek(first * self.dtype.itemsize)
                ids = np.frombuffer(file.read(count * self.dtype.itemsize), self.dtype)
        except FileNotFoundError:
            same = False
        if not same or len(ids) != count:  # perhaps another corpus was prepared in its place
            raise Failure(f"the prepared corpus was changed during the run ({path}). Put it back and --resume.")
        if fault := _unknown_id(ids, self.vocab_size, first):
            raise Failure(f"the prepared corpus is damaged ({path}: {fault}). Prepare it again: data/prepare.py")
        return ids

    def check(self, shards: list[dict]):
        """Compare files with their checksums, up to CHECKED bytes in all, the newest first. Raises
        ValueError with the place of what is wrong."""
        for number in sorted(range(len(shards)), key=lambda number: -self.files[number][1]):
            path, count = self.files[number][0], shards[number]["tokens"]
            if self.checked + count * self.dtype.itemsize > CHECKED:
                continue
            checksum, first = hashlib.sha256(), 0
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    ids = np.frombuffer(block, self.dtype)
                    if fault := _unknown_id(ids, self.vocab_size, first):
                        raise ValueError(f"{path.name}: {fault}")
                    checksum.update(block)
                    first += len(ids)
            if checksum.hexdigest() != shards[number]["sha256"]:
                raise ValueError(f"{path.name} has another checksum than in {META}")
            self.checked += first * self.dtype.itemsize


def _unknown_id(ids: np.ndarray, vocab_size: int, first: int) -> str | None:
    """The first id that is not in the vocabulary, and its place, if there is one; `first` is the place of ids[0]."""
    if not len(ids) or ids.max() < vocab_size:
        return None
    place = int(np.argmax(ids >= vocab_size))
    return f"id {ids[place]} at token {first + place}, offset {(first + place) * ids.itemsize}, of {vocab_size} ids"


def _stored(path: Path, *keys: str) -> dict:
    """The object in meta.json or .progress.json; empty if that is missing, damaged, or written by another program. A
    file that is there and cannot be read is an OSError: it may be ours."""
    try:
        stored = json.loads(read_text(path, 2**30))
        ours = {"shards", *keys} <= stored.keys() and all(NAME.fullmatch(each["name"]) for each in stored["shards"])
        return stored if ours else {}
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return {}


def whole(folder: Path) -> dict:
    """The meta.json of a prepared corpus in the folder; empty if there is none."""
    return _stored(folder / META, "tokenizer", "dtype")


def unfinished(folder: Path) -> dict:
    """The .progress.json of a corpus in the making in the folder; empty if there is none."""
    return _stored(folder / PROGRESS, "source", "position", "skip")


def are_in(folder: Path) -> bool:
    """Whether the folder is a prepared corpus, or a part, or a damaged one. Other programs write a meta.json too."""
    if whole(folder) or unfinished(folder):
        return True
    return os.path.exists(folder / META) and any(NAME.fullmatch(path.name) for path in folder.iterdir())


def read(folder: Path, tokenizer) -> Shards:
    """The ids of a prepared corpus. Raises Mistake if it is not whole, is damaged, as far as the files' sizes and up to
    CHECKED bytes tell, or was prepared for another tokenizer."""
    folder = folder.absolute()
    if not (folder / META).exists():
        raise Mistake(f"the corpus is not prepared to its end ({folder}). Start data/prepare.py again.")
    meta = read_json(folder / META)
    try:
        stored, dtype = meta["tokenizer"], np.dtype(meta["dtype"]).newbyteorder("<")
        if dtype.kind != "u" or np.iinfo(dtype).max < stored["vocab_size"] - 1:
            raise ValueError(f"{dtype} for {stored['vocab_size']} ids")
        files, bounds, renamed = [], [0], []
        for number, shard in enumerate(meta["shards"]):
            path, size = folder / Path(shard["name"]).name, shard["tokens"] * dtype.itemsize
            status = path.stat()
            if status.st_size != size:
                raise ValueError(f"{path.name} has {status.st_size} bytes, not {size}")
            files.append((path, status.st_mtime_ns))
            bounds.append(bounds[-1] + shard["tokens"])
            renamed.append(shard | {"name": _name(number)})  # the same texts have one digest, prepared once or again
        digest = hashlib.sha256(json.dumps(meta | {"shards": renamed}, sort_keys=True).encode("utf-8")).hexdigest()
        ids, name = Shards(files, bounds, dtype, stored["vocab_size"], digest), stored["name"]
        fits = stored == identity(tokenizer)
        if fits:
            ids.check(meta["shards"])
    except (LookupError, TypeError, OSError, ValueError) as error:
        reason = f"{folder}: {error}"
        raise Mistake(f"no prepared corpus, or a damaged one ({reason}). Prepare it again: data/prepare.py") from None
    if not fits:
        names = f"{name}, not {tokenizer.name}"
        raise Mistake(f"the corpus was prepared for another tokenizer ({names}). Give --tokenizer {name}.")
    return ids


def _name(number: int) -> str:
    return f"{number:05d}.bin"


class Writer:
    """Writes ids into files of `size` tokens. A file gets its name when it is full and on the disk. The folder's old
    corpus stays as it is until finish(): the new files have higher numbers.

    After each file, .progress.json records how many calls of add() are done (`position`) and how many ids of the next
    call are written (`skip`). A Writer of the same `source`, a JSON-able description of the input, goes on from there
    and wants the calls from `position` on. Raises Mistake if the folder has files of another source that is not
    finished, unless `overwrite` is set: then they are deleted."""

    def __init__(self, folder: Path, tokenizer, size: int, source: dict, overwrite: bool = False):
        self.folder, self.size = folder, size
        self.tokenizer, self.dtype = identity(tokenizer), np.dtype(tokenizer.dtype)
        self.source = source | {"tokenizer": self.tokenizer, "size": size}
        progress, old = unfinished(folder), [shard["name"] for shard in whole(folder).get("shards", [])]
        if progress.get("source") != self.source:
            if progress.get("shards") and not overwrite:
                raise Mistake(f"the folder has a part of another corpus ({folder.absolute()}). Give --overwrite.")
            if progress:
                self._clear(progress, kept=old)
            numbers = [int(path.stem) for path in folder.glob("*.bin") if NAME.fullmatch(path.name)]
            progress = {"first": max(numbers, default=-1) + 1, "shards": [], "position": 0, "skip": 0}
            progress["replaces"] = old
        self.first, self.replaces = progress.get("first", 0), progress.get("replaces", [])
        self.shards, self.position, self.skip = (progress[name] for name in ("shards", "position", "skip"))
        (folder / PART).unlink(missing_ok=True)
        self.tokens, self.sha256 = 0, hashlib.sha256()  # of the file in the making
        self._record()

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
        """Finish the last file and the folder, in place of the old corpus; `counts` go into its meta.json, which is
        returned."""
        if self.tokens:
            self._finish_file()
        meta = {"tokenizer": self.tokenizer, "dtype": self.dtype.name, "shards": self.shards, **counts}
        meta["tokens"] = sum(shard["tokens"] for shard in self.shards)
        write(self.folder / META, json.dumps(meta, indent=1))
        self._clear(self._progress(), kept=[shard["name"] for shard in self.shards])
        return meta

    def _finish_file(self):
        flush(self.folder / PART)
        name = _name(self.first + len(self.shards))
        os.replace(self.folder / PART, self.folder / name)
        self.shards.append({"name": name, "tokens": self.tokens, "sha256": self.sha256.hexdigest()})
        self._record()
        self.tokens, self.sha256 = 0, hashlib.sha256()

    def _progress(self) -> dict:
        names = ("source", "first", "replaces", "shards", "position", "skip")
        return {name: getattr(self, name) for name in names}

    def _record(self):
        write(self.folder / PROGRESS, json.dumps(self._progress()))

    def _clear(self, progress: dict, kept: list[str]):
        """Delete what was made or is replaced, as .progress.json records it, but for the files that are `kept`."""
        first = progress.get("first", 0)
        # One more than recorded: a kill may come between a file's name and its record.
        made = {_name(number) for number in range(first, first + len(progress["shards"]) + 1)}
        with courtesy("delete old files of ids", OSError):
            for name in made.union(progress.get("replaces", [])).difference(kept):
                if NAME.fullmatch(name):
                    (self.folder / name).unlink(missing_ok=True)
            (self.folder / PROGRESS).unlink(missing_ok=True)
