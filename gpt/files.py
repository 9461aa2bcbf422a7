"""Files and folders that are there whole or not at all, and what may fail without ending the work.

A must is what somebody works for: a checkpoint, a corpus, a line of a log. If it fails, the work ends, and nothing that
was there before is lost. A courtesy is all else: a picture, a mode, a lock, a line on the screen, an old file to
delete. If it fails, a warning says so, and the work goes on.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gpt.config import Mistake
from gpt.screen import say

FORMAT = 1  # the version of config.json and state.json
LARGEST = 2**24  # bytes; GPT-2's tokenizer.json has 3.6 million. An untrusted file may be larger than the memory
# What a file system answers that does not have a call, as network drives lack fsync.
LACKING = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY}


@contextlib.contextmanager
def courtesy(purpose: str, errors: type[Exception] = Exception, warn=say):
    """Turn an error in the `with` block into a warning that `purpose`, "draw the curve", was not possible."""
    try:
        yield
    except errors as error:
        reason = " ".join((str(error) or repr(error)).split())[:300]
        warn(f"warning: cannot {purpose} ({reason}). Going on without it.")


@contextlib.contextmanager
def new_file(path: Path, mark: str = "new") -> Iterator[Path]:
    """A path to write to, beside `path`. After the `with` block the file is flushed to the disk and takes the place of
    `path`; after an error it is deleted. Processes that write one file at a time give another `mark` each."""
    new = path.with_name(f".{path.name}.{mark}")
    try:
        yield new
        flush(new)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The same for a folder of files: it takes the place of `path`, which must not be there or be empty."""
    new = path.with_name(f".{path.name.lstrip('.')}.new")
    if new.exists():  # a kill has left it
        shutil.rmtree(new)
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.iterdir():
            with contextlib.suppress(OSError):  # safetensors lets nobody else read, whatever the umask
                file.chmod(new.stat().st_mode & 0o666)
            flush(file)
        flush(new)
        if path.exists():
            path.rmdir()
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    flush(path.parent)


def write(path: Path, text: str):
    """Replace a text file, whole or not at all."""
    with new_file(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


def flush(path: Path):
    """Wait until a file or a folder is on the disk, as far as the file system can tell."""
    if os.name == "nt" and path.is_dir():  # Windows cannot flush a folder
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in LACKING:
            raise


def sha256(path: Path) -> str:
    """The checksum of a file of any size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """A text without its byte order mark. Raises ValueError for a file of more than `largest` bytes."""
    with open(path, "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"more than {largest:,} bytes")
    return content.decode("utf-8-sig")


def read_json(path: str | Path) -> dict:
    """The object in a JSON file. Raises Mistake if it cannot be read."""
    try:
        stored = json.loads(read_text(path))
        if not isinstance(stored, dict):
            raise ValueError("no object")
        return stored
    except OSError as error:
        raise Mistake(f"cannot read the file ({path}: {error.strerror}). Make it readable, or put it back.") from None
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is not a JSON file ({error}). Put the right one back.") from None


def append(path: Path, *records: dict):
    """Add a line of JSON to a file for each record."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_lines(path: Path) -> list[dict]:
    """The records of a file of JSON lines; none if there is no such file. A last line that a kill cut short does not
    count. Raises Mistake for a damaged line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    try:
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(isinstance(record, dict) and type(record.get("step")) is int for record in records):
            raise ValueError("not an object with a step")
        return records
    except (ValueError, RecursionError) as error:
        raise Mistake(f"a line of the file is damaged ({path}: {error}). Delete that line.") from None
