"""A run: its folder, made, found and held, the lines of its metrics, and the wish to stop it."""

import contextlib
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

from gpt.config import read_json


def new_run(out: str | None, name: str, overwrite: bool) -> Path:
    """Make a run folder: `out`, or runs/NAME with a number where that is taken. Raises ValueError rather than touch a
    folder with something in it, unless it is a run that no process trains into and `overwrite` is set: then the old run
    is deleted."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    run = Path(out) if out else next(run for run in (Path("runs") / name for name in names) if not run.exists())
    # Hidden files do not count: a process killed at its start leaves the lock.
    if run.is_file() or (run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir())):
        try:  # other programs write a config.json too
            is_run = "format" in read_json(run / "config.json")
        except ValueError:
            is_run = False
        if not is_run:
            raise ValueError(f"the output folder is not a run ({run.absolute()}). Name another with --out.")
        if not overwrite:
            raise ValueError(f"there is a run already ({run.absolute()}). Use --resume, --overwrite or another --out.")
        with held(run):
            pass
        shutil.rmtree(run)
    try:
        run.mkdir(parents=True, exist_ok=out is not None)
    except OSError as error:
        raise ValueError(f"cannot make the run folder ({run.absolute()}: {error.strerror}). Name another.") from None
    return run


@contextlib.contextmanager
def held(run: Path):
    """Keep other processes from training into the run, until the `with` block or this process ends, however it ends.
    Raises ValueError if another process holds it."""
    try:
        file = open(run / ".lock", "a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write into the run ({run.absolute()}: {error.strerror}). Name another.") from None
    with file:
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process works here ({run.absolute()}). Wait for it, or name another.") from None
        yield


def saved_runs(runs: Path = Path("runs")) -> list[Path]:
    """The runs that have saved, the one that saved last at the end."""
    return [path.parent for path in sorted(runs.glob("*/last"), key=lambda path: path.stat().st_mtime)]


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run that saved last. Raises ValueError if there is none."""
    saved = saved_runs(runs)
    if not saved:
        raise ValueError(f"no run yet ({runs.absolute()}). Train one first: python train.py --norm pre")
    return saved[-1]


def write(path: Path, text: str):
    """Replace a text file, whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="\n")
    flush(new)
    os.replace(new, path)
    flush(path.parent)


def flush(path: Path):
    """Wait until a file or a folder is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no such thing for folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, record: dict):
    """Add a line to metrics.jsonl or probe.jsonl."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The records of metrics.jsonl or probe.jsonl, none if there is no such file. A line without its end, which a kill
    cut short, does not count."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def forget_later_lines(run: Path, step: int):
    """Drop what a killed process wrote of steps after its last checkpoint, which will be done again."""
    for path in run.glob("*.jsonl"):
        write(path, "".join(json.dumps(record) + "\n" for record in read_lines(path) if record["step"] <= step))


class StopRequest:
    """Remembers, within a `with` block, that SIGINT or SIGTERM asked for a stop after this step; a second signal ends
    the program at once."""

    signum = None

    def __enter__(self):
        self._before = {signum: signal.signal(signum, self._asked) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _asked(self, signum, frame):
        self.signum = signum
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

    def __exit__(self, *exception):
        if self.signum is None:  # else the program is about to end, and a second signal may end it
            for signum, handler in self._before.items():
                signal.signal(signum, handler)
