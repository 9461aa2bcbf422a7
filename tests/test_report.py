import itertools
import sys

import pytest
from toys import toy_config, toy_model

import train
from gpt import BLOCKS
from gpt.study import plots
from gpt.training import report
from gpt.training.distributed import ALONE
from gpt.training.files import read_lines


def warned(norm="pre", val=(1, 2), **settings):
    """The warnings, by their first words."""
    texts = report.warnings(toy_config(steps=10, norm=norm, **settings), toy_model(norm=norm), Splits(val), ALONE)
    assert all(text.startswith("warning: ") and text.endswith(".") and "(" in text for text in texts)
    return [text.removeprefix("warning: ") for text in texts]


class Splits:
    """As much of Data as the warnings ask for."""

    def __init__(self, val):
        self.val = val


@pytest.mark.parametrize("norm", BLOCKS)
def test_post_ln_without_a_warm_up_is_warned_of(norm):
    assert warned(norm) == []
    expected = [f"{norm} may learn nothing without a warm-up (warmup_steps 0). Give --warmup-steps 100 or more."]
    assert warned(norm, warmup_steps=0) == (expected if norm == "post" else [])


def test_a_warm_up_that_does_not_end_and_an_evaluation_that_comes_late():
    assert warned(warmup_steps=9) == []
    (text,) = warned(warmup_steps=10)
    assert text == "the run ends within its warm-up (10 of 10 steps). Lower --warmup-steps."
    assert warned(eval_every=10) == [] and warned(eval_every=11, val=()) == []
    (text,) = warned(eval_every=11)
    assert text.startswith("the validation loss is computed at the end only (every 11 of 10 steps)")


def test_a_rising_validation_loss_is_said_at_the_end():
    end = {"run": "runs/x", "unit": "byte", "step": 9, "val_loss": 2.0, "best_step": 9, "best_val_loss": 2.0}
    assert "rises" not in report.closing(end)
    text = report.closing(end | {"best_step": 4, "best_val_loss": 1.5})
    assert "best 1.5000 at step 4\n" in text and "rises since step 4" in text and "sample.py takes" in text
    assert report.closing(end | {"val_loss": None}) == "run runs/x; more of this: python sample.py runs/x"


def test_a_run_has_its_curve_as_far_as_it_is(tmp_path, text_file, monkeypatch):
    """Drawn again at each evaluation, from all lines of metrics.jsonl, those before a resume too."""
    drawn, really, clock = [], plots.training_curve, itertools.count()
    monkeypatch.setattr(report.time, "monotonic", lambda: next(clock))

    def watched(records, *arguments):
        drawn.append([record["step"] for record in records])
        return really(records, *arguments)

    monkeypatch.setattr(plots, "training_curve", watched)
    run, config = tmp_path / "r", {"data": str(text_file), "eval_every": 2}
    train.train(toy_config(steps=4, **config), str(run))
    first = (run / "curve.png").read_bytes()
    train.train(toy_config(steps=7, **config), str(run), "last")
    assert [steps[-1] for steps in drawn] == [2, 4, 6, 7] and drawn[-1] == [1, 2, 3, 4, 5, 6, 7]
    assert first.startswith(b"\x89PNG") and (run / "curve.png").read_bytes() != first
    assert not list(run.glob(".*png"))


def test_frequent_evaluations_draw_once_a_second_and_at_the_end(tmp_path, text_file, monkeypatch):
    ends = []
    monkeypatch.setattr(report.time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(plots, "training_curve", lambda records, *_: ends.append(records[-1]["step"]))
    train.train(toy_config(data=str(text_file), steps=9, eval_every=1), str(tmp_path / "r"))
    assert ends == [9]


def test_a_run_without_a_validation_split_has_a_curve_too(tmp_path, text_file):
    train.train(toy_config(data=str(text_file), steps=5, val_fraction=0.0), str(tmp_path / "r"))
    assert (tmp_path / "r" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_what_metrics_jsonl_gets_also_after_a_resume(tmp_path, text_file):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"data": str(text_file), "tensorboard": True, "save_every": 3, "keep": 9}
    train.train(toy_config(steps=5, **config), str(tmp_path / "r"))
    train.train(toy_config(steps=6, **config | {"seed": 5}), str(tmp_path / "r"), "3")
    events = EventAccumulator(str(tmp_path / "r"))
    events.Reload()
    records = read_lines(tmp_path / "r" / "metrics.jsonl")
    assert {*events.Tags()["scalars"]} == {key for record in records for key in record} - {"step"}
    for name in events.Tags()["scalars"]:
        expected = [(record["step"], pytest.approx(record[name], rel=1e-6)) for record in records if name in record]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected


def test_without_tensorboard_the_remedy_is_one_line_and_nothing_is_written(tmp_path, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"^TensorBoard is not installed \(--tensorboard\)\. pip install tensorboard"):
        train.train(toy_config(data=str(text_file), tensorboard=True), str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
