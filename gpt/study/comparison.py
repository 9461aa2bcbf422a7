"""The statistics of a comparison: of entries (a placement with settings of its own) at several depths, rates and seeds.

A comparison has one flat row for each run. Its "part" says what the run is for. "rate": it tries a learning rate, on a
seed that is not counted. "counted": it has one of the seeds. "ramp": its rate rises linearly to its "lr". "depth" is
None where the entries have depths of their own; "n_layers" is always a number.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from gpt.study.stability import WINDOW

# Nats. A rate whose loss is so close to the best one's is called as good: a convention, not a measure of noise.
NEAR = 0.02
ROUNDING = 1e-9  # nats; a smaller standard error comes from rounding, and the differences are all the same


def students_p(t: float, freedom: int) -> float:
    """The two-sided p of Student's t: how often chance makes it, with so many degrees of freedom, as far from 0 as `t`
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


def limit_of_t(p: float, freedom: int) -> float:
    """The t above 0 whose two-sided p this is, by bisection."""
    low, high = 0.0, 1.0
    while students_p(high, freedom) > p:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if students_p(middle, freedom) > p else (low, middle)
    return high


def paired(differences: list[float]) -> dict:
    """The mean of the differences, one for each seed; its standard error; the two-sided p of a paired t-test; how many
    differences are below 0. With one seed, error and p are None. Where all differences are the same, the error is 0 and
    p is None: t has no value."""
    count, mean = len(differences), statistics.fmean(differences)
    test = {"mean": mean, "error": None, "p": None, "lower": sum(d < 0 for d in differences), "seeds": count}
    if count > 1:
        error = statistics.stdev(differences) / math.sqrt(count)
        same = error < ROUNDING
        test |= {"error": 0.0 if same else error, "p": None if same else students_p(mean / error, count - 1)}
    return test


def holm(ps: list[float | None]) -> list[float | None]:
    """The p values, corrected for their number by Holm's step-down method (Holm 1979). Then chance alone brings any of
    them below 0.05 with a probability of at most 0.05, however the tests depend on each other. None, a difference that
    was not tested, stays None and is not counted."""
    tested = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        corrected[place] = largest = max(largest, min(1.0, p * (len(tested) - rank)))
    return corrected


def rates_of(rows: Iterable[dict], entry: str, depth: int | None) -> dict[float, float | None]:
    """{rate: validation loss} of the runs that try a rate, from the smallest; None if the run diverged."""
    runs = [row for row in rows if (row["part"], row["entry"], row["depth"]) == ("rate", entry, depth)]
    return dict(sorted((row["lr"], row["val_loss"] if row["diverged"] is None else None) for row in runs))


def best_rate(rates: dict[float, float | None]) -> float | None:
    """The rate with the lowest loss; the smaller of two equal ones. None if all runs diverged."""
    losses = [(loss, rate) for rate, loss in rates.items() if loss is not None]
    return min(losses)[1] if losses else None


def summarize(rows: Iterable[dict], entries: list[str], depths: Sequence[int | None], seeds: list[int]) -> list[dict]:
    """One summary for each depth and entry, from those rows that there are: means over the counted runs that did not
    diverge, and paired differences to the first entry, over the seeds in which that did not diverge either. A stuck run
    counts in the means. "holm" is a difference's p, corrected for all differences of all depths. "untested" is the
    reason why a difference has no p, if its runs are the reason."""
    rows = list(rows)
    table = [_summary(rows, entry, entries[0], depth, seeds) for depth in depths for entry in entries]
    differences = [summary["difference"] for summary in table if summary["difference"]]
    for difference, p in zip(differences, holm([difference["p"] for difference in differences])):
        difference["holm"] = p
    return table


def _summary(rows: list[dict], entry: str, first: str, depth: int | None, seeds: list[int]) -> dict:
    def counted(name: str) -> list[dict]:
        key = ("counted", name, depth)
        by_seed = {row["seed"]: row for row in rows if (row["part"], row["entry"], row["depth"]) == key}
        return [by_seed[seed] for seed in seeds if seed in by_seed]

    all_parts = [row for row in rows if (row["entry"], row["depth"]) == (entry, depth)]
    ramps = sorted((row for row in all_parts if row["part"] == "ramp"), key=lambda row: row["seed"])
    runs, others = counted(entry), counted(first)
    ended = [run for run in runs if run["diverged"] is None]
    losses = [run["val_loss"] for run in ended]
    reference = {run["seed"]: run["val_loss"] for run in others if run["diverged"] is None}
    both = [run for run in ended if run["seed"] in reference and entry != first]
    differences = [run["val_loss"] - reference[run["seed"]] for run in both]
    speeds = [run["tokens_per_s"] for run in runs if run["tokens_per_s"]]
    rates = rates_of(all_parts, entry, depth)
    sums = {key: sum(run[key] for run in runs) for key in ("stuck", "loss_spikes", "grad_norm_spikes", "unrecovered")}
    return {
        "entry": entry,
        "depth": depth,
        "n_layers": all_parts[0]["n_layers"] if all_parts else depth,
        "lr": runs[0]["lr"] if runs else None,
        "runs": len(runs),
        "val_loss": statistics.fmean(losses) if ended else None,
        "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "best_val_loss": statistics.fmean(run["best_val_loss"] for run in ended) if ended else None,
        "diverged": [run["diverged"] for run in runs if run["diverged"] is not None],
        **sums,
        "judged_spikes": any((run["diverged"] or run["steps"]) > WINDOW for run in runs),
        "judged_stuck": all(run["steps"] >= run["warmup_steps"] + 100 for run in runs),  # as gpt/training/report.py
        "difference": _tested(differences, runs, others) if differences else None,
        "parameters": all_parts[0]["parameters"] if all_parts else None,
        "in_norms": all_parts[0]["in_norms"] if all_parts else None,
        "tokens_per_s": round(statistics.median(speeds)) if speeds else None,
        "rates": rates,
        **_around_the_best(rates),
        "ramps": len(ramps),
        "learned_nothing": [run["diverged"] for run in ramps if run["stuck"]],
        "largest_rate": {run["seed"]: run["largest_rate"] for run in ramps if not run["stuck"]},
        "rate_tried": ramps[0]["lr"] if ramps else None,
    }


def _tested(differences: list[float], runs: list[dict], others: list[dict]) -> dict:
    """The paired test. There is no p where a run diverged: the other seeds may be the easier ones. There is none where
    some runs of an entry are stuck, either: losses of two kinds are not normally distributed."""
    stuck = [(sum(run["stuck"] for run in each), len(each)) for each in (runs, others)]
    reason = "some runs are stuck" if any(0 < some < count for some, count in stuck) else None
    reason = "runs diverged" if any(run["diverged"] is not None for run in [*runs, *others]) else reason
    return paired(differences) | {"untested": reason} | ({"p": None} if reason else {})


def _around_the_best(rates: dict[float, float | None]) -> dict:
    """What is known of other rates. "near": the lowest and the highest of the rates around the best one, without a gap,
    that are as good. "edge": where these reach an end of the rates tried, "above", "below" or "above or below": a
    better one may lie beyond."""
    best = best_rate(rates)
    if best is None:
        return {"near": None, "edge": None}
    order = sorted(rates)
    place = order.index(best)
    limit = min(loss for loss in rates.values() if loss is not None) + NEAR
    good = [loss is not None and loss <= limit for loss in (rates[rate] for rate in order)]
    low = high = place
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(order) and good[high + 1]:
        high += 1
    edges = ["above"] * (high == len(order) - 1) + ["below"] * (low == 0)
    return {"near": [order[low], order[high]], "edge": " or ".join(edges) or None}
