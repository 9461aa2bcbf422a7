"""docs/lesson.md: its Python runs from top to bottom in one namespace, and prints what the page shows."""

import contextlib
import io
import re
import runpy
from decimal import Decimal

import pytest
from toys import ROOT

PAGE = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.M | re.S)
NUMBER = re.compile(r"(about )?(-?\d[\d,]*\.?\d*(?:e[-+]\d+)?)")


def agree(printed: str, shown: str) -> bool:
    """Whether two texts are equal, but for one unit in the last digit of a fraction, which another processor may round
    otherwise, and for a tenth of a number after "about", which depends on Python's version. Spaces do not count."""
    if NUMBER.sub(r"\1#", printed).split() != NUMBER.sub(r"\1#", shown).split():
        return False
    for (_, a), (about, b) in zip(NUMBER.findall(printed), NUMBER.findall(shown)):
        a, b = Decimal(a.replace(",", "")), Decimal(b.replace(",", ""))
        unit = Decimal(1).scaleb(b.as_tuple().exponent)
        if abs(a - b) > max(unit if unit < 1 else 0, abs(b) / 10 if about else 0):
            return False
    return True


@pytest.mark.parametrize(
    "printed, shown, expected",
    [
        ("loss 2.51\n", "loss 2.52", True),
        ("loss 2.51", "loss 2.53", False),
        ("38,400", "38,401", False),
        ("1.00e-05", "1.01e-05", True),
        ("1.00e-05", "1.03e-05", False),
        ("[ 2., -1.]", "[2., 1.]", False),
        ("about 2.8", "about 2.6", True),
        ("about 3.2", "about 2.8", False),
        ("2.8", "about 2.8", False),
        ("pre 1.0", "post 1.0", False),
        ("1.0 2.0", "1.0", False),
    ],
)
def test_what_agrees(printed, shown, expected):
    assert agree(printed, shown) == expected


def test_the_page_prints_what_it_shows(tmp_path):
    blocks, printed = BLOCK.findall(PAGE), io.StringIO()
    script = tmp_path / "lesson.py"
    script.write_text("\nprint(end='\\f')\n".join(code for code, _ in blocks), encoding="utf-8")
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script))
    parts = printed.getvalue().split("\f")
    assert len(parts) == len(blocks) > 12
    wrong = [f"{code}printed\n{part}" for (code, shown), part in zip(blocks, parts) if not agree(part, shown)]
    assert not wrong, "\n".join(wrong)


def test_all_of_the_page_is_there():
    """Each fence is that of a block that is run, or its output; twelve questions; pictures that exist; and an answer to
    each exercise, with an assertion."""
    steps, exercises, answers = re.split(r"^## Exercises$|^<details>$", PAGE, flags=re.M)
    assert not re.search(r"^```", BLOCK.sub("", PAGE), re.M)
    assert re.findall(r"^## (\d+)\. .*\?$", steps, re.M) == [str(number) for number in range(1, 13)]
    pictures = re.findall(r"!\[.+?\]\((\S+)\)", PAGE)
    assert pictures and all((ROOT / "docs" / name).is_file() for name in pictures)
    asked, (_, *solved) = re.findall(r"^(\d)\. ", exercises, re.M), re.split(r"^# (?=\d\. )", answers, flags=re.M)
    assert asked == [answer[0] for answer in solved] and len(asked) >= 6
    assert all(re.search(r"^ *assert ", answer, re.M) for answer in solved)
