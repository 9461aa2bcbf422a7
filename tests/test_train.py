"""The loop as a whole, in this process, on a toy model and six kilobytes of text."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file
from toys import toy_config

import train as script
from gpt import BLOCKS, GPT
from gpt.loss import NextToken
from gpt.training import checkpoint
from gpt.training.data import Data
from gpt.training.trainer import mean_loss


@pytest.fixture
def run(tmp_path, text_file):
    """Train with toy settings into a folder of this name; returns the folder."""

    def start(name, resume=None, stop=None, **settings):
        config = toy_config(**{"data": str(text_file), "steps": 8, "lr": 1e-2, "min_lr": 1e-3} | settings)
        script.train(config, str(tmp_path / name), resume=resume, stop=stop)
        return tmp_path / name

    return start


def contents(run):
    """All tensors of the last checkpoint, and what the metrics say but for the speed."""
    folder = checkpoint.find(run, "last")
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    return tensors, [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in metrics(run)]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_same(one, other):
    (tensors, records), (others, other_records) = contents(one), contents(other)
    assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert records == other_records
    for probed in (run / "probe.jsonl" for run in (one, other) if (run / "probe.jsonl").exists()):
        assert probed.read_bytes() == (one / "probe.jsonl").read_bytes()


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
    records = metrics(run("a", norm=norm, steps=60, eval_every=20, lr=2e-3, min_lr=2e-4, batch_size=8))
    assert records[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    losses = [record["val_loss"] for record in records if "val_loss" in record]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True) and losses[-1] < 4.3


def test_twice_the_same_run_is_the_same_to_the_bit(run):
    assert_same(run("a", dropout=0.2), run("b", dropout=0.2))


def test_another_seed_is_another_run(run):
    assert metrics(run("a", seed=1))[0]["loss"] != metrics(run("b", seed=2))[0]["loss"]


@pytest.mark.parametrize("norm, stop", [*((norm, 3) for norm in BLOCKS), ("pre", 4), ("rezero", 7)])
def test_stopping_and_resuming_changes_no_bit(run, norm, stop):
    """Also with dropout, several micro-batches, probing, and a stop that is no step of evaluation."""
    settings = {"norm": norm, "dropout": 0.2, "micro_batch_size": 2, "probe_every": 2}
    whole = run("whole", **settings)
    parts = run("parts", stop=StopAfter(stop), **settings)
    assert checkpoint.find(parts, "last").name == f"step-{stop:06d}"
    assert_same(whole, run("parts", resume="last", **settings))


def test_metrics_after_a_kill_have_each_step_once(run):
    whole = run("whole")
    parts = run("parts", stop=StopAfter(4))
    with open(parts / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 5, "loss": 1.0}) + '\n{"step": 6, "lo')
    run("parts", resume="last")
    assert [record["step"] for record in metrics(parts)] == list(range(1, 9))
    assert_same(whole, parts)


def test_resuming_a_finished_run_changes_nothing(run, tmp_path):
    before = contents(run("a"))
    written = (tmp_path / "a" / "metrics.jsonl").read_bytes() + b'{"step": 9, "lo'
    (tmp_path / "a" / "metrics.jsonl").write_bytes(written)
    with pytest.raises(ValueError, match=r"the run is past that \(steps 5, done 8\)"):
        run("a", resume="last", steps=5)
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == written
    after = contents(run("a", resume="last"))
    assert before[1] == after[1] and all(torch.equal(before[0][name], after[0][name]) for name in before[0])


def test_dropout_differs_from_step_to_step(run, tmp_path):
    """All batches of this text are equal and the rate is next to nothing, so that dropout is all that changes."""
    (tmp_path / "same.txt").write_text("a" * 500, encoding="utf-8")
    settings = {"data": str(tmp_path / "same.txt"), "lr": 1e-30, "min_lr": 0.0}
    for name, dropout, losses in (("none", 0.0, 1), ("some", 0.2, 8)):
        assert len({record["loss"] for record in metrics(run(name, dropout=dropout, **settings))}) == losses


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
        norm = metrics(folder)[0]["grad_norm"]
        assert norm > 0.1 and moved == pytest.approx(min(norm, clip or norm), rel=0.01)


def test_micro_batches_are_the_batch_up_to_rounding(run):
    (whole, records), (parts, others) = contents(run("whole")), contents(run("parts", micro_batch_size=1))
    for name in whole:
        if "/" not in name:
            assert torch.allclose(whole[name], parts[name], atol=1e-4), name
    for one, other in zip(records, others):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_evaluating_and_saving_change_nothing(run):
    often, seldom = run("often", dropout=0.2, eval_every=1, save_every=3), run("seldom", dropout=0.2, eval_every=8)
    (one, _), (other, _) = contents(often), contents(seldom)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_validation_loss_does_not_depend_on_the_batch(run, text_file):
    model = checkpoint.load_model(run("a", dropout=0.5))  # which must be off
    losses = []
    for rows in (1, 3, 8):
        data = Data(torch.frombuffer(bytearray(text_file.read_bytes()), dtype=torch.uint8).numpy(), 16, rows, 0.2, 0)
        losses += [mean_loss(NextToken(model), data.windows(rows)) for _ in range(2)]
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-6)
    assert losses[0] == pytest.approx(metrics(text_file.parent / "a")[-1]["val_loss"], abs=1e-6)


def test_a_run_folder_has_its_parts(run):
    folder = run("a", eval_every=3, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "best", "config.json", "curve.png", "last", "metrics.jsonl", "step-000008",
    ]  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["norm"], config["vocab_size"], config["steps"], config["format"]) == ("pre", 256, 8, 1)
    assert [("val_loss" in record) for record in metrics(folder)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_best_is_the_step_of_the_least_validation_loss(run, tmp_path):
    """Random letters can only be learnt by heart, so that the validation loss rises again."""
    (tmp_path / "random.txt").write_text("".join(random.Random(0).choices("abcdefgh", k=600)), encoding="utf-8")
    folder = run("a", data=str(tmp_path / "random.txt"), steps=300, eval_every=25, log_every=25, keep=1)
    losses = {record["step"]: record["val_loss"] for record in metrics(folder) if "val_loss" in record}
    best = min(losses, key=losses.get)
    assert best < 300 and checkpoint.find(folder).name == f"step-{best:06d}"
    assert checkpoint.find(folder, "last").name == "step-000300"


def test_without_a_validation_split(run):
    folder = run("a", val_fraction=0)
    assert not any("val_loss" in record for record in metrics(folder)) and not (folder / "best").exists()
    assert checkpoint.load_model(folder).config.n_layers == 2


@pytest.mark.parametrize("norm, lr, warmup_steps", [("none", 1e30, 6), ("pre", 1e300, 0)])  # the loss; the weights
def test_what_is_not_finite_stops_the_run_and_spoils_nothing(run, tmp_path, norm, lr, warmup_steps):
    bad = {"lr": lr, "min_lr": 0.0, "warmup_steps": warmup_steps, "steps": 20, "save_every": 1, "val_fraction": 0}
    message = r"the run diverged \(step \d+: loss .*gradient norm .*\)\. Lower --lr"
    with pytest.raises(FloatingPointError, match=message):
        run("a", norm=norm, **bad)
    folder = tmp_path / "a"
    for path in folder.glob("step-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    if (folder / "metrics.jsonl").exists():
        assert all(math.isfinite(record["loss"]) for record in metrics(folder))
    assert (folder / "last").exists() == (norm == "none")


def test_a_loss_on_another_text_is_not_the_best_of_this_one(run, tmp_path):
    run("a")
    (tmp_path / "other.txt").write_text("something else. " * 200, encoding="utf-8")
    run("a", resume="last", data=str(tmp_path / "other.txt"), steps=9, eval_every=100)
    state = checkpoint.read_state(checkpoint.find(tmp_path / "a", "last"))[0]
    assert state["best_step"] == 9 and state["best_val_loss"] == metrics(tmp_path / "a")[-1]["val_loss"]


def test_a_compiler_that_fails_costs_no_run(run, tmp_path, monkeypatch):
    before = contents(run("a"))

    def fail(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    for how in ({"overwrite": True}, {"resume": "last"}):
        config = toy_config(data=str(tmp_path / "text.txt"), steps=10, compile="on")
        with pytest.raises(ValueError, match="torch.compile failed"):
            script.train(config, str(tmp_path / "a"), **how)
    assert contents(tmp_path / "a")[1] == before[1]


def test_nothing_is_written_before_a_mistake_is_found(run, tmp_path):
    for settings in ({"data": "nowhere.txt"}, {"context_length": 5000}, {"norm": "prr"}, {"device": "cuda:99"}):
        with pytest.raises(ValueError):
            run("a", **settings)
    assert not (tmp_path / "a").exists()


def test_text_by_gpt2_tokens(run):
    folder = run("a", tokenizer="gpt2", steps=2, context_length=8)
    assert checkpoint.load_model(folder).config.vocab_size == 50257
    assert metrics(folder)[0]["loss"] == pytest.approx(math.log(50257), rel=0.05)


def test_bfloat16_on_the_cpu_is_close_and_keeps_float32_weights(run):
    exact, rough = metrics(run("exact")), metrics(run("rough", dtype="bfloat16"))
    assert rough[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.02)
    assert rough[-1]["loss"] != exact[-1]["loss"]
