"""How steady a run was: spikes of its loss and its gradient norm, and the rate at which it leaves its path."""

import math
from collections.abc import Sequence

import numpy as np

WINDOW = 128  # steps before a step, by which it is judged to be a spike


def spikes(values: Sequence[float | None], window: int = WINDOW, deviations: float = 6) -> list[tuple[int, bool]]:
    """The spikes among the values of consecutive steps: (index of the first step, whether the value has recovered).

    A step is a spike if its value is more than `deviations` standard deviations above the mean of the `window` steps
    before it, as in OLMo-core's stability monitor, or if it is None or not finite. No step is judged before there are
    `window` others, and values that are not finite do not count among those. A spike lasts until a value is back at
    that mean or below it; the steps in between belong to the same spike. It has recovered if a value is back within
    the next `window` steps, and not if the values end before.
    """
    series = _floats(values)
    events: list[tuple[int, bool]] = []
    step = window
    while step < len(series):
        before = series[step - window : step]
        before = before[np.isfinite(before)]
        mean, deviation = (before.mean(), before.std()) if len(before) else (math.nan, math.nan)
        if not math.isfinite(series[step]) or series[step] > mean + deviations * deviation:
            back = np.flatnonzero(series[step + 1 :] <= mean)  # False for nan
            length = 1 + int(back[0]) if len(back) else len(series)
            events.append((step, length <= window))
            step += length
        step += 1
    return events


def stability(lines: Sequence[dict], window: int = WINDOW, deviations: float = 6) -> dict[str, int]:
    """The numbers of spikes in the lines of a run's steps.jsonl: "loss_spikes", "grad_norm_spikes", and "unrecovered",
    those of the loss that did not recover."""
    losses, norms = ([line[name] for line in lines] for name in ("loss", "grad_norm"))
    of_loss, of_norm = spikes(losses, window, deviations), spikes(norms, window, deviations)
    unrecovered = sum(not recovered for _, recovered in of_loss)
    return {"loss_spikes": len(of_loss), "grad_norm_spikes": len(of_norm), "unrecovered": unrecovered}


def largest_rate(
    losses: Sequence[float | None],
    rates: Sequence[float],
    level: float,
    margin: float = 0.5,
    patience: int = 50,
    diverged: bool = False,
) -> float | None:
    """The learning rate at which a run whose rate rises step by step leaves its path for good; None if it never does.

    The loss of a step is here the mean of its last 10 steps. The run is off its path where that is more than `margin`
    nats above the least value so far, or above `level` after it was below. It has left for good, from the first of
    these steps on, if it is off for `patience` steps on end, or if before it is back a loss is None or not finite, or
    if the losses end before it is back. A run that `diverged` has left by its last step: of weights that are not finite
    no loss tells. A run that has `learned_nothing` has no path to leave.
    """
    series = _floats(losses)
    least, off = math.inf, 0
    for step, loss in enumerate(_means(series)):
        least = min(least, loss)  # a nan is not less
        broken = not math.isfinite(series[step])
        off = off + 1 if broken or loss > least + margin or least < level < loss else 0
        if off and (broken or off >= patience):
            return rates[step + 1 - off]
    return rates[len(series) - max(1, off)] if diverged or off else None


def learned_nothing(losses: Sequence[float | None], level: float) -> bool:
    """Whether the mean of 10 losses is never below `level`, the loss of a model that knows only how often each token
    comes, less a margin. Such a run looks steady at any rate."""
    return not any(loss < level for loss in _means(_floats(losses)))


def _means(series: np.ndarray) -> list[float]:
    """The mean of the last 10 values, or of as many as there are, at each step; nan where one of them is nan."""
    return [float(series[max(0, step - 9) : step + 1].mean()) for step in range(len(series))]


def _floats(values: Sequence[float | None]) -> np.ndarray:
    """The values as an array, with nan for None and for infinities."""
    series = np.array([math.nan if value is None else value for value in values], np.float64)
    return np.where(np.isfinite(series), series, math.nan)
