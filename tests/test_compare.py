"""Comparisons: paired, honest about noise, resumed where they stopped, and never mixed with other code."""

import contextlib
import functools
import io
import itertools
import json
import linecache
import math
import os
import shutil
import signal
import statistics
from pathlib import Path

import pytest
import torch
from toys import TOY, TOY_RUN, as_flags, call, records, toy_config

import compare
import probe
import train
from gpt import BLOCKS, GPT, ModelConfig, blocks, layers, norms
from gpt.blocks import Block, PostLN, PreLN, ReZero
from gpt.study import plots
from gpt.study.comparison import SHORT, markdown, paired, rows, students_p, summarize
from gpt.training import optim
from gpt.training import results as results_module
from gpt.training.results import code_of

RUN = TOY_RUN | {"steps": 6, "eval_every": 3, "seed": 7}
FLAGS = as_flags(RUN)


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
    for script in (train, compare):
        monkeypatch.setattr(script, "draw", lambda *arguments: None)
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


def results(folder=Path("c")) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def outcomes(folder=Path("c")) -> dict:
    """The outcome of each run in results.json, its speed apart."""
    return {name: run | {"tokens_per_s": 0} for name, run in results(folder)["runs"].items()}


def edit(**changes):
    """Change c/results.json; None takes a key away."""
    changed = {name: value for name, value in (results() | changes).items() if value is not None}
    Path("c", "results.json").write_text(json.dumps(changed), encoding="utf-8")


def test_a_run_of_a_comparison_is_the_same_training_as_alone(finished, tmp_path):
    runs = outcomes(finished / "c")
    assert [*runs] == ["pre-7", "post-7", "pre-8", "post-8"]
    config = toy_config(**RUN | {"data": str(finished / "text.txt"), "norm": "post", "seed": 8})
    end = train.train(config, str(tmp_path / "alone"))
    assert {name: end[name] for name in ("val_loss", "best_val_loss", "best_step")}.items() <= runs["post-8"].items()
    assert records(tmp_path / "alone") == records(finished / "c" / "post-8")
    assert [record["step"] for record in records(finished / "c" / "pre-7", "probe.jsonl")] == [0, 6]


def test_the_table_and_the_pictures_are_of_the_runs(finished):
    runs, table = outcomes(finished / "c"), (finished / "c" / "results.md").read_text(encoding="utf-8")
    out = (finished / "out.txt").read_text(encoding="utf-8")
    assert table.split("\n\n")[0] in out and "\r" not in out
    assert sum(line.startswith("post-8  4/4  step ") for line in out.splitlines()) == 6  # no bar without a terminal
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    cells = {line[0]: dict(zip(lines[0], line)) for line in lines[2:]}
    losses = {name: [runs[f"{name}-{seed}"]["val_loss"] for seed in (7, 8)] for name in ("pre", "post")}
    for name, (one, other) in losses.items():
        text = f"{statistics.fmean([one, other]):.4f} ± {abs(one - other) / math.sqrt(2):.4f}"
        assert cells[name]["validation loss, nats per byte"] == text
        model = GPT(ModelConfig(**TOY, norm=name))
        for column, count in (("parameters", model.count_parameters()), ("in norms", model.count_parameters("norm"))):
            assert cells[name][column] == f"{count:,}"
    one, other = (post - pre for pre, post in zip(*losses.values()))
    assert cells["post"]["difference to pre"] == f"{(one + other) / 2:+.4f} ± {abs(one - other) / 2:.4f}"
    assert cells["post"]["lower than pre"] == f"{(one < 0) + (other < 0)} of 2"
    assert cells["pre"]["difference to pre"] == cells["pre"]["lower than pre"] == ""
    for name in ("curves.png", "depth.png", "pre-7/curve.png"):
        assert (finished / "c" / name).read_bytes().startswith(b"\x89PNG")


def test_more_placements_and_seeds_are_added(copied, began, capsys):
    before = outcomes()
    assert copied(capsys, "pre,post", "--seeds", 2)[0] == 0 and began == []
    status, out, err = copied(capsys, "none,pre", "--seeds", 1)
    assert (status, err, began) == (0, "", [("none-7", None)]) and "post" in out.splitlines()[-1]
    assert copied(capsys, "pre", "--seeds", 3)[0] == 0 and began[1:] == [("pre-9", None)]
    assert before.items() <= outcomes().items() and len(outcomes()) == 6


def test_a_default_that_is_typed_is_the_same(copied, began, capsys):
    edit(settings={name: value for name, value in results()["settings"].items() if name != "eval_tokens"})  # a new one
    assert results()["settings"]["lr"] is None
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


@pytest.mark.parametrize("flags, value", [(["--steps", 7], "(6, not 7, in c)"), (["--data", "else.txt"], "else.txt,")])
def test_other_settings_are_refused(copied, capsys, flags, value):
    before = outcomes()
    Path("else.txt").write_text("else " * 500, encoding="utf-8")
    status, out, err = copied(capsys, "pre", *flags)
    assert (status, out) == (2, "") and value in err and "--out" in err and err.count("\n") == 1
    assert outcomes() == before


def test_another_text_of_the_same_name_is_refused(copied, capsys):
    edit(settings=results()["settings"] | {"corpus": "0123"})
    status, _, err = copied(capsys, "pre")
    assert status == 2 and "corpus (0123, not " in err and "--out" in err


def test_overwrite_deletes_the_runs_and_nothing_else(copied, began, capsys):
    shutil.copy("c/results.json", "c/mine.json")
    shutil.copytree("c/pre-7", "c/mine")
    shutil.copytree("c/pre-7", "elsewhere")
    if os.name != "nt":
        shutil.rmtree("c/post-8")
        os.symlink("../elsewhere", "c/post-8")
    assert copied(capsys, "pre", "--seeds", 1, "--overwrite")[0] == 0
    assert began == [("pre-7", None)] and [*outcomes()] == [*results()["code"]] == ["pre-7"]
    assert Path("c", "mine.json").exists() and not Path("c", "post-7").exists()
    assert Path("c", "mine", "last").exists() and Path("elsewhere", "last").exists()


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


def test_results_of_other_code_are_refused(copied, began, capsys, monkeypatch):
    """Those of the placements that are named, finished or not."""
    monkeypatch.setitem(BLOCKS, "post", Halved)
    assert copied(capsys, "pre", "--seeds", 2)[0] == 0
    runs = results()["runs"]
    edit(runs={name: runs[name] for name in runs if name != "post-8"})
    status, out, err = copied(capsys, "pre,post", "--seeds", 2)
    assert (status, out) == (2, "") and "(post-7, post-8 in c)" in err and "--out" in err and err.count("\n") == 1
    shutil.rmtree("c/post-7")
    shutil.rmtree("c/post-8")
    assert began == [] and copied(capsys, "pre,post", "--seeds", 1)[0] == 0
    assert began == [("post-7", None)] and outcomes()["post-7"] != runs["post-7"] | {"tokens_per_s": 0}


def test_results_that_do_not_tell_their_code_are_taken_with_a_warning(copied, began, capsys):
    edit(code=None)
    status, out, err = copied(capsys, "pre,post", "--seeds", 2)
    assert (status, began) == (0, []) and "`post`" in out
    assert err.startswith("warning: ") and "(pre-7, pre-8, post-7, post-8 in c)" in err and err.count("\n") == 1


class Louder(ReZero):
    """As rezero at the start, where s is 0, and not afterwards."""

    def forward(self, x):
        x = x + 50 * self.s * self.attn(x)
        return x + self.s * self.mlp(x)


def upside_down(config, layer):
    """As mix, of the same blocks in another order."""
    return (PreLN if layer <= config.n_layers // 4 else PostLN)(config, layer)


def codes() -> dict:
    """The checksum of each placement's code."""
    return {placement: code_of(GPT(ModelConfig(**TOY | {"norm": placement, "n_layers": 4}))) for placement in BLOCKS}


def scaled(factor):
    def make(config, layer):
        block = PreLN(config, layer)
        block.factor = factor
        return block

    return make


class Maker:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, config, layer):
        return PreLN(config, layer)


PAIRS = {
    "partial": [functools.partial(scaled(1.0), config=None), functools.partial(scaled(1.0), config=1)],
    "closure": [scaled(2.0), scaled(5.0)],
    "object": [Maker(2.0), Maker(5.0)],
    "class without source": [
        type("Made", (PreLN,), {"forward": lambda self, x: x + self.attn(self.attn_norm(x))}),
        type("Made", (PreLN,), {"forward": lambda self, x: x - self.attn(self.attn_norm(x))}),
    ],
}


@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_in_the_maker_of_a_placement_are_code_too(pair):
    texts = []
    for maker in (*PAIRS[pair], PAIRS[pair][0]):
        texts.append(set())
        results_module._add_code(maker, texts[-1])
    assert texts[0] == texts[2] != texts[1] and texts[1]


@pytest.mark.parametrize(
    "line, changed",
    [
        ("SCALE = 3.0", "SCALE = 5.0"),
        ("def amount(): return SCALE", "def amount(): return 2 * SCALE"),
        ("    def forward(ctx, x): return x", "    def forward(ctx, x): return 2 * x"),
    ],
)
def test_what_a_placement_names_anywhere_in_its_file_is_its_code(monkeypatch, line, changed):
    """A number, a function behind a function, an autograd function, as if they stood in gpt/blocks.py."""
    added = "SCALE = 3.0\ndef amount(): return SCALE\nclass Same(torch.autograd.Function):\n"
    added += "    def forward(ctx, x): return x\ndef helper(x): return Same.apply(x) * amount()\n"
    added += "class PreLN(Block):\n    def forward(self, x): return helper(x)\n"
    lines, seen = linecache.getlines(blocks.__file__), []
    for text in (added, added.replace(line, changed)):
        entry = (1, None, [*lines, *text.splitlines(keepends=True)], blocks.__file__)
        monkeypatch.setitem(linecache.cache, blocks.__file__, entry)
        seen.append(codes())
    assert {name for name in BLOCKS if seen[0][name] != seen[1][name]} == {"pre", "mix"}


def test_the_code_of_a_placement_is_its_own(monkeypatch):
    before = codes()
    assert len({*before.values()}) == len(BLOCKS)
    monkeypatch.setitem(BLOCKS, "rezero", Louder)
    monkeypatch.setitem(BLOCKS, "mix", upside_down)
    after = codes()
    assert {placement for placement in BLOCKS if after[placement] != before[placement]} == {"rezero", "mix"}
    model = GPT(ModelConfig(**TOY))
    assert len({code_of(model), code_of(model, train.update), code_of(model, train.train)}) == 3


@pytest.mark.parametrize("module, shared", [(blocks, False), (norms, True), (layers, True), (optim, True)])
def test_a_new_placement_changes_no_code_and_a_line_that_all_share_does(monkeypatch, module, shared):
    """As if a class had been added at the end of the file, from which Python's `inspect` reads a source."""
    before, lines = codes(), linecache.getlines(module.__file__)
    added = [*lines, "\n", "class Mine(Block):\n", "    pass\n"]
    monkeypatch.setitem(linecache.cache, module.__file__, (1, None, added, module.__file__))
    after = codes()
    assert {before[placement] != after[placement] for placement in BLOCKS} == {shared}


def test_entries_may_have_commas_and_a_configuration_among_them(copied, began, finished, capsys):
    Path("c.toml").write_text("lr = 0.01\nn_layers = 5", encoding="utf-8")  # a flag, here of n_layers, prevails
    words = ["post,pre", "c.toml", "none", "--seeds", 1, "--data", finished / "text.txt", *FLAGS, "--out", "c"]
    status, _, err = call(compare, *words, capsys=capsys)
    assert status == 2 and "lr (0.012, not 0.01, in c)" in err
    Path("c.toml").write_text("n_layers = 5", encoding="utf-8")
    status, out, _ = call(compare, *words, capsys=capsys)
    assert (status, began) == (0, [("none-7", None)]) and out.startswith("compare post, pre, none; seed 7\n")


LONG = ["pre", "post", "--seeds", 1, *FLAGS, "--steps", 30, "--save-every", 5, "--eval-every", 30, "--dropout", 0.1]


@pytest.fixture(scope="module")
def whole(finished):
    """The outcomes of a longer comparison that nothing ended."""
    compared(*LONG, "--data", finished / "text.txt", "--out", finished / "whole")
    return outcomes(finished / "whole")


@pytest.mark.parametrize("signum", ["SIGKILL", "SIGTERM"])
def test_a_comparison_that_was_ended_goes_on_to_the_same_results(copied, began, finished, whole, forks, capsys, signum):
    signum = signal.Signals[signum]
    flags = [*LONG, "--data", finished / "text.txt", "--out", "ended"]
    prelude = "import compare; compare.draw = lambda *arguments: None"
    process = forks.start("compare", *flags, cwd=os.getcwd(), prelude=prelude)
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
    assert status == 0 and "diverged in 2 of 2 runs (at step 1, 1)" in out
    assert outcomes()["exploding-7"]["diverged"] == 1 and outcomes()["pre-8"]["diverged"] is None
    assert began == [("exploding-7", None), ("exploding-8", None)]


def test_there_are_pictures_also_where_all_runs_diverged(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "exploding", Exploding)
    drawn, really = [], plots.depth_lines
    monkeypatch.setattr(plots, "depth_lines", lambda panels, *rest: (drawn.extend(panels), really(panels, *rest)))
    compared("exploding", "--seeds", 1, "--data", finished / "text.txt", *FLAGS, "--out", tmp_path / "c")
    assert drawn == [f"{text} at the start" for text in plots.SHOWN.values()]
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
    text = results()["settings"]["data"]
    words = ["pre", "broken", "--data", text, *FLAGS, "--seeds", 1, "--out", "new"]
    with pytest.raises(type(error)) as raised:
        script.main([*map(str, words if script is compare else ["broken", *as_flags(TOY)])])
    assert raised.value is error
    assert began == ([("pre-7", None), ("broken-7", None)] if late else []) and Path("new").exists() == late


def interrupt(run):
    """As if the run had been stopped after its step 3."""
    runs = results()["runs"]
    edit(runs={name: runs[name] for name in runs if name != run})
    Path("c", run, "last").write_text("3", encoding="utf-8")


def test_a_mistake_of_a_resumed_run_names_its_folder(copied, began, capsys):
    interrupt("post-8")
    Path("c", "post-8", "step-000003", "model.safetensors").write_bytes(b"cut")
    status, _, err = copied(capsys, "pre,post", "--seeds", 2)
    assert status == 2 and "model.safetensors" in err and f"delete {Path('c', 'post-8')}" in err
    assert err.count("\n") == 1 and began == [("post-8", "last")]


def test_a_bug_that_a_resumed_run_meets_keeps_its_traceback(copied, began, capsys, monkeypatch):
    interrupt("pre-8")
    edit(code=None)
    monkeypatch.setattr(Broken, "late", True)
    monkeypatch.setitem(BLOCKS, "pre", Broken)
    with pytest.raises(ValueError) as raised:
        copied(capsys, "pre", "--seeds", 2)
    assert raised.value is Broken.error and began == [("pre-8", "last")]


BAD = [
    (["prre"], "(prre)", "pre or peri"),
    (["pre", "post", "pre"], "(pre, post, pre)", "once"),
    (["text.toml"], "text.toml", ".toml"),
    (["pre", "--seeds", "0"], "0)", "at least one"),
    (["pre", "--seeds", str(10**15)], f"{10**15})", "seeds"),
    ([""], "0 placements", "at least one"),
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
    (["pre", "--seed", str(2**63 - 1), "--seeds", "2"], str(2**63), "seed"),
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
    before = sorted(here.rglob("*"))
    entries = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    command = [*entries, "--data", "text.txt", *FLAGS, *words[len(entries) :]]
    status, out, err = call(compare, *command, capsys=capsys)
    assert (status, out) == (2, "") and value in err and remedy in err and err.count("\n") == 1, err
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


def table_of(*losses):
    """The rows of `a` and `b`, from their validation losses seed by seed; None has diverged."""
    runs = [
        {"norm": placement, "seed": seed, "val_loss": loss, "best_val_loss": loss, "tokens_per_s": 5}
        | {"diverged": 3 if loss is None else None}
        for placement, column in zip("ab", losses)
        for seed, loss in enumerate(column)
    ]
    seeds = list(range(len(losses[0])))
    table = [{"parameters": 9, "in_norms": 0} | entry for entry in summarize(["a", "b"], seeds, runs)]
    return rows(table, seeds, "byte")


@pytest.mark.parametrize(
    "one, other, result",
    [
        ((1, 2, 3), (0.91, 1.89, 2.9), "lower than a, p = 0.0033"),
        ((1, 2, 3), (1.11, 2.1, 3.09), "higher than a, p = 0.0033"),
        ((1, 2, 3), (0.9, 1.9, 2.9001), "lower than a, p < 0.001"),
        ((1, 2, 3), (1.1, 1.9, 3.01), "within the noise of 3 seeds, p = 0.96"),
        ((1, 2), (1, 2), "the same losses as a"),
        ((1,), (1.2,), "one seed says nothing about noise"),
        ((1, 2, 3), (0.91, None, 2.9), "diverged in 1 of 3 runs (at step 3); lower than a, p = 0.033"),
        ((1, 2), (None, None), "diverged in 2 of 2 runs (at step 3, 3)"),
        (
            (None, 1),
            (1, None),
            "diverged in 1 of 2 runs (at step 3); a diverged where b ended: name another placement first",
        ),
    ],
)
def test_the_words_say_whether_a_difference_is_within_the_noise(one, other, result):
    head, _, row = table_of(one, other)
    assert dict(zip(head, row))["result"] == result


def test_the_table_in_short_fits_a_terminal():
    cells = table_of((1, 2, 3), (1.1, 2.1, 3.1))
    assert "| 1.1000 ± " not in markdown(cells) and "| 2.1000 ± 1.0000 " in markdown(cells)
    lines = markdown([row[:SHORT] for row in cells]).splitlines()
    assert len(lines) == 4 and len({*map(len, lines)}) == 1 and len(lines[0]) < 110
    assert "+0.1000 ± 0.0000" in lines[3] and "higher than a" in lines[3]


def test_paired_differences_are_tested_and_not_the_two_groups():
    """Seeds differ by 1, placements by 0.01: a difference that only pairing finds."""
    test = paired([-0.010, -0.011, -0.009])
    assert test["p"] < 0.005 and test["lower"] == test["seeds"] == 3
    assert test["error"] == pytest.approx(0.001 / math.sqrt(3))
    assert paired([0.5])["p"] is None and paired([0.0, 0.0])["p"] == 1 and paired([0.1, 0.1])["p"] == 0


@pytest.mark.parametrize("placement", BLOCKS)
def test_placements_start_from_the_same_weights_where_names_and_shapes_agree(placement):
    """deepnorm and lns start some rows at another scale, from the same draws."""
    models = []
    for each in ("pre", placement):
        torch.manual_seed(7)
        models.append(dict(GPT(ModelConfig(**TOY, norm=each)).named_parameters()))
    pre, other = models
    shared = [name for name in pre if name in other and pre[name].dim() > 1]
    assert len(shared) == 2 + 4 * TOY["n_layers"]
    for name in shared:
        scale = other[name].norm(dim=-1, keepdim=True) / pre[name].norm(dim=-1, keepdim=True)
        assert torch.allclose(pre[name] * scale, other[name], rtol=1e-5, atol=1e-8), name
        assert placement in ("deepnorm", "lns") or torch.equal(pre[name], other[name]), name
