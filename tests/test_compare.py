"""Comparisons: paired, honest about noise, resumed where they stopped."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toys import ROOT, TOY, TOY_RUN, as_flags, call, toy_config

import compare
import train
from gpt import BLOCKS, GPT, ModelConfig
from gpt.blocks import Block
from gpt.study.comparison import markdown, overview, paired, students_p, summarize
from gpt.training.files import read_lines

RUN = TOY_RUN | {"steps": 6, "eval_every": 3, "seed": 7}
FLAGS = as_flags(RUN)


def outcomes(folder):
    """What results.json says of each run, its speed apart."""
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    return {name: run | {"tokens_per_s": 0} for name, run in runs.items()}


def watch(monkeypatch):
    """The (folder, resume) of each training that compare.py begins from now on."""
    began = []

    def train_and_tell(config, out, resume, **arguments):
        began.append((out, resume))
        return train.train(config, out, resume, **arguments)

    monkeypatch.setattr(compare, "train", train_and_tell)
    return began


def test_a_comparison_is_the_same_training_and_its_table_is_the_losses(here, text_file, capsys):
    command = ["pre", "post", "rezero", "--seeds", 2, "--data", "text.txt", *FLAGS, "--out", "c"]
    status, out, err = call(compare, *command, capsys=capsys)
    assert (status, err) == (0, "") and "\r" not in out
    runs = outcomes(here / "c")
    assert [*runs] == ["pre-7", "post-7", "rezero-7", "pre-8", "post-8", "rezero-8"]
    config = toy_config(**RUN | {"data": str(text_file), "norm": "post", "seed": 8})
    alone = train.train(config, str(here / "alone"))
    assert runs["post-8"]["val_loss"] == alone["val_loss"] and runs["post-8"]["best_step"] == alone["best_step"]
    one, other = (
        [record | {"tokens_per_s": 0} for record in read_lines(folder / "metrics.jsonl")]
        for folder in (here / "alone", here / "c" / "post-8")
    )
    assert one == other
    table = (here / "c" / "results.md").read_text(encoding="utf-8")
    assert table in out
    cells = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    rows = {row[1]: row[2:] for row in cells}
    for norm in ("pre", "post", "rezero"):
        losses = [runs[f"{norm}-{seed}"]["val_loss"] for seed in (7, 8)]
        assert rows[norm][2] == f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}"
        assert rows[norm][7] == "yes"
    differences = [runs[f"post-{seed}"]["val_loss"] - runs[f"pre-{seed}"]["val_loss"] for seed in (7, 8)]
    error = abs(differences[0] - differences[1]) / 2
    assert rows["post"][4] == f"{statistics.fmean(differences):+.4f} ± {error:.4f}"
    assert rows["post"][5] == f"{sum(d < 0 for d in differences)} of 2" and rows["pre"][4:6] == ["", ""]
    # Each log step of each run is a line, for want of a terminal.
    assert len(re.findall(r"^(pre|post|rezero) +[78] +\d/6 +step ", out, re.M)) == 6 * 6
    assert [record["step"] for record in read_lines(here / "c" / "pre-7" / "probe.jsonl")] == [0, 6]
    for name in ("curves.png", "depth.png", "pre-7/curve.png"):
        assert (here / "c" / name).read_bytes().startswith(b"\x89PNG")


def test_a_finished_comparison_does_nothing_again_and_takes_more_placements_and_seeds(here, capsys, monkeypatch):
    command = ["--data", "text.txt", *FLAGS, "--out", "c"]
    call(compare, "pre", "post", "--seeds", 1, *command, capsys=capsys)
    before = outcomes(here / "c")
    began = watch(monkeypatch)
    status, out, _ = call(compare, "pre", "post", "none", "--seeds", 2, *command, capsys=capsys)
    assert status == 0 and " step " not in out.partition("none 7")[0]
    after = outcomes(here / "c")
    assert before.items() <= after.items() and len(after) == 6
    assert began == [(str(Path("c", name)), None) for name in ("none-7", "pre-8", "post-8", "none-8")]
    for other, message in (
        (["--steps", 7], "the comparison has another steps (6, not 7, in c). Leave it, or name another --out."),
        (["--data", "other.txt"], "the comparison has another data"),
    ):
        (here / "other.txt").write_text("else " * 500, encoding="utf-8")
        status, out, err = call(compare, "pre", *command, *other, capsys=capsys)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    (here / "text.txt").write_text("changed " * 500, encoding="utf-8")
    status, _, err = call(compare, "pre", *command, capsys=capsys)
    assert status == 2 and "the comparison has another corpus" in err and outcomes(here / "c") == after
    shutil.rmtree(here / "c" / "none-8")
    shutil.copy(here / "c" / "results.json", here / "c" / "mine.json")
    assert call(compare, "pre", "--seeds", 1, *command, "--overwrite", capsys=capsys)[0] == 0
    assert [*outcomes(here / "c")] == ["pre-7"] and not (here / "c" / "post-7").exists()
    assert (here / "c" / "mine.json").exists()


def test_a_placement_that_has_changed_since_is_not_passed_off_as_what_it_was(here, capsys, monkeypatch):
    class Half(Block):
        def forward(self, x):
            x = x + self.attn(self.attn_norm(x)) / 2
            return x + self.mlp(self.mlp_norm(x)) / 2

    class Eighth(Half):
        def forward(self, x):
            x = x + self.attn(self.attn_norm(x)) / 8
            return x + self.mlp(self.mlp_norm(x)) / 8

    command = ["pre", "half", "--seeds", 1, "--data", "text.txt", *FLAGS, "--out", "c"]
    monkeypatch.setitem(BLOCKS, "half", Half)
    assert call(compare, *command, capsys=capsys)[0] == call(compare, *command, capsys=capsys)[0] == 0
    monkeypatch.setitem(BLOCKS, "half", Eighth)
    status, _, err = call(compare, *command, capsys=capsys)
    assert status == 2 and "the placement has changed since (half, whose runs are in c). Delete those runs" in err
    assert call(compare, "pre", *command[2:], capsys=capsys)[0] == 0
    shutil.rmtree(here / "c" / "half-7")
    assert call(compare, *command, capsys=capsys)[0] == 0


def test_placements_may_have_commas_and_a_configuration_anywhere_among_them(here, capsys):
    (here / "c.toml").write_text("steps = 3\nwarmup_steps = 2", encoding="utf-8")
    settings = {name: value for name, value in RUN.items() if name != "steps"}
    flags = ["--data", "text.txt", *as_flags(settings), "--out", "c"]
    status, out, _ = call(compare, "pre,post", "c.toml", "none", "--seeds", 1, *flags, capsys=capsys)
    assert status == 0 and out.startswith("compare pre, post, none; seed 7\n") and " 3 steps on text" in out
    out = call(compare, "c.toml", "pre", "--seeds", 1, *flags, capsys=capsys)[1]
    assert out.endswith("there, and not in these: none, post\n")


def test_a_terminal_gets_the_same_in_short():
    runs = {
        f"{norm}-{seed}": outcome(norm, seed, 1.5 + seed + 0.1 * (norm == "reordered"))
        for norm in ("pre", "reordered")
        for seed in range(3)
    }
    text = overview(summarize(["pre", "reordered"], [0, 1, 2], runs), [0, 1, 2])
    assert text.splitlines() == [
        "           validation loss  less that of pre",
        "pre        2.5000 ± 1.0000",
        "reordered  2.6000 ± 1.0000  +0.1000 ± 0.0000  higher than pre, p < 0.001",
    ]


def test_a_run_whose_folder_was_deleted_is_done_again(here, capsys):
    command = ["pre", "post", "--seeds", 1, "--data", "text.txt", *FLAGS, "--out", "c"]
    call(compare, *command, capsys=capsys)
    before = outcomes(here / "c")
    shutil.rmtree(here / "c" / "post-7")
    status, out, _ = call(compare, *command, capsys=capsys)
    assert status == 0 and outcomes(here / "c") == before and re.search("^post 7 +2/2 +step ", out, re.M)
    assert not re.search("^pre 7 +1/2 +step ", out, re.M)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_comparison_that_was_ended_goes_on_to_the_same_results(here, capsys, monkeypatch, signum):
    flags = ["--seeds", 2, "--data", "text.txt", *FLAGS, "--steps", 40, "--save-every", 5]
    flags += ["--eval-every", 20, "--dropout", 0.1]
    command = [sys.executable, ROOT / "compare.py", "pre", "post", *flags, "--out", "ended"]
    process = subprocess.Popen(
        [*map(str, command)], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (here / "ended" / "post-7" / "last").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    if signum == signal.SIGKILL:
        assert process.returncode == -signum
    else:
        assert process.returncode == 128 + signum and err == ""
        assert out.endswith("stopped; the same command goes on with ended\n")
    done = outcomes(here / "ended")
    assert len(done) < 4
    began = watch(monkeypatch)
    assert call(compare, "pre", "post", *flags, "--out", "ended", capsys=capsys)[0] == 0
    assert began[0] == (str(Path("ended", "post-7")), "last") and len(began) == 4 - len(done)
    assert call(compare, "pre", "post", *flags, "--out", "whole", capsys=capsys)[0] == 0
    assert outcomes(here / "ended") == outcomes(here / "whole") and done.items() <= outcomes(here / "ended").items()


class Exploding(Block):
    """The stream grows a thousandfold a block, and the loss ends as no number."""

    def forward(self, x):
        return 1e30 * (x + self.attn(x) + self.mlp(x)) ** 3


def test_a_run_that_diverges_is_a_result_and_not_the_end(here, capsys, monkeypatch):
    monkeypatch.setitem(BLOCKS, "exploding", Exploding)
    command = ["exploding", "pre", "--seeds", 2, "--data", "text.txt", *FLAGS, "--out", "c"]
    status, out, _ = call(compare, *command, capsys=capsys)
    assert status == 0
    runs = outcomes(here / "c")
    assert runs["exploding-7"]["diverged"] == 1 and runs["pre-8"]["diverged"] is None
    assert "- `exploding`: diverged in 2 of 2 runs (at step 1, 1)." in out and "| 2 of 2 diverged |" in out
    again = call(compare, *command, capsys=capsys)[1]
    assert " step " not in again.partition("|")[0] and again.partition("|")[2] == out.partition("|")[2]
    status, out, _ = call(compare, *command[:1], *command[2:-1], "all", capsys=capsys)
    assert status == 0 and "2 of 2 diverged" in out and (here / "all" / "curves.png").exists()


def test_a_bug_in_a_placement_of_ones_own_is_met_before_anything_is_trained(here, monkeypatch):
    class Broken(Block):
        def forward(self, x):
            return x + self.attn(x)[..., 1:]

    monkeypatch.setitem(BLOCKS, "broken", Broken)
    began = watch(monkeypatch)
    with pytest.raises(RuntimeError, match="size of tensor"):
        compare.main(["pre", "broken", "--data", "text.txt", *FLAGS, "--out", "c"])
    assert began == [] and not (here / "c").exists()


BAD = [
    (["prre"], "unknown norm (prre). Did you mean"),
    (["pre", "post", "pre"], "a placement is named twice (pre, post, pre)"),
    (["text.toml"], "cannot read the configuration"),
    (["pre", "--seeds", "0"], "nothing to compare (1 placements, 0 seeds)"),
    (["pre", "--norm", "post"], "unexpected argument (--norm). Name placements without a flag."),
    (["pre", "--resume"], "unexpected argument (--resume). The same command goes on."),
    (["pre", "--keep", "3", "post"], "unexpected argument (post). Placements stand side by side"),
    (["a.toml", "pre", "b.toml"], "two configurations (a.toml, b.toml)"),
    (["pre", "--val-fraction", "0"], "needs a validation split"),
    (["pre", "--data", "nowhere.txt"], "no such file"),
    (["pre", "--out", "taken"], "the output folder is not a comparison"),
    (["pre", "--out", "text.txt"], "cannot make the folder"),
    (["pre", "--out", "other", "--overwrite"], "the output folder is not a comparison"),
    (["pre", "--out", "taken", "--overwrite"], "the output folder is not a comparison"),
    (["pre", "post", "--n-heads", "3"], "n_heads must divide d_model"),
    (["pre", "--norm-layer", "batchnorm"], "unknown norm_layer (batchnorm)"),
    (["pre", "--seed", str(2**63 - 1), "--seeds", "2"], "seed is out of range"),
    (["pre", "--device", "cuda:9", "--out", "done", "--overwrite"], "the device is not there"),
    (["pre", "--val-fraction", "0.0001", "--out", "done", "--overwrite"], "the validation split is too short"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_mistake_is_one_line_and_nothing_is_written(here, capsys, arguments, message):
    (here / "taken").mkdir()
    (here / "taken" / "thesis.txt").write_text("x", encoding="utf-8")
    (here / "other").mkdir()
    (here / "other" / "results.json").write_text('{"mine": 1}', encoding="utf-8")
    (here / "done").mkdir()
    (here / "done" / "results.json").write_text('{"format": 1, "settings": {}, "runs": {}}', encoding="utf-8")
    before = sorted(here.rglob("*"))
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    command = [*names, "--data", "text.txt", *FLAGS, *arguments[len(names) :]]
    status, out, err = call(compare, *command, capsys=capsys)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30])
def test_students_p_is_the_integral_of_its_density(freedom):
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    for t in (0.0, 0.3, 1.0, 2.5, 8.0):
        x = torch.linspace(0, t, 20_001, dtype=torch.float64)
        inside = 2 * torch.trapezoid(constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
        assert students_p(t, freedom) == pytest.approx(1 - float(inside), abs=1e-7)
        assert students_p(-t, freedom) == students_p(t, freedom)
    assert 0 <= students_p(1e9, freedom) < 1e-8


def outcome(norm, seed, loss):
    """Of a run that ended, or with the loss None diverged."""
    fields = {"norm": norm, "seed": seed, "val_loss": loss, "best_val_loss": loss, "tokens_per_s": 5}
    return fields | {"diverged": 3 if loss is None else None}


def table_of(*losses):
    """Of `a` and `b`, whose validation losses are given seed by seed; None has diverged."""
    runs = {f"{norm}-{s}": outcome(norm, s, loss) for norm, own in zip("ab", losses) for s, loss in enumerate(own)}
    seeds = list(range(len(losses[0])))
    table = [{"parameters": 9, "in_norms": 2} | entry for entry in summarize(["a", "b"], seeds, runs)]
    return markdown(table, seeds, "byte")


def test_the_words_say_whether_a_difference_is_within_the_noise():
    assert "- `b`: lower than a, p = 0.0033." in table_of((1, 2, 3), (0.91, 1.89, 2.9))
    assert "- `b`: higher than a, p = " in table_of((1, 2, 3), (1.11, 2.1, 3.09))
    text = table_of((1, 2, 3), (1.1, 1.9, 3.01))
    assert "- `b`: within the noise of 3 seeds, p = 0.96: more of them would have to tell." in text
    assert "| 1 of 3 |" in text
    assert "- `b`: one pair of runs says nothing about noise." in table_of((1,), (1.2,))
    text = table_of((1, 2, 3), (0.91, None, 2.9))
    assert "- `b`: diverged in 1 of 3 runs (at step 3); lower than a, p = 0.033." in text
    assert "| 1 of 3 diverged |" in text
    assert "- `b`: diverged in 2 of 2 runs (at step 3, 3)." in table_of((1, 2), (None, None))
    assert "(at step 3); no seed in which a ended as well: name another placement first." in table_of(
        (None, 1), (1, None)
    )
    assert "- `b`: the same losses as a." in table_of((1, 2), (1, 2))
    assert "p < 0.001" in table_of((1, 2, 3), (0.9, 1.9, 2.9001))


def test_paired_differences_are_tested_and_not_the_two_groups():
    """Seeds differ by 1, placements by 0.01: a difference that only pairing finds."""
    found = paired([-0.010, -0.011, -0.009])
    assert found["p"] < 0.005 and found["lower"] == found["seeds"] == 3
    assert found["error"] == pytest.approx(0.001 / math.sqrt(3))
    assert paired([0.5])["p"] is None and paired([0.0, 0.0])["p"] == 1 and paired([0.1, 0.1])["p"] == 0


@pytest.mark.parametrize("norm", BLOCKS)
def test_placements_start_from_the_same_weights_where_names_and_shapes_agree(norm):
    """deepnorm and lns start some rows at another scale, from the same draws."""
    models = []
    for each in ("pre", norm):
        torch.manual_seed(7)
        models.append(dict(GPT(ModelConfig(**TOY, norm=each)).named_parameters()))
    pre, other = models
    shared = [name for name in pre if name in other and pre[name].dim() > 1]
    assert len(shared) == 2 + 4 * TOY["n_layers"]
    for name in shared:
        scale = other[name].norm(dim=-1, keepdim=True) / pre[name].norm(dim=-1, keepdim=True)
        assert torch.allclose(pre[name] * scale, other[name], rtol=1e-5, atol=1e-8), name
        assert norm in ("deepnorm", "lns") or torch.equal(pre[name], other[name]), name
