"""What a run says, warns of and draws."""

import math
import sys
import time
import types

import pytest
import torch
from toys import toy_config

import train
from gpt import BLOCKS
from gpt.config import Mistake
from gpt.files import read_lines
from gpt.study import plots
from gpt.training import report
from gpt.training.distributed import World
from gpt.training.trainer import Trainer


@pytest.fixture
def warned(tmp_path, text_file):
    """The warnings about a run of ten steps with these settings."""

    def warnings(**settings):
        config = toy_config(**{"data": str(text_file), "steps": 10} | settings)
        with Trainer(config, str(tmp_path / "r"), None, True, None, train.update) as run:
            return report.warnings(run)

    return warnings


@pytest.mark.parametrize("placement", BLOCKS)
def test_post_ln_without_a_warm_up_is_warned_of(warned, placement):
    assert warned(norm=placement) == []
    texts = warned(norm=placement, warmup_steps=0)
    assert len(texts) == (placement in ("post", "mix", "b2t", "resi_dual"))
    assert all(placement in text and "(warmup_steps 0)" in text and "--warmup-steps 100" in text for text in texts)


@pytest.mark.parametrize("norm_layer", ["dyt", "derf", "rmsnorm"])
def test_a_norm_on_the_stream_that_undoes_no_scale_is_warned_of(warned, norm_layer):
    for placement in BLOCKS:
        texts = [text for text in warned(norm=placement, norm_layer=norm_layer) if norm_layer in text]
        on_stream = placement in ("post", "deepnorm", "mix", "keel", "b2t", "hybrid", "resi_dual")
        assert len(texts) == (on_stream and norm_layer != "rmsnorm") and all(placement in text for text in texts)


def test_a_warm_up_that_does_not_end_and_an_evaluation_that_comes_late(warned):
    assert warned(warmup_steps=9) == []
    (text,) = warned(warmup_steps=10)
    assert text.startswith("warning: ") and "(10 of 10 steps)" in text and "--warmup-steps" in text
    assert warned(eval_every=10) == [] and warned(eval_every=11, val_fraction=0.0) == []
    (text,) = warned(eval_every=11)
    assert text.startswith("warning: ") and "(every 11 of 10 steps)" in text and "--eval-every" in text


def test_a_rising_validation_loss_is_said_at_the_end():
    end = {"run": "runs/x", "unit": "byte", "step": 9, "val_loss": 2.0, "best_step": 9, "best_val_loss": 2.0}
    (loss, more), (without,) = (report.closing(end | change).splitlines() for change in ({}, {"val_loss": None}))
    assert "2.0000 nats per byte at step 9; best 2.0000 at step 9" in loss
    assert more == without and more.endswith("python sample.py runs/x")
    best, rising, _ = report.closing(end | {"best_step": 4, "best_val_loss": 1.5}).splitlines()
    assert "best 1.5000 at step 4" in best and "step 4" in rising and "sample.py" in rising


@pytest.fixture
def judge():
    """Whether a run of 1,000 steps in a corpus of entropy 3.0 is stuck, and the number of warnings."""

    def judge(step, val_loss, loss=3.0, warmup_steps=10, state=None, rank=0, entropy=3.0):
        warnings = []
        run = types.SimpleNamespace(
            config=toy_config(steps=1000, warmup_steps=warmup_steps), tokenizer=types.SimpleNamespace(unit="byte"),
            data=types.SimpleNamespace(entropy=entropy), progress=types.SimpleNamespace(warn=warnings.append),
            world=World(rank=rank, size=2), state=state or {}, run="runs/x",
        )  # fmt: skip
        return report.stuck(run, {"step": step, "loss": loss, "val_loss": val_loss}), len(warnings)

    return judge


def test_a_stuck_run_is_no_better_than_the_entropy_of_single_tokens(judge):
    for val_loss, expected in ((9.0, True), (3.0, True), (2.91, True), (2.89, False), (1.0, False)):
        assert judge(500, val_loss) == (expected, expected)
    assert judge(500, 9.0, loss=2.6) == (True, 1) and judge(500, 9.0, loss=2.4) == (False, 0)  # which overfits


def test_a_run_is_judged_in_its_second_half_and_100_steps_after_its_warm_up(judge):
    for step, warmup_steps, expected in ((499, 10, False), (500, 10, True), (799, 700, False), (800, 700, True)):
        assert judge(step, 3.0, warmup_steps=warmup_steps)[0] == expected
    assert judge(1000, 3.0, warmup_steps=1000) == (False, 0)


def test_a_stuck_run_is_warned_of_by_the_first_process_and_once(judge):
    assert judge(500, 3.0, state={"stuck": False}) == (True, 1)
    assert judge(500, 3.0, state={"stuck": True}) == judge(500, 3.0, rank=1) == (True, 0)


def test_the_lines_of_the_steps_are_the_means_over_the_processes_and_the_first_writes_them(tmp_path):
    class Pair(World):
        def total(self, values):
            return [2 * value + 1 for value in values]  # as if the other process had lost 1 more

    for rank in (0, 1):
        lines = report.StepLines(tmp_path / f"{rank}", Pair(rank=rank, size=2))
        (tmp_path / f"{rank}").mkdir()
        for steps in ([1], [2, 3, 4], [5]):
            for step in steps:
                lines.add(torch.tensor(step * 1.0), torch.tensor(math.inf if step == 3 else step * 10.0))
            last = lines.read(steps[-1])
            assert last == (steps[-1] + 0.5, steps[-1] * 10)
    expected = [{"step": n, "loss": n + 0.5, "grad_norm": None if n == 3 else n * 10} for n in range(1, 6)]
    assert read_lines(tmp_path / "0" / "steps.jsonl") == expected and not any((tmp_path / "1").iterdir())


@pytest.fixture
def drawn(monkeypatch):
    """The steps in each curve that is drawn."""
    steps, really = [], plots.training_curve

    def draw(lines, *arguments):
        steps.append([line["step"] for line in lines])
        return really(lines, *arguments)

    monkeypatch.setattr(plots, "training_curve", draw)
    return steps


def test_a_run_has_its_curve_also_of_the_steps_before_a_resume(tmp_path, text_file, drawn):
    run, config = tmp_path / "r", {"data": str(text_file), "eval_every": 2}
    train.train(toy_config(steps=4, **config), str(run))
    first = (run / "curve.png").read_bytes()
    train.train(toy_config(steps=7, **config | {"val_fraction": 0.0}), str(run), "last")
    assert drawn[-1] == [1, 2, 3, 4, 5, 6, 7]
    assert first.startswith(b"\x89PNG") and (run / "curve.png").read_bytes() != first
    assert not list(run.glob(".*png"))


def test_a_curve_is_drawn_once_a_second_and_at_the_end(tmp_path, text_file, drawn):
    config, start = toy_config(data=str(text_file), steps=9, eval_every=1), time.monotonic()
    train.train(config, str(tmp_path / "r"))
    assert drawn[-1] == [*range(1, 10)] and len(drawn) <= 1 + time.monotonic() - start
    with Trainer(config, str(tmp_path / "r"), "last", False, None, train.update) as run:
        drawn.clear()
        train.draw(run, last=False)
        run.drawn -= 2  # two seconds ago
        for _ in range(2):
            train.draw(run, last=False)
        assert len(drawn) == 1
        train.draw(run, last=True)
        assert len(drawn) == 2


def test_tensorboard_gets_what_metrics_jsonl_gets_also_after_a_resume(tmp_path, text_file, quick):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"data": str(text_file), "tensorboard": True, "save_every": 3, "keep": 9}
    train.train(toy_config(steps=5, **config), str(tmp_path / "r"))
    train.train(toy_config(steps=6, **config | {"seed": 5}), str(tmp_path / "r"), "3")
    events = EventAccumulator(str(tmp_path / "r"))
    events.Reload()
    lines = read_lines(tmp_path / "r" / "metrics.jsonl")
    assert {*events.Tags()["scalars"]} == {key for line in lines for key in line} - {"step"}
    for name in events.Tags()["scalars"]:
        expected = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines if name in line]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected


def test_without_tensorboard_the_remedy_is_one_line_and_nothing_is_written(tmp_path, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(Mistake, match=r"--tensorboard.*pip install tensorboard"):
        train.train(toy_config(data=str(text_file), tensorboard=True), str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
