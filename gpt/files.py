"""Files that are there whole or not at all, lines of JSON, and a folder that one process at a time works in."""

import contextlib
import json
import os
from pathlib import Path

from gpt.config import Mistake

FORMAT = 1  # the version of config.json, state.json and results.json


def write(path: Path, text: str):
    """Replace a text file, whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="\n")
    flush(new)
    os.replace(new, path)
    flush(path.parent)


def flush(path: Path):
    """Wait until a file or a folder is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot flush a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: str | Path) -> dict:
    """The object in a JSON file. Raises Mistake if it cannot be read."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("no object")
        return stored
    except OSError as error:
        raise Mistake(f"cannot read the file ({path}: {error.strerror}). Get it again.") from None
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is not a JSON file ({error}). Get it again.") from None


def append(path: Path, record: dict):
    """Add a line of JSON to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The records of a file of JSON lines; none if there is no such file. A last line that a kill cut short does not
    count. Raises Mistake for a damaged line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise Mistake(f"a line of the file is damaged ({path}: {error}). Delete that line.") from None


@contextlib.contextmanager
def held(folder: Path):
    """Keep other processes from working in the folder, until the `with` block or this process ends, however it ends.
    Raises Mistake if another process holds it."""
    from filelock import FileLock, Timeout

    if not folder.is_dir():  # FileLock would make it
        raise Mistake(f"no such folder ({folder.absolute()}). Name another.")
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Mistake(f"another process works here ({folder.absolute()}). Wait for it, or name another.") from None
    except OSError as error:
        raise Mistake(f"cannot write into the folder ({folder.absolute()}: {error.strerror}). Name another.") from None
    try:
        yield
    finally:
        lock.release()
