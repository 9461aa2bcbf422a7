"""The loop as a whole, in this process, on a toy model and six kilobytes of text."""

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import KINDS, TOY_RUN, records, toy_config

import train as script
from gpt import BLOCKS, GPT
from gpt.blocks import PreLN
from gpt.config import Failure, Mistake
from gpt.loss import NextToken
from gpt.tokenizer import TOKENIZERS
from gpt.training import checkpoint, corpus, trainer
from gpt.training.code import code_of
from gpt.training.data import Data
from gpt.training.distributed import World
from gpt.training.report import Diverged
from gpt.training.trainer import Trainer, mean_loss

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def letters(tmp_path):
    """A text of random letters, which can only be learnt by heart: the validation loss falls, and rises again."""
    (tmp_path / "letters.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=600)), encoding="utf-8")
    return str(tmp_path / "letters.txt")


@pytest.fixture
def run(tmp_path, text_file):
    """Train with toy settings into a folder of this name; returns the folder."""

    def start(name, resume=None, stop=None, **settings):
        config = toy_config(**{"data": str(text_file), "steps": 8, "lr": 1e-2, "min_lr": 1e-3} | settings)
        script.train(config, str(tmp_path / name), resume=resume, stop=stop)
        return tmp_path / name

    return start


def last_tensors(run):
    """The weights and the optimizer's tensors of a run's last checkpoint."""
    folder = checkpoint.find(run, "last")
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_equal(one: dict, other: dict):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same(one, other):
    """Two runs: all that they have on the disk but for their speed."""
    assert_equal(last_tensors(one), last_tensors(other))
    for file in ("metrics.jsonl", "steps.jsonl", "probe.jsonl"):
        assert records(one, file) == records(other, file)
    states = [checkpoint.read_state(checkpoint.find(run, "last"))[0] for run in (one, other)]
    for state in states:
        state["record"] = state["record"] and state["record"] | {"tokens_per_s": 0}
    assert states[0] == states[1]
    for name in ("best", "last"):
        assert checkpoint.find(one, name).name == checkpoint.find(other, name).name


class StopAfter(script.StopRequest):
    """Asks for a stop when asked for the n-th time whether to."""

    def __init__(self, n):
        self.n = n

    @property
    def signum(self):
        self.n -= 1
        return 2 if self.n <= 0 else None


@pytest.mark.parametrize("norm", BLOCKS)
def test_every_placement_learns_with_the_default_rates(run, norm):
    lines = records(run("a", norm=norm, steps=24, eval_every=12, lr=None, min_lr=None, batch_size=8))
    assert lines[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0] < 4 and losses[1] < 3.2


def test_twice_the_same_run_is_the_same_to_the_bit(run):
    assert_same(run("a", dropout=0.2), run("b", dropout=0.2))


def test_another_seed_is_another_run(run):
    assert records(run("a", seed=1, steps=1))[0]["loss"] != records(run("b", seed=2, steps=1))[0]["loss"]


@pytest.mark.parametrize("norm, stop", [*((norm, 3) for norm in KINDS), ("pre", 4), ("rezero", 7)])
def test_stopping_and_resuming_changes_no_bit(run, norm, stop):
    """Also with dropout, several micro-batches, probing, and a stop that is no step of evaluation."""
    settings = {"norm": norm, "dropout": 0.2, "micro_batch_size": 2, "probe_every": 2}
    whole = run("whole", **settings)
    parts = run("parts", stop=StopAfter(stop), **settings)
    assert checkpoint.find(parts, "last").name == f"step-{stop:06d}"
    assert_same(whole, run("parts", resume="last", **settings))


class Mortal(PreLN):
    """pre-LN that raises `fault` where it is evaluated or probed after `lives` steps of training."""

    lives, fault, steps = None, Exception("the end"), 0

    def forward(self, x):
        self.steps += self.training
        if not self.training and self.steps == self.lives:
            raise self.fault
        return super().forward(x)


@pytest.fixture
def mortal(monkeypatch):
    """A placement, "mortal", and a function that sets its `lives`, and its `fault` if there is one."""
    monkeypatch.setitem(BLOCKS, "mortal", Mortal)

    def live(lives, fault=Mortal.fault):
        monkeypatch.setattr(Mortal, "lives", lives)
        monkeypatch.setattr(Mortal, "fault", fault)

    return live


@pytest.mark.parametrize("save_every, log_every", [(None, 1), (3, 3)])
def test_an_evaluation_that_fails_loses_nothing(run, tmp_path, mortal, letters, save_every, log_every):
    """A step is saved before it is evaluated or probed. A resumed run does first what was still due after that step,
    and from there on everything is as in a run that never stopped."""
    settings = {"data": letters, "norm": "mortal", "lr": 0.02, "min_lr": 0.02, "dropout": 0.2}
    settings |= {"eval_every": 2, "probe_every": 3, "save_every": save_every, "log_every": log_every, "keep": 1}
    whole = run("whole", **settings)
    losses = {line["step"]: line["val_loss"] for line in records(whole) if "val_loss" in line}
    best = [step for step in losses if losses[step] == min(losses[s] for s in losses if s <= step)]
    assert {2} < {*best} < {2, 4, 6, 8} == {*losses}
    for lives in (2, 3, 4, 6, 8):
        mortal(lives)
        with pytest.raises(Exception, match="the end"):
            run(f"parts{lives}", **settings)
        parts = tmp_path / f"parts{lives}"
        due = [step for step in range(1, lives + 1) if step % (save_every or 2) == 0 or step == 8]
        saved = {*due, *(step for step in best if step < lives)}  # a step that is the best is saved afterwards
        assert (parts / "last").exists() == bool(saved)
        if saved:
            assert checkpoint.find(parts, "last").name == f"step-{max(saved):06d}"
            mortal(None)
            assert_same(whole, run(parts.name, resume="last", **settings))


@pytest.mark.parametrize("file", ["metrics.jsonl", "steps.jsonl"])
def test_metrics_after_a_kill_have_each_step_once(run, file):
    whole = run("whole")
    parts = run("parts", stop=StopAfter(4))
    with open(parts / file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": 5, "loss": 1.0}) + '\n{"step": 6, "lo')
    run("parts", resume="last")
    assert [record["step"] for record in records(parts, file)] == list(range(1, 9))
    assert_same(whole, parts)


@pytest.mark.parametrize("norm", KINDS)
def test_every_step_has_its_loss_and_gradient_norm_however_seldom_the_device_is_looked_at(run, norm):
    settings = {"norm": norm, "dropout": 0.2, "micro_batch_size": 2, "save_every": 8}
    each, seldom = run("each", **settings), run("seldom", log_every=5, eval_every=8, **settings)
    lines = records(each, "steps.jsonl")
    assert lines == records(seldom, "steps.jsonl") and [line["step"] for line in lines] == [*range(1, 9)]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    for folder, logged in ((each, [*range(1, 9)]), (seldom, [1, 5, 8])):
        metrics = [{name: record[name] for name in ("step", "loss", "grad_norm")} for record in records(folder)]
        assert metrics == [lines[step - 1] for step in logged]


def test_an_overwritten_run_has_the_lines_of_the_new_one(run, tmp_path, text_file):
    run("a")
    script.train(toy_config(data=str(text_file), steps=3), str(tmp_path / "a"), overwrite=True)
    assert [line["step"] for line in records(tmp_path / "a", "steps.jsonl")] == [1, 2, 3]


def test_the_steps_of_a_checkpoint_are_written_before_it(run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise Failure("no room")

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(Failure, match="no room"):
        run("a", save_every=3, log_every=100)
    assert [line["step"] for line in records(tmp_path / "a", "steps.jsonl")] == [1, 2, 3]


def test_resuming_a_finished_run_changes_nothing(run, tmp_path):
    tensors, lines = last_tensors(run("a")), records(tmp_path / "a")
    written = (tmp_path / "a" / "metrics.jsonl").read_bytes() + b'{"step": 9, "lo'
    (tmp_path / "a" / "metrics.jsonl").write_bytes(written)
    with pytest.raises(Mistake, match=r"steps 5, done 8"):
        run("a", resume="last", steps=5)
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == written
    assert_equal(last_tensors(run("a", resume="last")), tensors)
    assert records(tmp_path / "a") == lines


def test_dropout_differs_from_step_to_step(run, tmp_path):
    """All batches of this text are equal and the rate is next to nothing, so that dropout is all that changes."""
    (tmp_path / "same.txt").write_text("a" * 500, encoding="utf-8")
    settings = {"data": str(tmp_path / "same.txt"), "lr": 1e-30, "min_lr": 0.0, "steps": 4}
    for name, dropout, losses in (("none", 0.0, 1), ("some", 0.2, 4)):
        assert len({record["loss"] for record in records(run(name, dropout=dropout, **settings))}) == losses


def test_dropout_is_a_function_of_seed_step_and_process(tmp_path, text_file):
    draws, config = [], {"data": str(text_file), "micro_batch_size": 2, "steps": 2}
    for seed in (1, 2):
        with Trainer(
            toy_config(seed=seed, **config), str(tmp_path / f"{seed}"), None, False, None, script.update
        ) as run:
            for rank in (0, 1):
                run.world = World(rank=rank, size=2)
                for step in (0, 1, 0):
                    assert [len(tokens) for tokens in run.batch(step)] == [2]
                    draws.append(torch.rand(()).item())
    assert draws[0::3] == draws[2::3] and len({*draws}) == 8


def test_the_gradient_is_clipped_and_logged_as_it_was(run):
    """Without memory and with a large epsilon AdamW's update is about lr times the gradient, so its norm shows."""
    plain = {"beta1": 0.0, "beta2": 0.0, "adam_eps": 1e3, "weight_decay": 0.0, "steps": 1, "eval_every": 1}
    plain |= {"lr": 1e3, "warmup_steps": 0, "min_lr": 1e3, "optimizer": "adamw"}
    for name, clip in (("free", 0.0), ("clipped", 0.01)):
        folder = run(name, grad_clip=clip, **plain)
        torch.manual_seed(toy_config().seed)
        start = GPT(checkpoint.load_model(folder).config).state_dict()
        weights = checkpoint.load_model(folder).state_dict()
        moved = sum((weights[key] - start[key]).square().sum() for key in start).sqrt().item()
        norm = records(folder)[0]["grad_norm"]
        assert norm > 0.1 and moved == pytest.approx(min(norm, clip or norm), rel=0.01)


def test_micro_batches_are_the_batch_up_to_rounding(run):
    whole, parts = run("whole"), run("parts", micro_batch_size=1)
    one, other = (load_file(checkpoint.find(folder, "last") / "model.safetensors") for folder in (whole, parts))
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)
    for one, other in zip(records(whole), records(parts)):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_evaluating_and_saving_change_nothing(run):
    often, seldom = run("often", dropout=0.2, eval_every=1, save_every=3), run("seldom", dropout=0.2, eval_every=8)
    assert_equal(last_tensors(often), last_tensors(seldom))


def test_the_validation_loss_does_not_depend_on_the_batch(run, text_file):
    model = checkpoint.load_model(run("a", dropout=0.5))  # which must be off
    losses = []
    for rows in (1, 3, 8):
        data = Data(np.fromfile(text_file, np.uint8), 16, rows, TOY_RUN["val_fraction"], 0)
        losses += [mean_loss(NextToken(model), data.windows(rows)) for _ in range(2)]
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-6)
    assert losses[0] == pytest.approx(records(text_file.parent / "a")[-1]["val_loss"], abs=1e-6)


def test_a_run_folder_has_its_parts(run):
    folder = run("a", eval_every=3, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "best", "config.json", "last", "metrics.jsonl", "step-000008", "steps.jsonl",
    ]  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["norm"], config["vocab_size"], config["steps"], config["format"]) == ("pre", 256, 8, 1)
    assert [record["step"] for record in records(folder) if "val_loss" in record] == [3, 6, 8]


@pytest.mark.parametrize("save_every", [None, 100])
def test_best_is_the_step_of_the_least_validation_loss(run, letters, save_every):
    """Also if it is no step of saving."""
    settings = {"steps": 6, "eval_every": 2, "log_every": 25, "lr": 0.02, "min_lr": 0.02, "keep": 1}
    folder = run("a", data=letters, save_every=save_every, **settings)
    losses = {record["step"]: record["val_loss"] for record in records(folder) if "val_loss" in record}
    best = min(losses, key=losses.get)
    assert best < 6 and checkpoint.find(folder).name == f"step-{best:06d}"
    assert checkpoint.find(folder, "last").name == "step-000006"
    windows = Data(np.fromfile(letters, np.uint8), 16, 4, TOY_RUN["val_fraction"], 0).windows(4)
    assert mean_loss(NextToken(checkpoint.load_model(folder)), windows) == pytest.approx(losses[best])


def test_without_a_validation_split(run):
    folder = run("a", val_fraction=0)
    assert not any("val_loss" in record for record in records(folder)) and not (folder / "best").exists()
    assert checkpoint.load_model(folder).config.n_layers == 2


@pytest.mark.parametrize("norm, lr, warmup_steps", [("none", 1e30, 6), ("pre", 1e300, 0)])  # the loss; the weights
def test_what_is_not_finite_stops_the_run_and_spoils_nothing(run, tmp_path, norm, lr, warmup_steps):
    bad = {"lr": lr, "min_lr": 0.0, "warmup_steps": warmup_steps, "steps": 20, "save_every": 1, "val_fraction": 0}
    with pytest.raises(Diverged, match=r"\(step \d+: loss .*gradient norm .*--lr .*--warmup-steps") as raised:
        run("a", norm=norm, **bad)
    assert isinstance(raised.value, Failure) and isinstance(raised.value, FloatingPointError)
    folder = tmp_path / "a"
    for path in folder.glob("step-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    if (folder / "metrics.jsonl").exists():
        assert all(math.isfinite(record["loss"]) for record in records(folder))
    assert (folder / "last").exists() == (norm == "none")
    assert [line["step"] for line in records(folder, "steps.jsonl")] == [*range(1, raised.value.step + 1)]
    assert "NaN" not in (folder / "steps.jsonl").read_text(encoding="utf-8")
    last = records(folder, "steps.jsonl")[-1]
    assert (last["loss"] is None) == (not math.isfinite(raised.value.record["loss"]))


def test_a_loss_on_another_text_is_not_the_best_of_this_one(run, tmp_path):
    run("a")
    (tmp_path / "other.txt").write_text("something else. " * 200, encoding="utf-8")
    run("a", resume="last", data=str(tmp_path / "other.txt"), steps=9, eval_every=100)
    state = checkpoint.read_state(checkpoint.find(tmp_path / "a", "last"))[0]
    assert state["best_step"] == 9 and state["best_val_loss"] == records(tmp_path / "a")[-1]["val_loss"]


def test_a_compiler_that_fails_costs_no_run(run, tmp_path, monkeypatch):
    before = records(run("a"))

    def fail(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    for how in ({"overwrite": True}, {"resume": "last"}):
        config = toy_config(data=str(tmp_path / "text.txt"), steps=10, compile="on")
        with pytest.raises(Mistake, match="no compiler here.*--compile off"):
            script.train(config, str(tmp_path / "a"), **how)
    assert records(tmp_path / "a") == before


def test_nothing_is_written_before_a_mistake_is_found(run, tmp_path):
    for settings in ({"data": "nowhere.txt"}, {"context_length": 5000}, {"norm": "prr"}, {"device": "cuda:99"}):
        with pytest.raises(Mistake):
            run("a", **settings)
    assert not (tmp_path / "a").exists()


def test_text_by_gpt2_tokens(run):
    folder = run("a", tokenizer="gpt2", steps=2, context_length=8)
    assert checkpoint.load_model(folder).config.vocab_size == 50257
    assert records(folder)[0]["loss"] == pytest.approx(math.log(50257), rel=0.05)


def test_bfloat16_on_the_cpu_is_close_and_keeps_float32_weights(run):
    exact, rough = records(run("exact")), records(run("rough", dtype="bfloat16"))
    assert rough[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.02)
    assert rough[-1]["loss"] != exact[-1]["loss"]


def test_a_loss_that_diverges_at_the_evaluation_leaves_the_checkpoint_before_it(run, tmp_path, monkeypatch):
    """Also with one checkpoint to keep: the old one goes after the evaluation of the new one."""

    def mean_loss(net, windows, world):
        return math.nan

    monkeypatch.setattr(trainer, "mean_loss", mean_loss)
    with pytest.raises(Diverged, match="val_loss nan"):
        run("a", keep=1, save_every=2, eval_every=4)
    assert checkpoint.find(tmp_path / "a", "last").name == "step-000004"
    assert checkpoint.find(tmp_path / "a", "2").name == "step-000002"


@pytest.fixture
def end_of(tmp_path, text_file):
    """Train for 204 steps with toy settings, of which the last 103 are judged; returns the result."""

    def start(resume=None, **settings):
        config = toy_config(**{"data": str(text_file), "steps": 204, "eval_every": 34, "log_every": 204} | settings)
        return script.train(config, str(tmp_path / "r"), resume=resume, overwrite=resume is None)

    return start


def test_a_stuck_run_is_warned_of_once_and_goes_on(end_of, capsys):
    """At such a rate the loss stays at ln 256, above the entropy of single bytes."""
    slow = {"lr": 1e-9, "min_lr": 0.0}
    end = end_of(**slow)
    assert end["stuck"] is True and end["step"] == 204
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "at step 102" in warning
    assert "--lr" in warning and "--warmup-steps" in warning
    assert end_of(resume="last", **slow)["stuck"] is True
    assert "entropy" not in capsys.readouterr().err
    assert end_of(val_fraction=0.0, **slow)["stuck"] is False and capsys.readouterr().err == ""


def test_a_run_that_learns_is_not_stuck(end_of, capsys):
    assert end_of()["stuck"] is False and capsys.readouterr().err == ""


def test_a_run_tells_its_code_and_its_corpus(end_of, text_file, tmp_path):
    end, config = end_of(steps=1), toy_config(steps=1, data=str(text_file))
    model = checkpoint.load_model(tmp_path / "r")
    assert end["code"] == code_of(model, script.update)
    assert end["corpus"] == corpus.digest(corpus.load(str(text_file), TOKENIZERS[config.tokenizer]()))
    assert end_of(steps=1, seed=5)["code"] == end["code"] != end_of(steps=1, norm="post")["code"]
