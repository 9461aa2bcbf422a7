"""A run's folder: make it, find it, cut its lines; and the request to stop a run."""

import itertools
import json
import shutil
import signal
from pathlib import Path

from gpt.config import Mistake
from gpt.training.files import held, read_json, read_lines, write


def new_run(out: str | None, name: str, overwrite: bool) -> Path:
    """Make a run folder: `out`, or runs/NAME with a number where that is taken. Raises Mistake rather than touch a
    folder with something in it, unless it is a run that no process trains into and `overwrite` is set: then the old run
    is deleted."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    run = Path(out) if out else next(run for run in (Path("runs") / name for name in names) if not run.exists())
    # Hidden files do not count: a process killed at its start leaves the lock.
    if run.is_file() or (run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir())):
        try:  # other programs write a config.json too
            is_run = "format" in read_json(run / "config.json")
        except Mistake:
            is_run = False
        if not is_run:
            raise Mistake(f"the output folder is not a run ({run.absolute()}). Name another with --out.")
        if not overwrite:
            raise Mistake(f"there is a run already ({run.absolute()}). Use --resume, --overwrite or another --out.")
        with held(run):
            pass
        shutil.rmtree(run)
    try:
        run.mkdir(parents=True, exist_ok=out is not None)
    except OSError as error:
        raise Mistake(f"cannot make the run folder ({run.absolute()}: {error.strerror}). Name another.") from None
    return run


def saved_runs(runs: Path = Path("runs")) -> list[Path]:
    """The runs that have a checkpoint, the one that saved last at the end."""
    return [path.parent for path in sorted(runs.glob("*/last"), key=lambda path: path.stat().st_mtime)]


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run that saved last. Raises Mistake if there is none."""
    saved = saved_runs(runs)
    if not saved:
        raise Mistake(f"no run yet ({runs.absolute()}). Train one first: python train.py --norm pre")
    return saved[-1]


def forget_later_lines(run: Path, step: int):
    """Drop the lines of steps after a checkpoint, which a resumed run will do again."""
    for path in run.glob("*.jsonl"):
        write(path, "".join(json.dumps(record) + "\n" for record in read_lines(path) if record["step"] <= step))


class StopRequest:
    """Remembers, within a `with` block, that SIGINT or SIGTERM asked for a stop after this step; a second signal ends
    the program at once."""

    signum: int | None = None

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
