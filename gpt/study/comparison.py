"""What comes out of the same training for several placements and seeds, in numbers and in words."""

import math
import statistics

CHANCE = 0.05  # a difference that chance alone makes more often than this is within the noise
LEGEND = (
    "Losses: mean ± standard deviation over the seeds that ended. Differences: mean ± standard error over the seeds in "
    "which both ended, by a paired t-test at 5%: where there is no difference, one sentence in twenty says lower or "
    "higher. tokens/s: median, of a machine that may have had other work."
)


def run_name(norm: str, seed: int) -> str:
    """Of a run in a comparison's folder, and of its outcome in results.json."""
    return f"{norm}-{seed}"


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
    """The mean of differences, one for each seed; its standard error; how many are below 0; how often chance alone
    makes a mean so far from 0 (paired t-test). With one seed the error and the chance are None."""
    count, mean = len(differences), statistics.fmean(differences)
    found = {"mean": mean, "error": None, "p": None, "lower": sum(d < 0 for d in differences), "seeds": count}
    if count > 1:
        error = statistics.stdev(differences) / math.sqrt(count)
        p = students_p(mean / error, count - 1) if error else float(mean == 0)
        found |= {"error": error, "p": p}
    return found


def summarize(names: list[str], seeds: list[int], runs: dict) -> list[dict]:
    """One entry for each placement: means of the losses over the seeds that ended, paired differences to the first
    placement over those in which both ended. `runs` holds outcomes by `run_name`."""
    table, first = [], names[0]
    for norm in names:
        own = [runs[run_name(norm, seed)] for seed in seeds]
        ended = [run for run in own if run["diverged"] is None]
        losses = [run["val_loss"] for run in ended]
        entry = {
            "norm": norm,
            "val_loss": statistics.fmean(losses) if losses else None,
            "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
            "best_val_loss": statistics.fmean(run["best_val_loss"] for run in ended) if ended else None,
            "diverged": [run["diverged"] for run in own if run["diverged"] is not None],
            "difference": None,
        }
        speeds = [run["tokens_per_s"] for run in own if run["tokens_per_s"]]
        entry["tokens_per_s"] = round(statistics.median(speeds)) if speeds else None
        pairs = [(run, runs[run_name(first, run["seed"])]) for run in ended]
        differences = [run["val_loss"] - other["val_loss"] for run, other in pairs if other["diverged"] is None]
        if norm != first and differences:
            entry["difference"] = paired(differences)
        table.append(entry)
    return table


def spread(mean: float | None, around: float | None, sign: str = "") -> str:
    """A mean and what is given with it, as text."""
    if mean is None:
        return ""
    return f"{mean:{sign}.4f}" + ("" if around is None else f" ± {around:.4f}")


def markdown(table: list[dict], seeds: list[int], unit: str) -> str:
    """The table, whose entries have their numbers of "parameters" and of those "in_norms" too, and what it says about
    noise."""
    first = table[0]["norm"]
    head = ["", "parameters", "in norms", f"validation loss, nats per {unit}", "best", f"difference to {first}"]
    head += [f"lower than {first}", "tokens/s", "stable"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for entry in table:
        difference, diverged = entry["difference"] or {}, entry["diverged"]
        cells = [f"`{entry['norm']}`", f"{entry['parameters']:,}", f"{entry['in_norms']:,}"]
        cells += [spread(entry["val_loss"], entry["deviation"]), spread(entry["best_val_loss"], None)]
        cells += [spread(difference.get("mean"), difference.get("error"), "+")]
        cells += [f"{difference['lower']} of {difference['seeds']}" if difference else ""]
        cells += [f"{entry['tokens_per_s']:,}" if entry["tokens_per_s"] else ""]
        cells += [f"{len(diverged)} of {len(seeds)} diverged" if diverged else "yes"]
        lines.append("| " + " | ".join(cells) + " |")
    words = [(entry["norm"], verdict(entry, first, len(seeds))) for entry in table]
    said = [f"- `{norm}`: {text}." for norm, text in words if text]
    return "\n".join([*lines, "", LEGEND, *([""] if said else []), *said])


def overview(table: list[dict], seeds: list[int]) -> str:
    """The same in short, for a terminal."""
    first = table[0]["norm"]
    lines = [("", "validation loss", f"less that of {first}", "")]
    for entry in table:
        difference = entry["difference"] or {}
        losses = (
            spread(entry["val_loss"], entry["deviation"]),
            spread(difference.get("mean"), difference.get("error"), "+"),
        )
        lines.append((entry["norm"], *losses, verdict(entry, first, len(seeds))))
    widths = [max(map(len, column)) for column in list(zip(*lines))[:3]]
    return "\n".join("  ".join([*map(str.ljust, line[:3], widths), line[3]]).rstrip() for line in lines)


def verdict(entry: dict, first: str, seeds: int) -> str:
    """What is to be said of one placement; nothing of a first one that is stable."""
    said, difference = [], entry["difference"]
    if entry["diverged"]:
        steps = ", ".join(map(str, entry["diverged"]))
        said.append(f"diverged in {len(entry['diverged'])} of {seeds} runs (at step {steps})")
    if difference and difference["p"] is None:
        said.append("one pair of runs says nothing about noise")
    elif difference and difference["mean"] == difference["error"] == 0:
        said.append(f"the same losses as {first}")
    elif difference:
        p = "p < 0.001" if difference["p"] < 0.001 else f"p = {difference['p']:.2g}"
        than = f"{'lower' if difference['mean'] < 0 else 'higher'} than {first}, {p}"
        within = f"within the noise of {difference['seeds']} seeds, {p}: more of them would have to tell"
        said.append(than if difference["p"] < CHANCE else within)
    elif entry["norm"] != first and entry["val_loss"] is not None:
        said.append(f"no seed in which {first} ended as well: name another placement first")
    return "; ".join(said)
