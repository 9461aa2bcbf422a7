"""How far all runs of a comparison are, also those that other processes do."""

import collections
import time

from gpt.training.outcomes import Folder
from gpt.training.plan import Plan, Run
from gpt.training.progress import Progress


class Overall(Progress):
    """The progress of all runs, also of those that other processes do. A line tells the end of each run, and one how
    long all will take."""

    def __init__(self, plan: Plan, folder: Folder, counts: dict, processes: int):
        super().__init__(1)
        self.plan, self.folder, self.counts, self.processes = plan, folder, counts, processes
        self._ended = {run.name for run in plan.runs(folder.loss_of) if folder.outcome(run)}
        self._run: Run | None = None
        self._clock: list[tuple[int, float]] = []  # steps and seconds at the first lines of the first run
        self._looked = 0.0
        self.look()

    def look(self):
        """Look at what all processes have done."""
        runs = self.plan.runs(self.folder.loss_of)
        steps = runs[0].config.steps  # of every run
        ended = all(self.folder.outcome(run) for run in runs)
        total = len(runs) if ended else self.plan.expected(runs)
        self.at(sum(map(self.folder.steps_done, runs)), total * steps)
        for run in runs:
            outcome = self.folder.outcome(run)
            if outcome and run.name not in self._ended:
                self._ended.add(run.name)
                losses = "validation loss {val_loss:.4f}; best {best_val_loss:.4f} at {best_step}"
                line = losses if outcome["diverged"] is None else "diverged at step {diverged}"
                self.write(f"{self._label(run, runs)}{line.format(**outcome)}; {len(self._ended)} of {total} done")
        self._looked = time.monotonic()

    def begin_run(self, run: Run):
        """Name the run whose lines come next."""
        self.label, self._run = self._label(run, self.plan.runs(self.folder.loss_of)), run

    @staticmethod
    def _label(run: Run, runs: list[Run]) -> str:
        return f"{run.name.ljust(max(len(each.name) for each in runs))}  "

    def begin(self, text: str, warnings: list[str]):
        super().begin(text, [] if self.plan.ramp else warnings)  # a ramp is all warm-up

    def log(self, line: str, evaluated: bool):
        super().log(line, evaluated)
        if self._run and len(self._clock) < 2:
            self._clock.append((self.folder.steps_done(self._run), time.monotonic()))
            if len(self._clock) == 2:
                self._foretell(self._run)
        if time.monotonic() - self._looked > 1:
            self.look()

    def _foretell(self, run: Run):
        """Say how long all will take: a step is taken to cost as much as the model has parameters."""
        (before, start), (after, end) = self._clock
        if after > before and end > start:
            runs = self.plan.runs(self.folder.loss_of)
            steps, known = run.config.steps, collections.Counter((each.entry, each.depth) for each in runs)
            left = sum((steps - self.folder.steps_done(each)) * self._cost(each.entry, each.depth) for each in runs)
            left += sum(max(0, self.plan.runs_of_each - known[key]) * steps * self._cost(*key) for key in self.counts)
            speed = (after - before) * self._cost(run.entry, run.depth) * self.processes / (end - start)
            self.write(f"all will take about {_duration(left / speed)}")

    def _cost(self, entry: str, depth: int | None) -> int:
        return self.counts[entry, depth]["parameters"]


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
