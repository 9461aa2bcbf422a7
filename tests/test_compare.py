"""Comparisons: paired, honest about noise, resumed where they stopped, and never mixed with other code."""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import shutil
import signal
import statistics
from pathlib import Path

import pytest
from toys import TOY, TOY_RUN, as_flags, call, records, toy_config

import compare
import probe
import train
from gpt import BLOCKS, GPT, ModelConfig
from gpt.blocks import Block, PreLN
from gpt.files import read_json
from gpt.study import depth, plots, results
from gpt.training import code

RUN = TOY_RUN | {"steps": 6, "eval_every": 3, "seed": 7}
FLAGS = [*as_flags(RUN), "--jobs", 1]


SHALLOW = FLAGS[2:]  # without --n-layers, beside which there is no --depths
RAMP = [*as_flags({name: value for name, value in RUN.items() if name != "warmup_steps"}), "--jobs", 1]


def compared(*words) -> str:
    """What a comparison prints, for fixtures of the whole file, which cannot have capsys."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        compare.main([*map(str, words)])
    assert not exit.value.code
    out.seek(0)
    return out.read()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with text.txt, the comparison c of pre and post with two seeds, and out.txt, what that printed."""
    folder = tmp_path_factory.mktemp("finished")
    text = "".join(f"{i}: the norm is {i * 7919 % 101} here\n" for i in range(200))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    out = compared("pre", "post", "--seeds", 2, "--data", folder / "text.txt", *FLAGS, "--out", folder / "c")
    (folder / "out.txt").write_text(out, encoding="utf-8")
    return folder


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    """A working folder with a copy of the finished comparison, c. Call it with capsys and the arguments of a comparison
    that goes on with c, for the (status, stdout, stderr). No pictures are drawn."""
    shutil.copytree(finished / "c", tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "draw", lambda *arguments: None)
    monkeypatch.setattr(results, "_draw", lambda *arguments: None)
    flags = ["--data", finished / "text.txt", *FLAGS, "--out", "c"]
    return lambda capsys, *words: call(compare, words[0], *flags, *words[1:], capsys=capsys)


@pytest.fixture
def began(monkeypatch) -> list:
    """The (name, resume) of each run that a comparison begins from now on."""
    runs = []

    def train_and_tell(config, out, resume, **arguments):
        runs.append((Path(out).name, resume))
        return train.train(config, out, resume, **arguments)

    monkeypatch.setattr(compare, "train", train_and_tell)
    return runs


def outcomes(folder=Path("c")) -> dict:
    """The outcome of each run of a comparison, its speed apart."""
    return {path.parent.name: read_json(path) | {"tokens_per_s": 0} for path in sorted(folder.glob("*/outcome.json"))}


def edit(run: str, **changes):
    """Change the outcome of a run in c."""
    path = Path("c", run, "outcome.json")
    path.write_text(json.dumps(read_json(path) | changes), encoding="utf-8")


def test_a_run_of_a_comparison_is_the_same_training_as_alone(finished, tmp_path):
    runs = outcomes(finished / "c")
    assert [*runs] == ["post-7", "post-8", "pre-7", "pre-8"]
    config = toy_config(**RUN | {"data": str(finished / "text.txt"), "norm": "post", "seed": 8})
    end = train.train(config, str(tmp_path / "alone"))
    assert {name: end[name] for name in ("val_loss", "best_val_loss", "best_step")}.items() <= runs["post-8"].items()
    assert records(tmp_path / "alone") == records(finished / "c" / "post-8")
    assert [record["step"] for record in records(finished / "c" / "pre-7", "probe.jsonl")] == [0, 6]


def test_the_table_and_the_pictures_are_of_the_runs(finished):
    runs, table = outcomes(finished / "c"), (finished / "c" / "results.md").read_text(encoding="utf-8")
    out = (finished / "out.txt").read_text(encoding="utf-8")
    assert table.split("\n\n")[1] in out and "\r" not in out
    assert sum(line.startswith("post-8  step ") for line in out.splitlines()) == 6  # no bar without a terminal
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    cells = {line[0]: dict(zip(lines[0], line)) for line in lines[2:]}
    losses = {name: [runs[f"{name}-{seed}"]["val_loss"] for seed in (7, 8)] for name in ("pre", "post")}
    for name, (one, other) in losses.items():
        text = f"{statistics.fmean([one, other]):.4f} ± {abs(one - other) / math.sqrt(2):.4f}"
        assert cells[name]["validation loss, nats per byte"] == text
        model = GPT(ModelConfig(**TOY, norm=name))
        for column, count in (
            ("parameters", model.count_parameters()),
            ("of them in norms", model.count_parameters("norm")),
        ):
            assert cells[name][column] == f"{count:,}"
    one, other = (post - pre for pre, post in zip(*losses.values()))
    assert cells["post"]["difference to pre"] == f"{(one + other) / 2:+.4f} ± {abs(one - other) / 2:.4f}"
    assert cells["post"]["lower than pre"] == f"{(one < 0) + (other < 0)} of 2"
    assert cells["pre"]["difference to pre"] == cells["pre"]["lower than pre"] == ""
    for name in ("curves.png", "depth.png", "pre-7/curve.png"):
        assert (finished / "c" / name).read_bytes().startswith(b"\x89PNG")


def test_the_rows_are_those_of_the_runs_in_all_formats(finished):
    rows = json.loads((finished / "c" / "results.json").read_text(encoding="utf-8"))
    with open(finished / "c" / "results.csv", encoding="utf-8", newline="") as file:
        lines = [*csv.DictReader(file)]
    runs = outcomes(finished / "c")
    assert [row["run"] for row in rows] == [line["run"] for line in lines] == ["pre-7", "post-7", "pre-8", "post-8"]
    for row, line in zip(rows, lines):
        assert (row | {"tokens_per_s": 0}).items() >= runs[row["run"]].items()
        assert float(line["val_loss"]) == row["val_loss"] and line["norm"] == row["norm"]


def test_a_folder_in_which_a_run_is_just_beginning_is_a_comparisons(copied, began, capsys):
    """As another process sees it, which comes a little later."""
    shutil.rmtree("c")
    Path("c", "pre-7").mkdir(parents=True)
    Path("c", ".pre-7.lock").touch()
    assert copied(capsys, "pre", "--seeds", 1)[0] == 0 and began == [("pre-7", None)]


def test_more_entries_and_seeds_are_added(copied, began, capsys):
    before = outcomes()
    assert copied(capsys, "pre,post", "--seeds", 2)[0] == 0 and began == []
    status, out, err = copied(capsys, "none,pre", "--seeds", 1)
    assert (status, err, began) == (0, "", [("none-7", None)]) and "post-8" in out.splitlines()[-1]
    assert copied(capsys, "pre", "--seeds", 3)[0] == 0 and began[1:] == [("pre-9", None)]
    assert before.items() <= outcomes().items() and len(outcomes()) == 6


def test_a_default_that_is_typed_is_the_same(copied, began, capsys):
    typed = ["--lr", 0.012, "--min-lr", 0, "--micro-batch-size", 4, "--save-every", 3, "--grad-clip", 1]
    assert copied(capsys, "pre", "--seeds", 2, *typed)[0] == 0 and began == []


def test_each_comparison_has_a_folder_by_default(copied, began, finished, capsys):
    """The one of its settings, or a new one."""
    flags = ["--data", finished / "text.txt", *FLAGS, "--seeds", 1]
    Path("runs", "compare-post").mkdir(parents=True)
    Path("runs", "compare-post", "thesis.txt").touch()
    for words, folder in (
        (["pre", *flags], "compare-pre"),
        (["pre", *flags, "--lr", 0.01], "compare-pre-2"),
        (["pre", *flags, "--lr", 0.012], "compare-pre"),
        (["pre", *flags, "--seeds", 2], "compare-pre"),
        (["pre", *flags, "--lr", 0.01], "compare-pre-2"),
        (["post", *flags], "compare-post-2"),
    ):
        status, out, _ = call(compare, *words, capsys=capsys)
        assert status == 0 and f"folder  {Path('runs', folder)}\n" in out
    assert began == [("pre-7", None), ("pre-7", None), ("pre-8", None), ("post-7", None)]


@pytest.mark.parametrize("flags, value", [(["--steps", 7], "(6, not 7, in"), (["--data", "else.txt"], "corpus")])
def test_other_settings_are_refused(copied, capsys, flags, value):
    before = outcomes()
    Path("else.txt").write_text("else " * 500, encoding="utf-8")
    status, out, err = copied(capsys, "pre", *flags)
    assert (status, out) == (2, "") and value in err and "--out" in err and err.count("\n") == 1
    assert outcomes() == before


def test_another_text_of_the_same_name_is_refused(copied, capsys):
    edit("pre-8", corpus="0123")
    status, _, err = copied(capsys, "pre")
    assert status == 2 and "corpus (0123, not " in err and "--out" in err


@pytest.mark.parametrize("content", ["{}", "[1]", "", '{"val_loss": "low"}'])
def test_a_damaged_outcome_is_one_line(copied, capsys, content):
    Path("c", "pre-7", "outcome.json").write_text(content, encoding="utf-8")
    status, out, err = copied(capsys, "pre")
    assert (status, out) == (2, "") and "pre-7" in err and "elete" in err and err.count("\n") == 1


def test_overwrite_deletes_the_runs_and_nothing_else(copied, began, capsys):
    Path("c", "mine.json").touch()
    Path("c", "pre-7", "mine.txt").touch()
    shutil.copytree("c/pre-7", "elsewhere")
    shutil.copytree("c/pre-7", "c/alone")  # a run of the user's, as train.py makes them
    if os.name != "nt":
        shutil.rmtree("c/post-8")
        os.symlink("../elsewhere", "c/post-8")
    status, _, err = copied(capsys, "pre", "--seeds", 1, "--overwrite")
    assert status == 2 and "pre-7" in err and "comparison" not in err  # it has a file of the user
    Path("c", "pre-7", "mine.txt").unlink()
    assert copied(capsys, "pre", "--seeds", 1, "--overwrite")[0] == 0
    assert began == 2 * [("pre-7", None)] and not Path("c", "post-7").exists()
    assert Path("c", "mine.json").exists() and all(Path(run, "last").exists() for run in ("elsewhere", "c/alone"))


def test_a_finished_comparison_is_done_again(copied, began, capsys):
    assert Path("c", "results.md").exists()
    assert copied(capsys, "pre,post", "--seeds", 2, "--overwrite")[0] == 0 and len(began) == 4


def test_a_run_that_train_py_goes_on_with_is_no_longer_the_comparisons(copied, capsys, quick):
    assert call(train, "--resume", "--out", "c/pre-7", "--steps", 9, capsys=capsys)[0] == 0
    status, out, err = copied(capsys, "pre,post", "--seeds", 2)
    assert (status, out) == (2, "") and "steps (9, not 6, in" in err and "pre-7" in err


@pytest.mark.parametrize("content", ["", '{"step": 1, "loss": 3.0, "grad_norm": 1.0}\n'])
def test_losses_that_are_lost_are_no_spikes(copied, capsys, content):
    Path("c", "pre-7", "steps.jsonl").write_text(content, encoding="utf-8")
    status, _, err = copied(capsys, "pre,post", "--seeds", 2)
    assert status == 2 and f"Delete {Path('c', 'pre-7')}" in err and "of 6" in err and err.count("\n") == 1


def test_a_run_that_chose_a_rate_is_never_counted(copied, capsys, began):
    """Also where another comparison in the folder counts its seed."""
    assert copied(capsys, "pre", "--rates", 0.01, 0.02, "--seeds", 1)[0] == 0
    chosen = {run["seed"] for run in outcomes().values() if run["part"] == "rate"}
    assert copied(capsys, "pre", "--rates", 0.01, 0.02, "--seeds", 1, "--seed", *chosen)[0] == 0
    names = [name for name, _ in began]
    assert len(names) == len(set(names)) == 6


def test_a_run_whose_folder_was_deleted_is_done_again(copied, began, capsys):
    before = outcomes()
    shutil.rmtree("c/post-7")
    assert copied(capsys, "pre,post", "--seeds", 2)[0] == 0
    assert began == [("post-7", None)] and outcomes() == before


class Halved(PreLN):
    """Another equation."""

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x)) / 2
        return x + self.mlp(self.mlp_norm(x)) / 2


def test_runs_of_other_code_are_refused(copied, began, capsys, monkeypatch):
    """Those of the entries that are named, ended or begun; a comparison without a name gets another folder."""
    monkeypatch.setitem(BLOCKS, "post", Halved)
    assert copied(capsys, "pre", "--seeds", 2)[0] == 0
    for run in ("post-7", "post-8"):
        status, out, err = copied(capsys, "pre,post", "--seeds", 2)
        assert (status, out) == (2, "") and "code" in err and run in err and "--out" in err and err.count("\n") == 1
        Path("c", run, "outcome.json").unlink()  # as if it had only begun
        assert run in copied(capsys, "pre,post", "--seeds", 2)[2]
        shutil.rmtree(Path("c", run))
    assert began == [] and copied(capsys, "pre,post", "--seeds", 1)[0] == 0 and began == [("post-7", None)]


def test_entries_may_have_commas_and_a_configuration_among_them(copied, began, finished, capsys):
    Path("c.toml").write_text("lr = 0.01\nn_layers = 5", encoding="utf-8")  # a flag, here of n_layers, prevails
    words = ["post,pre", "c.toml", "none", "--seeds", 1, "--data", finished / "text.txt", *FLAGS, "--out", "c"]
    status, _, err = call(compare, *words, capsys=capsys)
    assert status == 2 and "lr (0.012, not 0.01, in" in err
    Path("c.toml").write_text("n_layers = 5", encoding="utf-8")
    status, out, _ = call(compare, *words, capsys=capsys)
    assert (status, began) == (0, [("none-7", None)]) and out.startswith("compare post, pre, none; seed 7\n")


def test_an_entry_has_settings_of_its_own(here, capsys, quick):
    """On the command line and in a file; they are in the run, in its name and in the table."""
    Path("c.toml").write_text('[entries.mine]\nnorm = "post"\nlr = 0.003\nd_model = 16\n', encoding="utf-8")
    words = ["pre", "pre:norm_layer=rmsnorm,bias=false", "c.toml", "--seeds", 1, "--data", "text.txt", *FLAGS]
    status, out, _ = call(compare, *words, "--out", "c", capsys=capsys)
    runs = outcomes()
    assert status == 0 and sorted(runs) == ["mine-7", "pre-7", "pre-norm_layer=rmsnorm,bias=false-7"]
    assert "`mine`" in out and "`pre:norm_layer=rmsnorm,bias=false`" in out
    own = {"norm": "post", "lr": 0.003, "d_model": 16}
    assert runs["mine-7"].items() >= own.items() <= read_json(Path("c", "mine-7", "config.json")).items()
    assert runs["pre-norm_layer=rmsnorm,bias=false-7"]["bias"] is False


def test_each_entry_trains_at_its_best_rate_at_each_depth(here, capsys, quick):
    words = ["pre", "post", "--seeds", 2, "--rates", 0.03, 0.001, "--depths", 2, 1, "--data", "text.txt", *SHALLOW]
    status, out, _ = call(compare, *words, "--out", "c", capsys=capsys)
    runs = outcomes()
    assert status == 0 and len(runs) == 2 * 2 * (2 + 2)
    for entry in ("pre", "post"):
        for blocks in (1, 2):
            mine = [run for run in runs.values() if run["entry"] == entry and run["n_layers"] == blocks]
            tries = [run for run in mine if run["part"] == "rate"]
            counted = [run for run in mine if run["part"] == "counted"]
            best = min(tries, key=lambda run: run["val_loss"])
            assert {run["lr"] for run in tries} == {0.001, 0.03} and {run["seed"] for run in tries} == {1007}
            assert {run["lr"] for run in counted} == {best["lr"]} and {run["seed"] for run in counted} == {7, 8}
    for name in ("rates.png", "depths.png", "depth-1-blocks.png", "depth-2-blocks.png", "curves.png"):
        assert Path("c", name).read_bytes().startswith(b"\x89PNG") and name in out


def test_a_ramp_rises_to_its_top_and_tells_where_it_left(here, capsys, quick):
    flags = [*RAMP, "--steps", 120, "--eval-every", 120, "--log-every", 60]
    words = ["pre", "none:lr=1000", "--seeds", 1, "--max-rate", 5, "--data", "text.txt", *flags, "--out", "c"]
    status, out, _ = call(compare, *words, capsys=capsys)
    runs = outcomes()
    assert status == 0 and sorted(runs) == ["none-lr=1000-ramp-7", "pre-ramp-7"]
    assert runs["pre-ramp-7"]["lr"] == pytest.approx(5 * 0.012) and runs["pre-ramp-7"]["warmup_steps"] == 120
    rows = {row["run"]: row for row in json.loads(Path("c", "results.json").read_text(encoding="utf-8"))}
    row = rows["none-lr=1000-ramp-7"]
    assert row["stuck"] or row["largest_rate"] < 5000
    assert "largest rate" in out
    assert Path("c", "ramps.png").read_bytes().startswith(b"\x89PNG")


LONG = ["pre", "post", "--seeds", 1, *FLAGS, "--steps", 30, "--save-every", 5, "--eval-every", 30, "--dropout", 0.1]


@pytest.fixture(scope="module")
def whole(finished):
    """The outcomes of a longer comparison that nothing ended, without pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw", lambda *arguments: None)
        patch.setattr(results, "_draw", lambda *arguments: None)
        compared(*LONG, "--data", finished / "text.txt", "--out", finished / "whole")
    return outcomes(finished / "whole")


@pytest.mark.parametrize("signum", ["SIGKILL", "SIGTERM"])
def test_a_comparison_that_was_ended_goes_on_to_the_same_results(copied, began, finished, whole, forks, capsys, signum):
    signum = signal.Signals[signum]
    flags = [*LONG, "--data", finished / "text.txt", "--out", "ended"]
    process = forks.start("compare", *flags, cwd=os.getcwd())
    assert process.wait(until=Path("ended", "post-7", "last").exists) is None
    status = process.kill(signum)
    assert status == (-signum if signum == signal.SIGKILL else 128 + signum) and process.err == ""
    assert [*outcomes(Path("ended"))] == ["pre-7"]
    assert call(compare, *flags, capsys=capsys)[0] == 0
    assert began == [("post-7", "last")] and outcomes(Path("ended")) == whole


class Exploding(Block):
    """The stream grows without limit, and the loss is no number."""

    def forward(self, x):
        return 1e30 * (x + self.attn(x) + self.mlp(x)) ** 3


def test_a_run_that_diverges_is_a_result_and_not_the_end(copied, began, capsys, monkeypatch):
    monkeypatch.setitem(BLOCKS, "exploding", Exploding)
    status, out, _ = copied(capsys, "exploding,pre", "--seeds", 2)
    assert status == 0 and "diverged in 2 of 2 runs" in out
    assert outcomes()["exploding-7"]["diverged"] == 1 and outcomes()["pre-8"]["diverged"] is None
    assert began == [("exploding-7", None), ("exploding-8", None)]


def test_there_are_pictures_also_where_all_runs_diverged(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "exploding", Exploding)
    drawn, really = [], plots.depth_lines
    monkeypatch.setattr(plots, "depth_lines", lambda panels, *rest: (drawn.extend(panels), really(panels, *rest)))
    compared("exploding", "--seeds", 1, "--data", finished / "text.txt", *FLAGS, "--out", tmp_path / "c")
    assert drawn == [f"{text} at the start" for text in depth.SHOWN.values()]
    for name in ("curves.png", "depth.png"):
        assert (tmp_path / "c" / name).read_bytes().startswith(b"\x89PNG")


class Broken(Block):
    """A user's placement with a bug: it fails in a rehearsal, or if `late` in training only."""

    error = ValueError("too many values to unpack")
    late = False

    def forward(self, x):
        if self.training or not self.late:
            raise self.error
        return x + self.attn(x) + self.mlp(x)


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("CUDA error: illegal access"), KeyError("mine")])
@pytest.mark.parametrize("script, late", [(compare, False), (compare, True), (probe, False)])
def test_a_bug_in_a_placement_keeps_its_traceback(copied, began, capsys, monkeypatch, script, late, error):
    """The exception leaves `main`. If the rehearsal meets it, nothing is written."""
    monkeypatch.setitem(BLOCKS, "broken", Broken)
    monkeypatch.setattr(Broken, "error", error)
    monkeypatch.setattr(Broken, "late", late)
    text = read_json(Path("c", "pre-7", "config.json"))["data"]
    words = ["pre", "broken", "--data", text, *FLAGS, "--seeds", 1, "--out", "new"]
    with pytest.raises(type(error)) as raised:
        script.main([*map(str, words if script is compare else ["broken", *as_flags(TOY)])])
    assert raised.value is error
    assert began == ([("pre-7", None), ("broken-7", None)] if late else []) and Path("new").exists() == late


def interrupt(run):
    """As if the run had been stopped after its step 3."""
    Path("c", run, "outcome.json").unlink()
    Path("c", run, "last").write_text("3", encoding="utf-8")


def test_a_mistake_of_a_resumed_run_names_its_folder(copied, began, capsys):
    interrupt("post-8")
    Path("c", "post-8", "step-000003", "model.safetensors").write_bytes(b"cut")
    status, _, err = copied(capsys, "pre,post", "--seeds", 2)
    assert status == 2 and "model.safetensors" in err and f"delete {Path('c', 'post-8')}" in err
    assert err.count("\n") == 1 and began == [("post-8", "last")]


def test_a_bug_that_a_resumed_run_meets_keeps_its_traceback(copied, began, capsys, monkeypatch):
    interrupt("pre-8")
    monkeypatch.setattr(code, "code_of", lambda *arguments: outcomes()["pre-7"]["code"])
    monkeypatch.setattr(Broken, "late", True)
    monkeypatch.setitem(BLOCKS, "pre", Broken)
    with pytest.raises(ValueError) as raised:
        copied(capsys, "pre", "--seeds", 2)
    assert raised.value is Broken.error and began == [("pre-8", "last")]


BAD = [
    (["prre"], "(prre)", "pre or peri"),
    (["pre", "post", "pre"], "(pre)", "once"),
    (["pre", "pre:norm_layer=layernorm"], "(pre, pre:norm_layer=layernorm)", "Leave one out"),
    (["pre", "pre:lr=0.01", "pre:lr=0.010"], "(pre:lr=0.01, pre:lr=0.010)", "Leave one out"),
    (["names.toml"], "(a/b, a:b)", "otherwise"),
    (["lr=0.1"], "(lr=0.1)", "pre:lr=0.1"),
    (["pre,lr=0.1"], "(lr=0.1)", "pre:lr=0.1"),
    (["pre:lr"], "(pre:lr)", "SETTING=VALUE"),
    (["pre:"], "(pre)", "SETTING=VALUE"),
    (["pre:lr=0.1,lr=0.2"], "(lr in pre:lr=0.1,lr=0.2)", "once"),
    (["pre:lr=high"], "pre:lr=high", "number"),
    (["pre:rate=1"], "(rate)", "lr"),
    (["pre:lr=-1"], "(-1.0)", "above 0"),
    (["pre", "post:data=x.txt"], "(post:data=x.txt: x.txt)", "flag"),
    (["pre:seed=3"], "3)", "flag"),
    (["pre:init=gpt2"], "gpt2)", "scratch"),
    (["noname.toml"], "('a\\nb')", "entries.NAME"),
    (["pre", "pre:context_length=8"], "8)", "flag"),
    (["pre", "post:steps=5"], "(pre 6, post:steps=5 5)", "same"),
    (["pre:n_layers=3", "--depths", "2"], "3)", "--depths"),
    (["table.toml"], "(rate)", "lr"),
    (["entries.toml", "pre"], "entries", "entries.NAME"),
    (["flag.toml", "pre"], "(rates in flag.toml)", "--rates"),
    (["pre", "--depths", "2", "2"], "2 2)", "once"),
    (["pre", "--depths", "0"], "(0)", "whole number"),
    (["pre", "--rates", "auto", "0.1"], "(auto 0.1)", "--rates"),
    (["pre", "--rates", "0.1", "0.1"], "0.1 0.1)", "once"),
    (["pre", "--rates", "nan"], "(nan)", "--rates"),
    (["pre", "--rates", "0.1", "--max-rate"], "0.1)", "one of the two"),
    (["pre", "--rates", "0.1", "--lr", "0.1"], "0.1)", "one of the two"),
    (["pre:lr=0.3", "--rates", "0.1"], "0.3)", "one of the two"),
    (["pre", "--max-rate"], "(--warmup-steps 2)", "one of the two"),
    (["pre", "--overwrite"], "(none)", "--out"),
    (["pre:device=cpu"], "cpu)", "flag"),
    (["pre", "--max-rate", "0"], "(0)", "--max-rate"),
    (["pre", "--jobs", "0"], "(0)", "--jobs"),
    (["text.toml"], "text.toml", ".toml"),
    (["pre", "--seeds", "0"], "0)", "from 1 to"),
    (["pre", "--seeds", str(10**15)], f"{10**15})", "from 1 to"),
    ([""], "(0 entries)", "Name placements"),
    (["pre", "--out", ""], "(none)", "--out"),
    (["pre", "--out", "x" * 400], "xxx", "another" if os.name == "nt" else "shorter"),
    (["pre", "--epochs", "3"], "(--epochs)", "--steps"),
    (["pre", "--norm", "post"], "(--norm)", "placements"),
    (["pre", "--resume"], "(--resume)", "same command"),
    (["pre", "--keep", "3", "post"], "(post)", "before the flags"),
    (["a.toml", "pre", "b.toml"], "(a.toml, b.toml)", "one"),
    (["pre", "--val-fraction", "0"], "val_fraction 0)", "validation"),
    (["pre", "--data", "nowhere.txt"], "nowhere.txt", "text file"),
    (["pre", "--out", "taken"], "taken)", "--out"),
    (["pre", "--out", "text.txt"], "text.txt", "another"),
    (["pre", "--out", "other", "--overwrite"], "other)", "--out"),
    (["pre", "--out", "taken", "--overwrite"], "taken)", "--out"),
    (["pre", "post", "--n-heads", "3"], "(3 heads, width 32)", "1, 2 or 4"),
    (["pre", "--norm-layer", "batchnorm"], "(batchnorm)", "layernorm"),
    (["pre", "--seed", str(2**63 - 1), "--seeds", "2"], str(2**63 - 1), "--seed"),
    (["pre", "--device", "cuda:9", "--out", "done", "--overwrite"], "cuda:9", "--device"),
    (["pre", "--val-fraction", "0.0001", "--out", "done", "--overwrite"], "context_length + 1 = 17", "context_length"),
]


@pytest.mark.parametrize("words, value, remedy", BAD, ids=[" ".join(words) for words, *_ in BAD])
def test_a_mistake_is_one_line_and_nothing_is_written(here, capsys, words, value, remedy):
    for name, content in (("taken/thesis.txt", "x"), ("other/results.json", '{"mine": 1}')):
        (here / name).parent.mkdir()
        (here / name).write_text(content, encoding="utf-8")
    (here / "done").mkdir()
    (here / "done" / "results.json").write_text('{"format": 1, "settings": {}, "runs": {}}', encoding="utf-8")
    Path("table.toml").write_text("[entries.mine]\nrate = 1\n", encoding="utf-8")
    Path("entries.toml").write_text('entries = "pre"\n', encoding="utf-8")
    Path("names.toml").write_text('[entries."a/b"]\nlr = 0.1\n[entries."a:b"]\nlr = 0.2\n', encoding="utf-8")
    Path("noname.toml").write_text('[entries."a\\nb"]\nlr = 0.1\n', encoding="utf-8")
    Path("flag.toml").write_text("rates = 0.1\n", encoding="utf-8")
    before = sorted(here.rglob("*"))
    entries = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    flags = SHALLOW if "--depths" in words else FLAGS
    command = [*entries, "--data", "text.txt", *flags, *words[len(entries) :]]
    status, out, err = call(compare, *command, capsys=capsys)
    assert (status, out) == (2, "") and value in err and remedy in err and err.count("\n") == 1, err
    assert sorted(here.rglob("*")) == before
