"""The files of a comparison, from the rows of its runs: tables to read and to compute with, and pictures."""

import collections
import json
from pathlib import Path

from gpt.config import Mistake
from gpt.files import courtesy, read_lines, write
from gpt.study import comparison, formats, stability, tables
from gpt.study.legend import about, legend

Rows = list[dict]


def write_results(
    folder: Path, rows: Rows, unit: str, level: float, title: str, latex: bool
) -> tuple[list[list[list[str]]], list[str]]:
    """Write results.json and results.csv, a row for each run; results.md, how the runs were made, the tables and their
    legend; on request results.tex with the same; and the pictures. Returns the tables as cells, and the names of the
    files.

    A row has the outcome.json of a run, in a folder of its name, and "parameters" and "in_norms", their numbers; the
    order of entries and depths is that of the rows. Above the loss `level` a model knows little more than how often
    each token comes.
    """
    rows = [row | _measured(folder / row["run"], row, level) for row in rows]
    entries, depths = ([*dict.fromkeys(row[name] for row in rows)] for name in ("entry", "depth"))
    seeds = sorted({row["seed"] for row in rows if row["part"] != "rate"})
    summary = comparison.summarize(rows, entries, depths, seeds)
    if rows[0]["part"] == "ramp":
        cells = [tables.ramps_table(summary)]
    else:
        cells = [tables.depth_table(summary, depth, unit) for depth in depths]
        cells += [tables.joined_table(summary)] if len(depths) > 1 else []
        cells += [tables.rates_table(summary)] if any(each["rates"] for each in summary) else []
    opening, closing = about(rows, title), legend(summary)
    text = "\n\n".join([opening, *map(formats.markdown, cells), closing])
    texts = {"results.md": f"{text}\n", "results.json": json.dumps(rows, indent=1), "results.csv": formats.as_csv(rows)}
    if latex:
        comments = (formats.comment(words) for words in (opening, closing))
        texts["results.tex"] = "\n\n".join([next(comments), *map(formats.latex, cells), *comments]) + "\n"
    for name, content in texts.items():
        write(folder / name, content)
    pictures: list[str] = []
    with courtesy("draw the pictures"):
        _draw(folder, rows, summary, depths, unit, title, pictures)
    return cells, [*texts, *pictures]


def _measured(run: Path, row: dict, level: float) -> dict:
    """What the losses and gradient norms of all steps of a run tell."""
    lines, steps = read_lines(run / "steps.jsonl"), row["diverged"] or row["steps"]
    if [line["step"] for line in lines] != [*range(1, steps + 1)]:
        reason = f"{run / 'steps.jsonl'}: {len(lines)} lines of {steps}"
        raise Mistake(f"the losses of a run are not all there ({reason}). Delete {run}, and the run is done again.")
    measured: dict = stability.stability(lines) | {"largest_rate": None}
    if row["part"] == "ramp":
        rates, losses = _ramp(row, lines)
        diverged = row["diverged"] is not None
        if stability.learned_nothing(losses, level):
            measured["stuck"] = True
        else:
            measured["largest_rate"] = stability.largest_rate(losses, rates, level, diverged=diverged)
    return measured


def _ramp(row: dict, lines: Rows) -> tuple[list[float], list[float | None]]:
    """The rates of a run whose rate rises linearly, and its losses, by step."""
    return [row["lr"] * line["step"] / row["warmup_steps"] for line in lines], [line["loss"] for line in lines]


def _draw(folder: Path, rows: Rows, summary: list[dict], depths: list, unit: str, title: str, names: list[str]):
    """Draw the pictures of a comparison, and add their names to `names`."""
    from gpt.study import plots
    from gpt.study.depth import panels_of

    def draw(picture, panels: dict, kind: str, name: str):
        picture(panels, f"{title}: {kind}", folder / name)
        names.append(name)

    loss = {depth: f"loss, nats per {unit}{'' if depth is None else f', {tables.blocks(depth)}'}" for depth in depths}
    groups: dict[tuple, Rows] = collections.defaultdict(list)  # by depth and entry, without the runs that chose a rate
    for row in rows:
        if row["part"] != "rate":
            groups[row["depth"], row["entry"]].append(row)
    if rows[0]["part"] == "ramp":
        ramps: dict[str, dict] = {text: {} for text in loss.values()}
        for (depth, entry), (row, *_) in groups.items():
            name = f"{entry} (learned nothing)" if row["stuck"] else entry
            lines = read_lines(folder / row["run"] / "steps.jsonl")
            ramps[loss[depth]][name] = *_ramp(row, lines), row["largest_rate"]
        return draw(plots.ramps, ramps, "the rate rises, one seed", "ramps.png")
    # Of an entry, the runs that ended, or all if none did.
    shown = {key: [row for row in group if row["diverged"] is None] or group for key, group in groups.items()}
    draw(plots.bands, _curves(folder, shown, loss), "mean and range over the seeds that ended", "curves.png")
    for depth in depths:
        profiles = _profiles(folder, {entry: group[0] for (at, entry), group in shown.items() if at == depth})
        name = "depth.png" if depth is None else f"depth-{depth}-blocks.png"
        draw(plots.depth_lines, panels_of(profiles), "one seed", name)
    if any(each["rates"] for each in summary):
        rates_of: dict[str, dict] = collections.defaultdict(dict)
        for each in summary:
            rates_of[f"validation {loss[each['depth']]}"][each["entry"]] = each["rates"], each["lr"]
        draw(plots.rates, rates_of, "one seed, not counted", "rates.png")
    if len(depths) > 1:
        by_entry: dict[str, dict] = collections.defaultdict(dict)
        for (depth, entry), group in groups.items():
            by_entry[entry][depth] = [row["val_loss"] for row in group]
        panels = {f"validation loss, nats per {unit}": by_entry}
        draw(plots.depths, panels, "mean and range over the seeds that ended", "depths.png")


def _curves(folder: Path, shown: dict[tuple, Rows], loss: dict) -> dict[str, dict[str, list[dict]]]:
    """The panels of curves.png: for each depth training and validation loss, for each entry and seed by step."""
    panels: dict[str, dict] = collections.defaultdict(dict)
    for (depth, entry), group in shown.items():
        lines = [read_lines(folder / row["run"] / "metrics.jsonl") for row in group]
        for key, kind in {"loss": "training", "val_loss": "validation"}.items():
            by_seed = [{line["step"]: line[key] for line in each if key in line} for each in lines]
            panels[f"{kind} {loss[depth]}"][entry] = by_seed
    return panels


def _profiles(folder: Path, shown: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """The depth profiles of a row for each entry, by time and entry: at the start, and at the end of a run that did not
    diverge."""
    profiles: dict[str, dict] = collections.defaultdict(dict)
    for entry, row in shown.items():
        first, *_, last = 2 * read_lines(folder / row["run"] / "probe.jsonl")
        profiles["at the start"][entry] = first
        if row["diverged"] is None:
            profiles[f"at step {last['step']}"][entry] = last
    return profiles
