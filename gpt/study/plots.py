"""The pictures. matplotlib is imported here and nowhere else."""

import math
import statistics
import warnings
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure  # pyplot takes as long again to import, and looks for a screen

from gpt.files import new_file

# A user's own settings, as LaTeX for all text, may not work here.
plain = style.context("default", after_reset=True)

# Okabe and Ito's colours, which colour-blind readers can tell apart. Further lines repeat them with dashes.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]

# The measures of gpt/study/depth.py that are drawn.
SHOWN = {"stream": "root mean square of the stream", "stream_grad": "norm of the gradient at the stream"}


def panels_of(profiles: dict[str, dict[str, dict]]) -> dict[str, dict[str, list[float]]]:
    """The panels of `depth_lines` for {time: {line's name: depth profile}}, without what a profile lacks."""
    panels = {}
    for key, text in SHOWN.items():
        for time, by_name in profiles.items():
            if lines := {name: profile[key] for name, profile in by_name.items() if key in profile}:
                panels[f"{text} {time}".strip()] = lines
    return panels


@plain
def depth_lines(panels: dict[str, dict[str, list[float]]], title: str, path: Path, start: int = 1, counted="block"):
    """One log-scaled panel for each entry, {what is measured: {line's name: values by depth}}, saved to `path`.
    `start` is the depth of the first value; depth is `counted` in blocks or layers."""
    figure, axes = _panels(panels, title)
    for axis, lines in zip(axes, panels.values()):
        for number, (name, values) in enumerate(lines.items()):
            depths = range(start, start + len(values))
            axis.plot(depths, values, marker="o", label=name, **_look(number))
        axis.set(xlabel=counted, yscale="log")
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
            by_step = [[values[step] for values in seeds] for step in steps]
            look = _look(number) | {"marker": "o" if len(steps) < 20 else ""}
            axis.plot(steps, [*map(statistics.fmean, by_step)], label=name, **look)
            lowest, highest = [*map(min, by_step)], [*map(max, by_step)]
            axis.fill_between(steps, lowest, highest, color=look["color"], alpha=0.2, linewidth=0)
            late += [value for step, values in zip(steps, by_step) if step >= steps[-1] / 5 for value in values]
        # Losses fall so far in the first steps that what differs later would not be visible.
        if late := [value for value in late if math.isfinite(value)]:
            margin = 0.05 * (max(late) - min(late)) + 1e-3
            axis.set_ylim(min(late) - margin, max(late) + margin)
        axis.set_xlabel("step")
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
    axes = figure.subplots(rows, columns, squeeze=False).flatten()[: len(panels)]
    for axis, measured in zip(axes, panels):
        axis.set_ylabel(measured)
    return figure, axes


def _readable(text: str) -> str:
    """The text with a question mark for each byte of a file's name that is not UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _look(number: int) -> dict:
    dash = "-" if number < len(COLOURS) else "--"
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dash, "linewidth": 1.6, "markersize": 3}


def _name_lines(axis):
    """Write the name of each line at its end. Names that would overlap are moved apart."""
    axis.grid(alpha=0.25)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.17 * (right - left))
    ends = [(*line.get_xydata()[-1], line) for line in axis.lines if len(line.get_xdata())]
    ends = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    # In pixels before the layout, which moves and stretches the panel a little.
    height, pixels = 15, [axis.transData.transform((x, y))[1] for x, y, _ in ends]
    for number in range(1, len(pixels)):
        pixels[number] = max(pixels[number], pixels[number - 1] + height)
    top = axis.bbox.y1 - 8
    for number in reversed(range(len(pixels))):
        pixels[number] = min(pixels[number], top)
        top = pixels[number] - height
    for (x, _, line), pixel in zip(ends, pixels):
        place, colour = (x, axis.transData.inverted().transform((0, pixel))[1]), line.get_color()
        axis.annotate(line.get_label(), place, (8, 0), textcoords="offset points", color=colour, va="center")


def _save(figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), new_file(path) as new:  # so that nobody opens half a picture
        warnings.filterwarnings("ignore", "Glyph")  # a run's name may have letters that the font lacks
        figure.savefig(new, dpi=110, format=path.suffix[1:])
