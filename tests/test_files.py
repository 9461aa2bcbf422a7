"""Files that are there whole or not at all, lines of JSON, and a folder that one process at a time works in."""

import json

import pytest

from gpt.config import Mistake
from gpt.files import append, read_json, read_lines, write
from gpt.training.lock import held
from gpt.training.run import forget_later_lines

RECORDS = [{"step": step, "text": "é\n" * step} for step in range(4)]


@pytest.fixture
def lines(tmp_path):
    for record in RECORDS:
        append(tmp_path / "metrics.jsonl", record)
    return tmp_path / "metrics.jsonl"


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    for text in ("a long one: é\n\n", "short"):
        write(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_bytes() == text.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    write(tmp_path / "a.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "a.txt", "new \ud800")
    assert (tmp_path / "a.txt").read_text("utf-8") == "old"


def test_lines_come_back_but_for_one_that_was_cut(lines):
    """Wherever a kill cut the file."""
    assert read_lines(lines) == RECORDS and read_lines(lines.with_name("b.jsonl")) == []
    whole = lines.read_bytes()
    for size in range(len(whole)):
        lines.write_bytes(whole[:size])
        assert read_lines(lines) == RECORDS[: whole[:size].count(b"\n")]


def test_lines_of_later_steps_are_dropped_and_the_next_one_is_a_line_of_its_own(lines):
    lines.write_bytes(lines.read_bytes()[:-3])
    forget_later_lines(lines.parent, 1)
    append(lines, {"step": 2})
    assert read_lines(lines) == [*RECORDS[:2], {"step": 2}]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 10**5, "\udcff"])
def test_what_is_no_object_of_json_is_refused_by_name(tmp_path, text):
    path = tmp_path / "a.json"
    write(path, json.dumps({"a": 1}))
    assert read_json(path) == {"a": 1}
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Mistake, match="a.json"):
        read_json(path)
    path.unlink()
    with pytest.raises(Mistake, match="a.json: No such file"):
        read_json(path)


def test_a_folder_is_held_by_one(tmp_path):
    with held(tmp_path):
        with pytest.raises(Mistake, match=tmp_path.name), held(tmp_path):
            pass
    with pytest.raises(KeyError), held(tmp_path):
        raise KeyError
    with held(tmp_path):
        pass


def test_a_damaged_line_is_a_mistake_with_the_files_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff garbage\n')
    with pytest.raises(Mistake, match="metrics.jsonl"):
        read_lines(tmp_path / "metrics.jsonl")


def test_holding_a_folder_that_is_not_there_makes_none(tmp_path):
    with pytest.raises(Mistake, match="nowhere"), held(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()
