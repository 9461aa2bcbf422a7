"""The summary of a comparison (gpt/study/comparison.py) as tables.

A table is a list of rows of cells, which are text; the first row is the head. gpt/study/formats.py writes it."""

import math
import statistics

from gpt.study.comparison import NEAR

CHANCE = 0.05  # a difference with a lower p, corrected by Holm's method, is called lower or higher
SHORT = 4  # the columns of `depth_table` that fit a terminal


def depth_table(summary: list[dict], depth: int | None, unit: str) -> list[list[str]]:
    """All that is known of the entries at one depth. The losses are in nats per `unit`."""
    table = [entry for entry in summary if entry["depth"] == depth]
    first = table[0]["entry"]
    head = ["" if depth is None else blocks(depth), f"validation loss, nats per {unit}"]
    head += [f"difference to {first}", "result"]
    chosen = any(entry["rates"] for entry in table)
    head += ["seeds", f"chosen rate (within {NEAR} of its loss)" if chosen else "rate"]
    head += ["lowest on the way", f"lower than {first}", "p, uncorrected"]
    head += ["spikes (loss, gradient)", "unrecovered", "parameters", "of them in norms", "tokens/s"]
    cells = [head]
    for entry in table:
        difference = entry["difference"]
        row = [f"`{entry['entry']}`", _number(entry["val_loss"], entry["deviation"]), _difference(entry)]
        ended = entry["runs"] - len(entry["diverged"])
        row += [_result(entry, first), f"{ended} of {entry['runs']}", _rate(entry), _number(entry["best_val_loss"])]
        row += [f"{difference['lower']} of {difference['seeds']}" if difference else ""]
        row += [_p(difference["p"]) if difference else ""]
        row += [f"{entry['loss_spikes']}, {entry['grad_norm_spikes']}" if entry["judged_spikes"] else ""]
        row += [f"{entry['unrecovered']}" if entry["judged_spikes"] else ""]
        counts = (entry[name] for name in ("parameters", "in_norms", "tokens_per_s"))
        cells.append(row + ["" if count is None else f"{count:,}" for count in counts])
    return cells


def joined_table(summary: list[dict]) -> list[list[str]]:
    """A row for each entry, with its loss, difference and p at each depth side by side."""
    names, depths = _names(summary), list(dict.fromkeys(entry["depth"] for entry in summary))
    chosen = any(entry["rates"] for entry in summary)
    cells = [[""], *([f"`{name}`"] for name in names)]
    by_place = {(entry["entry"], entry["depth"]): entry for entry in summary}
    for depth in depths:
        cells[0] += ["loss" if depth is None else f"{blocks(depth)}: loss", f"difference to {names[0]}", "p (Holm)"]
        cells[0] += ["rate"] if chosen else []
        for row, name in zip(cells[1:], names):
            entry = by_place[name, depth]
            failed = [f"{len(entry['diverged'])} of {entry['runs']} diverged"] if entry["diverged"] else []
            failed += [f"{entry['stuck']} of {entry['runs']} stuck"] if entry["stuck"] else []
            loss = _number(entry["val_loss"], entry["deviation"]) + (f" ({', '.join(failed)})" if failed else "")
            row += [loss.strip(), _difference(entry), _p(entry["difference"]["holm"]) if entry["difference"] else ""]
            row += ["" if entry["lr"] is None else f"{entry['lr']:g}"] if chosen else []
    return cells


def rates_table(summary: list[dict]) -> list[list[str]]:
    """The losses of the rates that were tried, the chosen rate's in bold. A run that diverged failed."""
    rates = sorted({rate for entry in summary for rate in entry["rates"]})
    cells = [["", "blocks", *(f"{rate:g}" for rate in rates)]]
    for entry in (entry for entry in summary if entry["rates"]):
        row = [f"`{entry['entry']}`", f"{entry['n_layers']}"]
        for rate in rates:
            loss = entry["rates"].get(rate)
            text = ("failed" if rate in entry["rates"] else "") if loss is None else f"{loss:.4f}"
            row.append(f"**{text}**" if text and rate == entry["lr"] else text)
        cells.append(row)
    return cells


def ramps_table(summary: list[dict]) -> list[list[str]]:
    """The largest rate that holds, and how many times the first entry's that is, paired by seed. Rates are compared by
    their ratios, so that means and spreads are geometric. Where a run held to the end of its ramp, only a bound is
    known. Runs that learned nothing are named and left out."""
    first = summary[0]["entry"]
    cells = [["", "blocks", "largest rate that holds", f"times {first}'s", "rises to", "runs"]]
    references = {entry["depth"]: entry for entry in summary if entry["entry"] == first}
    for entry in (entry for entry in summary if entry["ramps"]):
        top, reference = entry["rate_tried"], references[entry["depth"]]
        logs, held = _logs(entry)
        words = [_geometric([*logs.values()], "> " if held else "", ".3g")] if logs else []
        if 0 < held < len(logs):
            words[0] += f" ({held} of {len(logs)} held to {top:g})"
        if nothing := entry["learned_nothing"]:
            diverged = sum(step is not None for step in nothing)
            note = f" ({diverged} diverged)" if diverged else ""
            words.append(f"learned nothing in {len(nothing)} of {entry['ramps']}{note}")
        row = [f"`{entry['entry']}`", f"{entry['n_layers']}", "; ".join(words)]
        row += [_ratio(entry, reference) if entry["entry"] != first else "", f"{top:g}", f"{entry['ramps']}"]
        cells.append(row)
    return cells


def _logs(entry: dict) -> tuple[dict[int, float], int]:
    """The logarithm of the largest rate of each seed, or of the top of the ramp where a run held to it, and how many
    runs held."""
    rates = entry["largest_rate"]
    logs = {seed: math.log(entry["rate_tried"] if rate is None else rate) for seed, rate in rates.items()}
    return logs, sum(rate is None for rate in rates.values())


def _ratio(entry: dict, reference: dict) -> str:
    """The ratio of two entries' largest rates, paired by seed. It is a bound where only one of the two has runs that
    held to the end, and not known where both have."""
    (logs, _), (others, _) = _logs(entry), _logs(reference)
    both = [seed for seed in logs if seed in others]
    held = tuple(any(each["largest_rate"][seed] is None for seed in both) for each in (entry, reference))
    if not both or all(held):
        return ""
    return _geometric([logs[seed] - others[seed] for seed in both], "> " if held[0] else "< " if held[1] else "", ".2g")


def _geometric(logs: list[float], bound: str, digits: str) -> str:
    """The geometric mean, and the geometric standard deviation if it is no bound."""
    spread = f" ×/÷ {math.exp(statistics.stdev(logs)):.2f}" if len(logs) > 1 and not bound else ""
    return f"{bound}{math.exp(statistics.fmean(logs)):{digits}}{spread}"


def blocks(depth: int) -> str:
    """The depth in words."""
    return f"{depth} block{'s' * (depth != 1)}"


def _names(summary: list[dict]) -> list[str]:
    return list(dict.fromkeys(entry["entry"] for entry in summary))


def _number(mean: float | None, spread: float | None = None, sign: str = "") -> str:
    return "" if mean is None else f"{mean:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _difference(entry: dict) -> str:
    difference = entry["difference"]
    return _number(difference["mean"], difference["error"], "+") if difference else ""


def _p(p: float | None) -> str:
    """p with so many digits that it is on the same side of CHANCE as what is printed."""
    if p is None:
        return ""
    if p < 0.01:
        return "< 0.001" if p < 0.001 else f"{p:.4f}"
    decimals = next(n for n in range(3, 20) if (float(f"{p:.{n}f}") < CHANCE) == (p < CHANCE))
    return f"{p:.{decimals}f}"


def _rate(entry: dict) -> str:
    """The rate of an entry, the span of those as good, and whether this reaches an end of those tried."""
    if entry["lr"] is None:
        return ""
    low, high = entry["near"] or (entry["lr"], entry["lr"])
    notes = [f"{low:g} to {high:g}"] if low < high else []
    notes += [f"not bounded {entry['edge']}"] if entry["edge"] else []
    notes += ["all tried diverged"] if entry["rates"] and entry["near"] is None else []
    return f"{entry['lr']:g}" + (f" ({', '.join(notes)})" if notes else "")


def _result(entry: dict, first: str) -> str:
    """What the numbers of an entry say: whether runs failed, and whether its loss differs from the first one's."""
    words, difference = [], entry["difference"]
    if entry["diverged"]:
        steps = ", ".join(map(str, entry["diverged"]))
        words.append(f"diverged in {len(entry['diverged'])} of {entry['runs']} runs (seen by step {steps})")
    if entry["stuck"]:
        words.append(f"stuck in {entry['stuck']} of {entry['runs']} runs")
    if difference is None:
        if entry["entry"] != first and entry["val_loss"] is not None:
            words.append(f"no seed in which both {first} and {entry['entry']} ended")
    elif difference["mean"] == 0 and not difference["error"]:
        words.append(f"the same loss as {first}")
    elif difference["untested"]:
        words.append(f"not tested: {difference['untested']}")
    elif difference["seeds"] == 1:
        words.append("one seed says nothing about noise")
    else:
        side = f"{'lower' if difference['mean'] < 0 else 'higher'} than {first}"
        if difference["holm"] is None:
            words.append(f"{side} by the same amount in {difference['seeds']} seeds, no test")
        else:
            p = f"p {_p(difference['holm'])}" if difference["holm"] < 0.001 else f"p = {_p(difference['holm'])}"
            same = f"not told apart by {difference['seeds']} seeds"
            words.append(f"{side if difference['holm'] < CHANCE else same}, {p}")
    return "; ".join(words)
