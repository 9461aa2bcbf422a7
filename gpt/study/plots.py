"""The pictures. matplotlib is imported here and nowhere else."""

import itertools
import math
import os
import warnings
from pathlib import Path

from matplotlib.figure import Figure  # and not pyplot, which takes as long to import again and looks for a screen

# Okabe and Ito's colours, which the colour-blind can tell apart; the last ones repeat with dashes.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]

# The measures of gpt/study/depth.py that are drawn.
SHOWN = {"stream": "root mean square of the stream", "stream_grad": "norm of the gradient at the stream"}


def depth_lines(panels: dict[str, dict[str, list[float]]], title: str, path: Path, start: int = 1, counted="block"):
    """One log-scaled panel for each entry, {what is measured: {line's name: values by depth}}, saved to `path`.
    `start` is the depth of the first value; depth is `counted` in blocks or layers."""
    figure, axes = _panels(len(panels))
    for axis, (measured, lines) in zip(axes, panels.items()):
        ends = []
        for number, (name, values) in enumerate(lines.items()):
            look = _look(number)
            axis.plot(range(start, start + len(values)), values, marker="o", markersize=3, **look)
            ends.append((start + len(values) - 1, values[-1], name, look["color"]))
        axis.set(xlabel=counted, ylabel=measured, yscale="log")
        axis.grid(alpha=0.25)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xticks([depth for depth in axis.get_xticks() if start <= depth <= start + len(values) - 1])
        _name_lines(axis, ends)
    figure.suptitle(title, parse_math=False)
    _save(figure, path)


def _panels(number: int):
    columns = min(number, 2)
    figure = Figure(figsize=(6.2 * columns, 4.8 * math.ceil(number / columns)), layout="constrained")
    return figure, figure.subplots(math.ceil(number / columns), columns, squeeze=False).flatten()


def _look(number: int) -> dict:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": "-" if number < len(COLOURS) else "--",
        "linewidth": 1.6,
    }


def _save(figure, path: Path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{path.name}")  # a picture that is looked at should not be half there
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a run's name may have letters that the font lacks
        figure.savefig(new, dpi=110)
    os.replace(new, path)


def _name_lines(axis, ends):
    """Write each name beside the end of its line, (x, y, name, colour), away from the others where they are close."""
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.17 * (right - left))
    axis.figure.canvas.draw()
    ends = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    pixels = [axis.transData.transform(end[:2])[1] for end in ends]
    for number in range(1, len(pixels)):
        pixels[number] = max(pixels[number], pixels[number - 1] + 15)
    top = axis.bbox.y1 - 8
    for number in reversed(range(len(pixels))):
        top = pixels[number] = min(pixels[number], top)
        top -= 15
    for (x, _, name, colour), pixel in zip(ends, pixels):
        y = axis.transData.inverted().transform((0, pixel))[1]
        axis.annotate(name, (x, y), xytext=(8, 0), textcoords="offset points", color=colour, va="center")


def depth_by_step(panels: dict[str, tuple[list[int], list[list[float]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: (steps, values by step and depth)}: depth upwards, steps to the
    right, the values as colours on a log scale."""
    figure, axes = _panels(len(panels))
    for axis, (measured, (steps, values)) in zip(axes, panels.items()):
        depths = range(1, len(values[0]) + 1)
        mesh = axis.pcolormesh(steps, depths, list(zip(*values)), norm="log", cmap="cividis", shading="nearest")
        axis.set(xlabel="step", ylabel="block")
        axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(mesh, ax=axis, label=measured)
    figure.suptitle(title, parse_math=False)
    _save(figure, path)


def training_curve(records: list[dict], unit: str, path: Path):
    """Loss, in nats per `unit`, and rate of the lines of a metrics.jsonl, by step."""
    figure = Figure(figsize=(7, 5))  # with margins of its own, since to compute them takes as long as to draw
    margins = {"left": 0.11, "right": 0.98, "top": 0.94, "bottom": 0.1, "hspace": 0.08}
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw=margins)
    for number, (key, name) in enumerate({"loss": "training", "val_loss": "validation"}.items()):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            losses.plot(*zip(*points), label=name, marker="o" if number else "", markersize=3, **_look(number))
    losses.set_title(path.parent.name, parse_math=False)
    losses.set_ylabel(f"loss, nats per {unit}")
    losses.legend()
    rates.plot([record["step"] for record in records], [record["lr"] for record in records], **_look(2))
    rates.set(xlabel="step", ylabel="rate", ylim=(0, None))
    for axis in (losses, rates):
        axis.grid(alpha=0.25)
    _save(figure, path)


def bands(panels: dict[str, dict[str, list[dict[int, float]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: {line's name: [values by step, for each seed]}}: the mean of the
    seeds, and the range between the lowest and the highest as a band."""
    figure, axes = _panels(len(panels))
    for axis, (measured, lines) in zip(axes, panels.items()):
        shown, ends = [], []
        for number, (name, seeds) in enumerate(lines.items()):
            steps = sorted(set.intersection(*(set(values) for values in seeds)))
            if not steps:
                continue
            by_step = [[values[step] for values in seeds] for step in steps]
            look = _look(number)
            means = [sum(values) / len(values) for values in by_step]
            axis.plot(steps, means, marker="o" if len(steps) < 20 else "", markersize=3, **look)
            ends.append((steps[-1], means[-1], name, look["color"]))
            lowest, highest = [min(values) for values in by_step], [max(values) for values in by_step]
            axis.fill_between(steps, lowest, highest, color=look["color"], alpha=0.2, linewidth=0)
            # The fall of the first steps, the same for all, would leave no room for what follows.
            late = [step >= steps[-1] / 5 for step in steps]
            shown += [*itertools.compress(lowest, late), *itertools.compress(highest, late)]
        if shown := [value for value in shown if math.isfinite(value)]:
            margin = 0.05 * (max(shown) - min(shown)) + 1e-3
            axis.set_ylim(min(shown) - margin, max(shown) + margin)
        axis.set(xlabel="step", ylabel=measured)
        axis.grid(alpha=0.25)
        _name_lines(axis, ends)
    figure.suptitle(title, parse_math=False)
    _save(figure, path)
