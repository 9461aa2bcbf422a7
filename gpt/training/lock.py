"""One process at a time in a folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpt.config import Mistake
from gpt.screen import say


class Held(Mistake):
    """Another process works where this one would."""


@contextlib.contextmanager
def held(folder: Path, name: str = ".lock") -> Iterator[bool]:
    """Keep other processes from working in the folder, or from what else the file `name` in it stands for, until the
    `with` block or this process ends, however it ends. Raises Held if another process does, and Mistake if nothing can
    be written there. A file system without locks is a warning, and the value of the `with` block is then False."""
    try:
        lock = open(folder / name, "a", encoding="utf-8")
    except OSError as error:
        raise Mistake(f"cannot write into the folder ({folder.absolute()}: {error.strerror}). Name another.") from None
    with lock:
        try:
            _lock(lock.fileno())
            locked = True
        except BlockingIOError:
            raise Held(f"another process works here ({folder.absolute()}). Wait for it, or name another.") from None
        except OSError as error:
            say(f"warning: no lock on {folder} ({error.strerror}). Let no second process work there.")
            locked = False
        yield locked


def _lock(descriptor: int):
    """Lock an open file until it is closed. Raises BlockingIOError if another process has locked it."""
    if os.name == "nt":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except PermissionError:
            raise BlockingIOError from None
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
