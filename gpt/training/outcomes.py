"""A comparison's folder: a folder for each run, and in it the run's outcome, of which all tables are made."""

import contextlib
import itertools
import json
import math
import time
from pathlib import Path

from gpt.config import Mistake
from gpt.files import read_json, write
from gpt.screen import tell
from gpt.training.entries import folder_name, resolved
from gpt.training.lock import Held, held
from gpt.training.plan import Plan, Run
from gpt.training.run import checkpoints, delete_run
from gpt.training.settings import TrainConfig

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
    "tokens_per_s": WHOLE + NONE,
}


class Other(Mistake):
    """A folder is not this comparison's, or has runs that were made otherwise. The `reason` is without the remedy."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(f"{reason}. {remedy}")
        self.reason = reason


class Folder:
    """The runs of a comparison in the folder `path`. `code` has the checksum of the code that decides the runs of an
    entry at a depth, `corpus` is that of the corpus. A run that other code, settings or another corpus made is refused,
    so that a table mixes none of them in silence: every method that reads one raises Other for it, and Mistake for a
    damaged one."""

    def __init__(self, path: Path, code: dict[tuple[str, int | None], str], corpus: str):
        self.path, self.code, self.corpus = path, code, corpus
        self._outcomes: dict[str, dict] = {}

    def made_by(self, run: Run) -> dict:
        """What decides a run: its settings, the code and the corpus, wherever that lies."""
        return self._decides(run.config, self.code[run.entry, run.depth], self.corpus)

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

    def _loss_if_ours(self, run: Run) -> float | None:
        with contextlib.suppress(Other):
            return self.loss_of(run)
        return None

    def add(self, run: Run, results: dict):
        """Write the outcome of a run, with these results."""
        first = {"run": run.name, "entry": run.entry, "depth": run.depth, "part": run.part}
        write(self.path / run.name / "outcome.json", json.dumps(first | results | self.made_by(run), indent=1))

    def begun(self, run: Run) -> bool:
        """Whether a run has a checkpoint to go on from."""
        from gpt.training.checkpoint import look_up, read_state

        folder = self.path / run.name
        if not checkpoints(folder):
            return False
        try:
            state, config = look_up(read_state, folder, "last")
        except Mistake as error:
            raise Mistake(f"{error} Or delete {folder}, and it is done again.") from None
        self._require_same(run, self._decides(config, state.get("code"), state.get("corpus")))
        return True

    def steps_done(self, run: Run) -> int:
        """The steps that a run has done, here or in another process, as far as it has logged them."""
        if run.name in self._outcomes:
            return run.config.steps
        step = 0
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # it is just beginning
            with open(self.path / run.name / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, 2) - 2000))
                step = json.loads(file.read().splitlines()[-1])["step"]
        return step

    def claim(self, run: str):
        """A context in which no other process does the run of this name. Raises Held if one does."""
        return held(self.path, f".{run}.lock")

    def claimed(self) -> list[Path]:
        """The folders of the comparison's runs, be they there or not: each has a file for `claim` beside it."""
        locks = self.path.glob(".?*.lock") if self.path.is_dir() else []
        return [path.with_name(path.name[1:].removesuffix(".lock")) for path in sorted(locks)]

    def require_ours(self):
        """Raise Other if the folder has something in it, but no run of a comparison."""
        shown = self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir())
        if self.path.is_file() or (shown and not self.claimed()):
            place = self.path.absolute()
            raise Other(f"the output folder is not a comparison ({place})", "Name another with --out.")

    @contextlib.contextmanager
    def turn(self):
        """A context in which no other process writes the comparison's own files; it waits until none does. Its value
        is whether the file system has locks."""
        with contextlib.ExitStack() as stack:
            while True:
                with contextlib.suppress(Held):
                    locked = stack.enter_context(held(self.path))
                    break
                time.sleep(0.1)
            yield locked

    def check(self, plan: Plan):
        """Raise Other if the folder is no comparison's, or has one of these runs and it was made otherwise."""
        self.require_ours()
        others, reasons = [], []
        for run in plan.runs(self._loss_if_ours):
            try:
                if self.outcome(run) is None:
                    self.begun(run)
            except Other as error:
                others.append(run.name)
                reasons.append(error.reason)
        if others:
            more = f" and {len(others) - 1} more ({', '.join(others[1:9])})" if len(others) > 1 else ""
            remedy = "Delete these folders, name another --out, or do all again by --overwrite."
            raise Other(reasons[0] + more, remedy)

    def make(self):
        """Make the folder, if need be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.path.absolute()}: {error.strerror}"
            raise Mistake(f"cannot make the folder ({reason}). Name another.") from None

    def clear(self):
        """Delete the outcomes and runs of the folder, but no other file. Raises Held if a process works on one."""
        self.require_ours()
        runs = [path for path in self.claimed() if path.is_dir() and not path.is_symlink()]
        with contextlib.ExitStack() as stack:
            for run in runs:
                stack.enter_context(self.claim(run.name))
            for run in runs:
                with held(run):
                    # First, so that a kill leaves no outcome without its run.
                    (run / "outcome.json").unlink(missing_ok=True)
                    delete_run(run)
                with contextlib.suppress(OSError):  # the user has put something there
                    (run / ".lock").unlink(missing_ok=True)
                    run.rmdir()

    @staticmethod
    def _decides(config: TrainConfig, code: str | None, corpus: str | None) -> dict:
        settings = {name: value for name, value in resolved(config).items() if name != "data"}
        return settings | {"code": code, "corpus": corpus}

    def _require_same(self, run: Run, stored: dict):
        for name, wanted in self.made_by(run).items():
            if stored.get(name) != wanted:
                place = self.path / run.name
                reason = f"a run has another {name} ({stored.get(name)}, not {wanted}, in {place})"
                if name == "code":
                    reason = f"the code has changed since a run began ({place})"
                raise Other(reason, "Name another --out, or do all again by --overwrite.")


def default_folder(plan: Plan, code: dict[tuple[str, int | None], str], corpus: str) -> Folder:
    """runs/compare-ENTRIES, with a number: the first that is free or has this very comparison. Says why it is not the
    one before."""
    words = ["max-rate" if plan.ramp else "compare", *plan.entries]
    words += ["rates"] * (plan.rates is not None) + ["depths"] * (plan.depths != [None])
    for number in itertools.count(1):
        name = "-".join([folder_name("-".join(words)), *([str(number)] if number > 1 else [])])
        folder = Folder(Path("runs", name), code, corpus)
        try:
            folder.check(plan)
            break
        except Other as error:
            reason = error.reason
    if number > 1:
        tell(f"a new comparison: {reason}")
    return folder
