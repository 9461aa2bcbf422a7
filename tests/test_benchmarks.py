"""The benchmarks run and print a table. Their numbers are not tested."""

import sys

import pytest
from toys import ROOT, TOY

from gpt.training.settings import configure

sys.path.append(str(ROOT / "benchmarks"))
import speed  # noqa: E402


@pytest.mark.parametrize("part, rows", [("decode", 7), ("train", 2), ("norm", 4), ("gpu", 1)])
def test_each_part_fills_its_rows(monkeypatch, capsys, part, rows):
    monkeypatch.setattr(speed, "SMALL", configure(TOY | {"context_length": 1024}))
    monkeypatch.setattr(speed, "TINY", configure(TOY))
    if part != "train":  # limits() is slow by intent, so one part measures it for all
        monkeypatch.setattr(speed, "limits", lambda: (1e9, 1e9))
    monkeypatch.setattr(speed, "VOCABULARY", 256)
    monkeypatch.setattr(speed, "PEER", False)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "peak_memory", lambda name: 1.0)
    speed.PARTS[part]()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == rows and all(line.startswith("| ") and line.count("|") == 6 for line in lines)
