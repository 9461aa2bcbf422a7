"""The pictures. matplotlib is imported here and nowhere else."""
# ruff: noqa: E402

import collections
import math
import os
import statistics
import warnings
from pathlib import Path

# No screen is needed, and matplotlib cannot be imported where this names a backend that is not there.
backend = os.environ.pop("MPLBACKEND", None)
from matplotlib import style
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure  # pyplot takes as long again to import, and looks for a screen

os.environ |= {} if backend is None else {"MPLBACKEND": backend}

from gpt.files import new_file

# A user's own settings, as LaTeX for all text, may not work here.
plain = style.context("default", after_reset=True)

# Okabe and Ito's colours, which colour-blind readers can tell apart. Further lines repeat them with dashes.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]


@plain
def depth_lines(panels: dict[str, dict[str, list[float]]], title: str, path: Path, start=1, counted="block", linear=()):
    """One log-scaled panel for each entry, {what is measured: {line's name: values by depth}}, saved to `path`. Panels
    in `linear` are not log-scaled. `start` is the depth of the first value; depth is `counted` in blocks or layers."""
    figure, axes = _panels(panels, title)
    for axis, (measured, lines) in zip(axes, panels.items()):
        for number, (name, values) in enumerate(lines.items()):
            depths = range(start, start + len(values))
            axis.plot(depths, values, marker="o", label=name, **_look(number))
        axis.set(xlabel=counted, yscale="linear" if measured in linear else "log")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xticks([depth for depth in axis.get_xticks() if start <= depth <= depths[-1]])
        _name_lines(axis)
    _save(figure, path)


@plain
def bands(panels: dict[str, dict[str, list[dict[int, float]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: {line's name: [values by step, for each seed]}}: the mean of the
    seeds, and the range between the lowest and the highest as a band."""
    figure, axes = _panels(panels, title)
    for axis, lines in zip(axes, panels.values()):
        late: list[float] = []
        for number, (name, seeds) in enumerate(lines.items()):
            steps = sorted(set.intersection(*map(set, seeds)))
            by_step = {step: [values[step] for values in seeds] for step in steps}
            _band(axis, number, name, by_step)
            late += [value for step, values in by_step.items() if step >= steps[-1] / 5 for value in values]
        # Losses fall so far in the first steps that what differs later would not be visible.
        if late := [value for value in late if math.isfinite(value)]:
            margin = 0.05 * (max(late) - min(late)) + 1e-3
            axis.set_ylim(min(late) - margin, max(late) + margin)
        axis.set_xlabel("step")
        _name_lines(axis)
    _save(figure, path)


@plain
def rates(panels: dict[str, dict[str, tuple[dict[float, float | None], float | None]]], title: str, path: Path):
    """One panel for each entry, {what is measured: {line's name: ({rate: loss}, chosen rate)}}, over log-scaled rates.
    A ring marks the chosen rate. A loss of None, of a run that diverged, is a cross at the top."""
    figure, axes = _panels(panels, title)
    for axis, lines in zip(axes, panels.values()):
        by_rate = {name: {rate: [losses[rate]] for rate in losses} for name, (losses, _) in lines.items()}
        _over(axis, "learning rate", by_rate, base=10)
        for number, (losses, chosen) in enumerate(lines.values()):
            if chosen is not None and losses.get(chosen) is not None:
                axis.scatter(chosen, losses[chosen], s=60, facecolors="none", edgecolors=_look(number)["color"])
    _save(figure, path)


@plain
def depths(panels: dict[str, dict[str, dict[int, list[float | None]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: {line's name: {blocks: losses of the seeds}}}: their mean and range
    over log-scaled depths. A loss of None, of a run that diverged, is a cross at the top."""
    figure, axes = _panels(panels, title)
    for axis, lines in zip(axes, panels.values()):
        _over(axis, "blocks", lines, base=2)
    _save(figure, path)


@plain
def ramps(panels: dict[str, dict[str, tuple[list[float], list[float | None], float | None]]], title: str, path: Path):
    """One panel for each entry, {what is measured: {line's name: (rates by step, losses by step, largest rate)}}: the
    mean of ten losses over log-scaled rates. A cross marks the largest rate that holds, if that is not None; from there
    on the line is faint. A loss of None is no number."""
    figure, axes = _panels(panels, title)
    for axis, lines in zip(axes, panels.values()):
        # The losses of the first steps, at small rates, are so high that what differs later would not be visible.
        start = min(rates[-1] if largest is None else largest for rates, _, largest in lines.values()) / 2
        shown = []
        for number, (name, (rates, losses, largest)) in enumerate(lines.items()):
            smooth, look = _smooth(losses, 10), _look(number)
            end = len(rates) if largest is None else sum(rate < largest for rate in rates) + 1
            axis.plot(rates[end - 1 :], smooth[end - 1 :], alpha=0.25, **look)
            axis.plot(rates[:end], smooth[:end], label=name, **look)
            if largest is not None:
                axis.plot(rates[end - 1 : end], smooth[end - 1 : end], "x", color=look["color"])
            shown += [loss for rate, loss in zip(rates[:end], smooth) if rate >= start and math.isfinite(loss)]
        axis.set(xlabel="learning rate", xscale="log", xlim=(start, None))
        axis.minorticks_off()
        ticks = [start * 2**number for number in range(5)]
        axis.set(xticks=ticks, xticklabels=[f"{tick:.2g}" for tick in ticks])
        if shown:
            axis.set_ylim(min(shown) - 0.1, max(shown) + 0.1)
        _name_lines(axis)
    _save(figure, path)


@plain
def depth_by_step(panels: dict[str, tuple[list[int], list[list[float]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: (steps, values by step and depth)}: depth upwards, steps to the
    right, the values as colours on a log scale."""
    figure, axes = _panels(panels, title)
    for axis, (measured, (steps, values)) in zip(axes, panels.items()):
        depths = range(1, len(values[0]) + 1)
        mesh = axis.pcolormesh(steps, depths, list(zip(*values)), norm="log", cmap="cividis", shading="nearest")
        axis.set(xlabel="step", ylabel="block")
        axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(mesh, ax=axis, label=measured)
    _save(figure, path)


@plain
def training_curve(records: list[dict], unit: str, path: Path):
    """Loss, in nats per `unit`, and rate of the lines of a metrics.jsonl, by step."""
    figure = Figure(figsize=(7, 5))  # with fixed margins: to compute them takes as long as to draw
    margins = {"left": 0.11, "right": 0.98, "top": 0.94, "bottom": 0.1, "hspace": 0.08}
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw=margins)
    for number, (key, name) in enumerate({"loss": "training", "val_loss": "validation"}.items()):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            losses.plot(*zip(*points), label=name, marker="o" if number else "", **_look(number))
    losses.set_title(_readable(path.parent.name), parse_math=False)
    losses.set_ylabel(f"loss, nats per {unit}")
    losses.legend()
    rates.plot([record["step"] for record in records], [record["lr"] for record in records], **_look(2))
    rates.set(xlabel="step", ylabel="rate", ylim=(0, None))
    for axis in (losses, rates):
        axis.grid(alpha=0.25)
    _save(figure, path)


def _panels(panels: dict, title: str):
    """A figure with a title, and its axes, one for each panel, with what is measured at their left."""
    columns = 2 if len(panels) > 1 else 1
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(6.2 * columns, 4.8 * rows), layout="constrained")
    figure.suptitle(_readable(title), parse_math=False)
    axes = [figure.add_subplot(rows, columns, place, ylabel=text) for place, text in enumerate(panels, start=1)]
    return figure, axes


def _readable(text: str) -> str:
    """The text with a question mark for each byte of a file's name that is not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _look(number: int) -> dict:
    dash = "-" if number < len(COLOURS) else "--"
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dash, "linewidth": 1.6, "markersize": 3}


def _band(axis, number: int, name: str, by_x: dict[int, list[float]]):
    """A line through the means of the values, and their range as a band."""
    look = _look(number) | {"marker": "o" if len(by_x) < 20 else ""}
    axis.plot([*by_x], [*map(statistics.fmean, by_x.values())], label=name, **look)
    lowest, highest = [*map(min, by_x.values())], [*map(max, by_x.values())]
    axis.fill_between([*by_x], lowest, highest, color=look["color"], alpha=0.2, linewidth=0)


def _over(axis, label: str, lines: dict[str, dict], base: int):
    """Lines with bands from {line's name: {x: values}}, over a log-scaled x with a tick for each, named at their ends.
    For each x of a line with a None there is a cross above all lines; those of one x stand one below the other."""
    failed = [(x, number) for number, line in enumerate(lines.values()) for x, values in line.items() if None in values]
    for number, (name, line) in enumerate(lines.items()):
        ended = {x: [value for value in line[x] if value is not None] for x in sorted(line)}
        _band(axis, number, name, {x: values for x, values in ended.items() if values})
    left = collections.Counter(x for x, _ in failed)
    most = max(left.values(), default=0)
    step = 0.035 if most < 15 else 0.5 / most  # of the panel's height
    low, high = axis.get_ylim()
    axis.set_ylim(low, low + (high - low) / (1 - step * most))
    for x, number in failed:
        look = {"marker": "x" if number < len(COLOURS) else "+", "color": _look(number)["color"], "markersize": 7}
        axis.plot([x], [1 - step * (left[x] - 0.4)], transform=axis.get_xaxis_transform(), **look)
        left[x] -= 1
    xs = sorted({x for line in lines.values() for x in line})
    ticks = xs[:: 1 + len(xs) // 10]
    axis.set_xscale("log", base=base)
    axis.minorticks_off()
    axis.set(xlabel=label, xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
    _name_lines(axis)


def _smooth(losses: list[float | None], window: int) -> list[float]:
    """The mean of the numbers among the last losses, at each step; nan where there is none."""
    spans = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    numbers = [[loss for loss in span if loss is not None] for span in spans]
    return [statistics.fmean(span) if span else math.nan for span in numbers]


def _name_lines(axis):
    """Write the name of each line that has one right of all lines, at the height of its end. Names that would overlap
    are moved apart, and a thin line leads to a name that is not beside its line's end."""
    axis.grid(alpha=0.25)
    lines = [line for line in axis.lines if len(line.get_xdata()) and not line.get_label().startswith("_")]
    ends = [(*line.get_xydata()[-1], line) for line in lines]
    ends = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    # In pixels before the layout, which moves and stretches the panel a little.
    longest = max((len(line.get_label()) for *_, line in ends), default=0)
    room = min(0.45, max(0.14, (7 * longest + 14) / axis.bbox.width))  # share of the width that the names take
    right = axis.transAxes.transform((1 / (1 - room) - 0.04, 0))
    axis.set_xlim(right=axis.transData.inverted().transform(right)[0])
    height, points = 15, [axis.transData.transform((x, y)) for x, y, _ in ends]
    edge, pixels = max((x for x, _ in points), default=0), [y for _, y in points]
    for number in range(1, len(pixels)):
        pixels[number] = max(pixels[number], pixels[number - 1] + height)
    top = axis.bbox.y1 - 8
    for number in reversed(range(len(pixels))):
        pixels[number] = min(pixels[number], top)
        top = pixels[number] - height
    for (x, y, line), (left, bottom), pixel in zip(ends, points, pixels):
        place, colour = axis.transData.inverted().transform((edge, pixel)), line.get_color()
        axis.annotate(line.get_label(), place, (10, 0), textcoords="offset points", color=colour, va="center")
        if edge - left > 1 or abs(pixel - bottom) > height:
            leader = [(x, y), axis.transData.inverted().transform((edge + 9, pixel))]
            look = {"colors": colour, "linestyles": line.get_linestyle(), "linewidths": 0.6}
            axis.add_collection(LineCollection([leader], **look), autolim=False)


def _save(figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), new_file(path) as new:  # so that nobody opens half a picture
        warnings.filterwarnings("ignore", "Glyph")  # a run's name may have letters that the font lacks
        figure.savefig(new, dpi=110, format=path.suffix[1:])
