"""A comparison's folder: a folder for each run, and in it the run's outcome, of which all tables are made."""

import contextlib
import itertools
import json
import math
import time
from pathlib import Path

from gpt.config import Mistake
from gpt.files import Held, held, read_json, write
from gpt.training.entries import folder_name, resolved
from gpt.training.plan import Plan, Run
from gpt.training.run import checkpoints, delete_run, is_run
from gpt.training.settings import SETTINGS, configure

NUMBER, WHOLE, NONE = (int, float), (int,), (type(None),)
# What an outcome has beside the run's settings; None for a loss that a diverged run does not have.
TYPES = {
    "run": (str,),
    "entry": (str,),
    "depth": WHOLE + NONE,
    "part": (str,),
    "code": (str,),
    "corpus": (str,),
    "val_loss": NUMBER + NONE,
    "best_val_loss": NUMBER + NONE,
    "best_step": WHOLE + NONE,
    "diverged": WHOLE + NONE,
    "stuck": (bool,),
    "loss_spikes": WHOLE,
    "grad_norm_spikes": WHOLE,
    "unrecovered": WHOLE,
    "largest_rate": NUMBER + NONE,
    "tokens_per_s": WHOLE + NONE,
}


class Folder:
    """The runs of a comparison in the folder `path`. `code` has the checksum of the code that decides the runs of an
    entry at a depth, `corpus` is that of the corpus. A run that other code, settings or another corpus made is refused,
    so that a table mixes none of them in silence: every method that reads one raises Mistake for it."""

    def __init__(self, path: Path, code: dict[tuple[str, int | None], str], corpus: str):
        self.path, self.code, self.corpus = path, code, corpus
        self._outcomes: dict[str, dict] = {}

    def made_by(self, run: Run) -> dict:
        """What decides a run: its settings, the code and the corpus."""
        code = self.code[run.entry, run.depth]
        return resolved(run.config) | {"code": code, "corpus": self.corpus}

    def outcome(self, run: Run) -> dict | None:
        """A run's settings and results, as in outcome.json; None before its end."""
        path = self.path / run.name / "outcome.json"
        if run.name not in self._outcomes and path.exists():
            try:
                outcome = read_json(path)
            except Mistake as error:
                raise Mistake(f"{error} Or delete {path.parent}, and the run is done again.") from None
            if damaged := [name for name, types in TYPES.items() if not isinstance(outcome.get(name), types)]:
                reason = f"{path}: {damaged[0]} is {outcome.get(damaged[0])!r}"
                raise Mistake(f"the outcome is damaged ({reason}). Delete {path.parent}, and the run is done again.")
            self._require_same(run, outcome)
            self._outcomes[run.name] = outcome
        return self._outcomes.get(run.name)

    def loss_of(self, run: Run) -> float | None:
        """The loss by which a rate is chosen: infinite if the run diverged, None before its end."""
        outcome = self.outcome(run)
        if outcome is None:
            return None
        return math.inf if outcome["val_loss"] is None else outcome["val_loss"]

    def add(self, run: Run, results: dict):
        """Write the outcome of a run, with these results."""
        first = {"run": run.name, "entry": run.entry, "depth": run.depth, "part": run.part}
        write(self.path / run.name / "outcome.json", json.dumps(first | results | self.made_by(run), indent=1))

    def begun(self, run: Run) -> bool:
        """Whether a run has a checkpoint to go on from."""
        from gpt.training.checkpoint import find, read_state

        folder = self.path / run.name
        if not checkpoints(folder):
            return False
        try:
            state, config = read_state(find(folder, "last"))
        except Mistake as error:
            raise Mistake(f"{error} Or delete {folder}, and it is done again.") from None
        self._require_same(run, resolved(config) | {name: state.get(name) for name in ("code", "corpus")})
        return True

    def steps_done(self, run: Run) -> int:
        """The steps that a run has done, here or in another process, as far as it has logged them."""
        if run.name in self._outcomes:
            return run.config.steps
        step = 0
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is just beginning
            with open(self.path / run.name / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, 2) - 2000))
                step = json.loads(file.read().splitlines()[-1])["step"]
        return step

    def claim(self, run: Run):
        """A context in which no other process does this run. Raises gpt.files.Held if one does."""
        return held(self.path, f".{run.name}.lock")

    def require_ours(self):
        """Raise Mistake if the folder has files, but no run, nor a folder in which one is just beginning."""
        shown = [self.path] if self.path.is_file() else _shown(self.path)
        if shown and not any(is_run(path) or (path.is_dir() and not _shown(path)) for path in shown):
            place = self.path.absolute()
            raise Mistake(f"the output folder is not a comparison ({place}). Name another with --out.")

    @contextlib.contextmanager
    def turn(self):
        """A context in which no other process writes the comparison's own files; it waits until none does."""
        with contextlib.ExitStack() as stack:
            while True:
                with contextlib.suppress(Held):
                    stack.enter_context(held(self.path))
                    break
                time.sleep(0.1)
            yield

    def check(self, plan: Plan):
        """Raise Mistake if the folder is no comparison's, or has one of these runs and it was made otherwise."""
        self.require_ours()
        for run in plan.runs(self.loss_of):
            if self.outcome(run) is None:
                self.begun(run)

    def make(self):
        """Make the folder, if need be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.path.absolute()}: {error.strerror}"
            raise Mistake(f"cannot make the folder ({reason}). Name another.") from None

    def clear(self):
        """Delete the outcomes and runs of the folder, but no other file. Raises Mistake if a process works on one."""
        runs = [path for path in self.path.iterdir() if (path / "outcome.json").exists() or is_run(path)]
        for run in [path for path in runs if not path.is_symlink()]:
            with held(self.path, f".{run.name}.lock"), held(run):
                # First, so that a kill leaves no outcome without its run.
                (run / "outcome.json").unlink(missing_ok=True)
                delete_run(run)
                (run / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the user has put something there
                run.rmdir()

    def _require_same(self, run: Run, stored: dict):
        wanted = self.made_by(run)
        settings = configure({name: stored[name] for name in SETTINGS if name in stored})
        stored = resolved(settings) | {name: stored.get(name) for name in ("code", "corpus")}
        for name in (name for name in wanted if stored[name] != wanted[name]):
            place = self.path / run.name
            if name == "code":
                reason = f"the code has changed since a run began ({place})"
            else:
                reason = f"a run has another {name} ({stored[name]}, not {wanted[name]}, in {place})"
            raise Mistake(f"{reason}. Name another --out, or do all again by --overwrite.")


def _shown(folder: Path) -> list[Path]:
    """What is in a folder, if there is one, but for hidden files."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def default_folder(plan: Plan, code: dict[tuple[str, int | None], str], corpus: str) -> Folder:
    """runs/compare-ENTRIES, with a number: the first that is free or has this very comparison."""
    name = folder_name("-".join(["max-rate" if plan.ramp else "compare", *plan.entries]))
    for number in itertools.count(1):
        folder = Folder(Path("runs", name if number == 1 else f"{name}-{number}"), code, corpus)
        with contextlib.suppress(Mistake):
            folder.check(plan)
            break
    return folder
