"""The pictures. matplotlib is imported here and nowhere else."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

# Okabe and Ito's colours, which the colour-blind can tell apart; the last ones repeat with dashes.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]


def depth_lines(panels: dict[str, dict[str, list[float]]], title: str, path: Path, start: int = 1):
    """One log-scaled panel for each entry, {what is measured: {line's name: values by depth}}, saved to `path`.
    `start` is the depth of the first value."""
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.8), layout="constrained", squeeze=False)
    for axis, (measured, lines) in zip(axes[0], panels.items()):
        ends = []
        for number, (name, values) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            depths = range(start, start + len(values))
            style = "-" if number < len(COLOURS) else "--"
            axis.plot(depths, values, style, color=colour, marker="o", markersize=3, linewidth=1.6)
            ends.append((values[-1], name, colour))
        axis.set(xlabel="block", ylabel=measured, yscale="log")
        axis.grid(alpha=0.25)
        axis.set_xlim(right=start + len(values) - 1 + 0.2 * len(values))
        axis.set_xticks([depth for depth in axis.get_xticks() if start <= depth <= start + len(values) - 1])
        _name_lines(axis, start + len(values) - 1, ends)
    figure.suptitle(title)
    _save(figure, path)


def _save(figure, path: Path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _name_lines(axis, depth, ends):
    # Beside its line, and moved up where two lines end close to each other.
    axis.figure.canvas.draw()
    lowest = None
    for value, name, colour in sorted(ends):
        pixel = axis.transData.transform((depth, value))[1]
        pixel = pixel if lowest is None else max(pixel, lowest + 15)
        lowest = pixel
        y = axis.transData.inverted().transform((0, pixel))[1]
        axis.annotate(name, (depth, y), xytext=(8, 0), textcoords="offset points", color=colour, va="center")


def depth_by_step(panels: dict[str, tuple[list[int], list[list[float]]]], title: str, path: Path):
    """One panel for each entry, {what is measured: (steps, values by step and depth)}: depth upwards, steps to the
    right, the values as colours on a log scale."""
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.8), layout="constrained", squeeze=False)
    for axis, (measured, (steps, values)) in zip(axes[0], panels.items()):
        depths = range(1, len(values[0]) + 1)
        mesh = axis.pcolormesh(steps, depths, list(zip(*values)), norm="log", cmap="cividis", shading="nearest")
        axis.set(xlabel="step", ylabel="block")
        axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(mesh, ax=axis, label=measured)
    figure.suptitle(title)
    _save(figure, path)
