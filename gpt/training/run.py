"""A run's folder: make it, find it, delete it, cut its lines; and the request to stop a run."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

from gpt.config import Mistake, one_of
from gpt.files import read_json, read_lines, write
from gpt.training.lock import held

PARTS = ("state.json", "model.safetensors", "optimizer.safetensors")  # of a checkpoint
# What training writes into a run's folder.
FILES = "best|last|metrics.jsonl|steps.jsonl|probe.jsonl|outcome.json|curve.png|probe.png|config.json"
WRITTEN = rf"{FILES}|\.({FILES})\.new|step-\d{{6,}}|\.step-\d{{6,}}(-old|\.new)|events\.out\.tfevents\..*"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, by step. Raises OSError for a run that cannot be read."""
    folders = run.iterdir() if run.is_dir() else []
    steps = (path for path in folders if re.fullmatch(r"step-\d+", path.name) and path.is_dir())
    whole = (path for path in steps if any((path / name).exists() for name in PARTS))
    return sorted(whole, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint folder."""
    return int(checkpoint.name[5:])


def path_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return run / f"step-{step:06d}"


def is_run(folder: Path) -> bool:
    """Whether the folder has a run's config.json. Other programs write a file of that name too."""
    try:
        return {"format", "vocab_size", "norm", "n_layers", "data", "steps"} <= read_json(folder / "config.json").keys()
    except Mistake:
        return False


def delete_checkpoint(folder: Path):
    """Delete a checkpoint, or what is left of one; of a link the link alone, and beside other files only ours."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    elif folder.name.startswith("."):
        shutil.rmtree(folder)
    elif _foreign(folder):
        for name in PARTS:
            (folder / name).unlink(missing_ok=True)
    else:  # renamed first, so that a kill half-way leaves nothing that looks like a checkpoint
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}-old")))


def _foreign(folder: Path) -> list[Path]:
    """The files in a checkpoint's folder that training did not write."""
    return [] if folder.is_symlink() else [path for path in folder.iterdir() if path.name not in PARTS]


def delete_run(run: Path):
    """Delete what training has written into the folder, and no other file. Raises Mistake for a checkpoint with other
    files in it."""
    if foreign := [path for folder in checkpoints(run) for path in _foreign(folder)]:
        raise Mistake(
            f"a checkpoint has a file that is not its own ({foreign[0]}). Move it away, or name another --out."
        )
    paths = [path for path in run.iterdir() if re.fullmatch(WRITTEN, path.name)]
    for path in sorted(paths, key=lambda path: path.name == "config.json"):  # by which a run is known
        delete_checkpoint(path)


def new_run(out: str | None, name: str, overwrite: bool) -> Path:
    """Make a run folder: `out`, or runs/NAME with a number where that is taken. A run that ended before its first line
    and checkpoint is taken over. Raises Mistake rather than touch a folder with something else in it, unless it is a
    run that no process trains into and `overwrite` is set: then the old run is deleted."""
    run = Path(out or "runs")
    try:
        if out:
            _clear(run, overwrite)
            run.mkdir(parents=True, exist_ok=True)
            return run
        run.mkdir(exist_ok=True)
        for number in itertools.count(1):
            run = Path("runs", name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):  # another process may be as fast
                run.mkdir()
                break
    except OSError as error:
        raise Mistake(
            f"cannot make the run folder ({run.absolute()}: {error.strerror}). Name another: --out."
        ) from None
    return run


def _clear(run: Path, overwrite: bool):
    # Hidden files do not count: a process killed at its start leaves the lock.
    if run.is_file() or (run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir())):
        if not is_run(run):
            raise Mistake(f"the output folder is not a run ({run.absolute()}). Name another with --out.")
        if (checkpoints(run) or (run / "metrics.jsonl").exists()) and not overwrite:
            raise Mistake(f"there is a run already ({run.absolute()}). Use --resume, --overwrite or another --out.")
        with held(run):
            delete_run(run)


def saved_runs(runs: Path = Path("runs")) -> list[Path]:
    """The runs that have a checkpoint, the one that saved last at the end."""
    saved = (path for path in runs.glob("*/last") if checkpoints(path.parent))
    return [path.parent for path in sorted(saved, key=lambda path: path.stat().st_mtime)]


def no_checkpoint(folder: Path, hint: str) -> Mistake:
    """That the folder, if there is one, has no checkpoint, and what has."""
    runs, there = saved_runs(folder) or saved_runs(), os.path.exists(folder)
    if not there and re.fullmatch(r"step-\d+", folder.name) and (steps := checkpoints(folder.parent)):
        return Mistake(f"no such checkpoint ({folder}). Use another one: {one_of(steps[-4:])}.")
    names = ", ".join(map(str, runs[-4:]))
    remedy = f"Runs with a checkpoint: {names}." if runs else "Train one: python train.py --norm pre."
    problem = "no checkpoint there" if there else "no such run"
    return Mistake(f"{problem} ({folder.absolute()}). {remedy} {'' if there else hint}".rstrip())


def other_steps(run: Path, but: Path | None = None) -> str:
    """The remedy where a checkpoint is not there, or is damaged."""
    steps = [step_of(path) for path in checkpoints(run) if path != but]
    if steps:
        return f"Use another one: --checkpoint {one_of(steps)}."
    return "There is no other one: put it back, or train again."


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run that saved last. Raises Mistake if there is none."""
    saved = saved_runs(runs)
    if not saved:
        raise Mistake(f"no run yet ({runs.absolute()}). Train one first: python train.py --norm pre")
    return saved[-1]


def forget_later_lines(run: Path, step: int, probes_again: bool = False):
    """Drop the lines of steps after a checkpoint, which a resumed run will do again; and the probe of its own step, if
    that will be done again."""
    lasts = {"metrics.jsonl": step, "steps.jsonl": step, "probe.jsonl": step - 1 if probes_again else step}
    for name, last in lasts.items():
        if os.path.exists(path := run / name):
            write(path, "".join(json.dumps(record) + "\n" for record in read_lines(path) if record["step"] <= last))


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
