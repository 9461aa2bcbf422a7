"""The results of a comparison, which trains several placements with several seeds: their numbers, and a table."""

import math
import statistics
from collections.abc import Iterable

CHANCE = 0.05  # a difference that chance makes more often than this is within the noise
SHORT = 4  # the columns of a table that fit a terminal
LEGEND = (
    "Losses: mean ± standard deviation over the seeds in which the run did not diverge. Differences: mean ± standard "
    "error over the seeds in which neither run diverged. p: paired t-test. A difference is called lower or higher if "
    "p < 0.05, which chance alone brings about in one comparison of twenty. tokens/s: median over seeds; other work on "
    "the machine lowers it."
)


def students_p(t: float, freedom: int) -> float:
    """How often chance makes Student's t, with so many degrees of freedom, as far from 0 as `t` (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


def paired(differences: list[float]) -> dict:
    """The mean of the differences, one for each seed; its standard error; the p of a paired t-test, which is how often
    chance alone makes a mean so far from 0; how many are below 0. With one seed, error and p are None."""
    count, mean = len(differences), statistics.fmean(differences)
    test = {"mean": mean, "error": None, "p": None, "lower": sum(d < 0 for d in differences), "seeds": count}
    if count > 1:
        error = statistics.stdev(differences) / math.sqrt(count)
        test |= {"error": error, "p": students_p(mean / error, count - 1) if error else float(mean == 0)}
    return test


def summarize(placements: list[str], seeds: list[int], runs: Iterable[dict]) -> list[dict]:
    """One entry for each placement: means over its runs that did not diverge, and paired differences to the first
    placement, over the seeds in which that did not diverge either. `runs` are outcomes, as results.json has them."""
    table, outcome = [], {(run["norm"], run["seed"]): run for run in runs}
    for placement in placements:
        outcomes = [outcome[placement, seed] for seed in seeds]
        ended = [run for run in outcomes if run["diverged"] is None]
        pairs = [(run, outcome[placements[0], run["seed"]]) for run in ended if placement != placements[0]]
        differences = [run["val_loss"] - first["val_loss"] for run, first in pairs if first["diverged"] is None]
        losses = [run["val_loss"] for run in ended]
        speeds = [run["tokens_per_s"] for run in outcomes if run["tokens_per_s"]]
        entry = {
            "norm": placement,
            "val_loss": statistics.fmean(losses) if ended else None,
            "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
            "best_val_loss": statistics.fmean(run["best_val_loss"] for run in ended) if ended else None,
            "diverged": [run["diverged"] for run in outcomes if run["diverged"] is not None],
            "difference": paired(differences) if differences else None,
            "tokens_per_s": round(statistics.median(speeds)) if speeds else None,
        }
        table.append(entry)
    return table


def rows(table: list[dict], seeds: list[int], unit: str) -> list[list[str]]:
    """The head and the rows of a table to read, from the entries of `summarize`, to which the numbers of "parameters"
    and of those "in_norms" are added. The losses are in nats per `unit`."""
    first = table[0]["norm"]
    head = ["", f"validation loss, nats per {unit}", f"difference to {first}", "result"]
    cells = [[*head, "best", f"lower than {first}", "parameters", "in norms", "tokens/s"]]
    for entry in table:
        row = [f"`{entry['norm']}`", _number(entry["val_loss"], entry["deviation"])]
        difference = entry["difference"]
        row += [_number(difference["mean"], difference["error"], "+") if difference else ""]
        row += [_verdict(entry, first, len(seeds)), _number(entry["best_val_loss"])]
        row += [f"{difference['lower']} of {difference['seeds']}" if difference else ""]
        counts = (entry[name] for name in ("parameters", "in_norms", "tokens_per_s"))
        cells.append(row + ["" if count is None else f"{count:,}" for count in counts])
    return cells


def markdown(cells: list[list[str]]) -> str:
    """A head and rows as a table in Markdown, aligned, so that it is easy to read as plain text."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _number(mean: float | None, spread: float | None = None, sign: str = "") -> str:
    return "" if mean is None else f"{mean:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _verdict(entry: dict, first: str, seeds: int) -> str:
    """What the numbers of a placement say, in words: whether it diverged, and whether its loss differs."""
    words, difference = [], entry["difference"]
    if entry["diverged"]:
        steps = ", ".join(map(str, entry["diverged"]))
        words.append(f"diverged in {len(entry['diverged'])} of {seeds} runs (at step {steps})")
    if difference is None:
        if entry["norm"] != first and entry["val_loss"] is not None:
            words.append(f"{first} diverged where {entry['norm']} ended: name another placement first")
    elif difference["p"] is None:
        words.append("one seed says nothing about noise")
    elif difference["mean"] == difference["error"] == 0:
        words.append(f"the same losses as {first}")
    else:
        p = "p < 0.001" if difference["p"] < 0.001 else f"p = {difference['p']:.2g}"
        side = f"{'lower' if difference['mean'] < 0 else 'higher'} than {first}"
        noise = f"within the noise of {difference['seeds']} seeds"
        words.append(f"{side if difference['p'] < CHANCE else noise}, {p}")
    return "; ".join(words)
