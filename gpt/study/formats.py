"""A table of cells as Markdown and LaTeX, and flat rows as CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Iterable

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def markdown(cells: list[list[str]]) -> str:
    """A table in Markdown, aligned, so that it is easy to read as plain text."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def latex(cells: list[list[str]]) -> str:
    """A table in LaTeX, for the package booktabs. Columns of numbers stand at the right."""
    numbers = [all(re.match(r"[-+*<>\d]|failed|$", cell) for cell in column) for column in zip(*cells[1:])]
    head, *body = (" & ".join(map(_in_latex, row)) + r" \\" for row in cells)
    columns = "".join("r" if number else "l" for number in numbers)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def comment(text: str) -> str:
    """The text as lines that LaTeX passes over."""
    return "\n".join(f"% {part}" for line in text.splitlines() for part in textwrap.wrap(line, 100))


def as_csv(rows: Iterable[dict]) -> str:
    """Rows with a head that has all their keys, in the order in which they first appear. None is an empty field."""
    rows = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _in_latex(cell: str) -> str:
    cell = re.sub(r"[\\{}$&#%_~^]", lambda sign: _SPECIAL.get(sign[0], "\\" + sign[0]), cell)
    cell = re.sub(r"`(.*?)`", r"\\texttt{\1}", cell)
    cell = re.sub(r"\*\*(.*?)\*\*", r"\\textbf{\1}", cell)
    cell = re.sub(r"(?<!\w)[-+](?=\d)|[<>]", r"$\g<0>$", cell)
    return cell.replace("±", r"$\pm$").replace("×/÷", r"$\times/\div$")
