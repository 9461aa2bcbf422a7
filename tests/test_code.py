"""The checksum of the code that decides a run."""

import functools
import json
import linecache
import types

import pytest
import torch
from toys import TOY, toy_config

import train
from gpt import BLOCKS, GPT, ModelConfig, blocks, layers, norms
from gpt.blocks import PostLN, PreLN, ReZero
from gpt.training import checkpoint, code, optim, trainer
from gpt.training.code import code_of


@pytest.fixture(autouse=True)
def read_again():
    """What these tests make of the files is forgotten after each."""
    yield
    code._tree.cache_clear()


class Louder(ReZero):
    """As rezero at the start, where s is 0, and not afterwards."""

    def forward(self, x):
        x = x + 50 * self.s * self.attn(x)
        return x + self.s * self.mlp(x)


def upside_down(config, layer):
    """As mix, of the same blocks in another order."""
    return (PreLN if layer <= config.n_layers // 4 else PostLN)(config, layer)


def codes() -> dict:
    """The checksum of each placement's code, as a new process would compute it."""
    code._tree.cache_clear()
    return {placement: code_of(GPT(ModelConfig(**TOY | {"norm": placement, "n_layers": 4}))) for placement in BLOCKS}


def scaled(factor):
    def make(config, layer):
        block = PreLN(config, layer)
        block.factor = factor
        return block

    return make


def scaled_class(factor):
    class Scaled(PreLN):
        def forward(self, x):
            return super().forward(x) * factor

    return Scaled


def that_calls_itself(factor):
    def make(config, layer):
        return PreLN(config, layer) if layer else make(config, factor)

    return make


class Maker:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, config, layer):
        return PreLN(config, layer)


PAIRS = {
    "partial": [functools.partial(scaled(1.0), config=None), functools.partial(scaled(1.0), config=1)],
    "closure": [scaled(2.0), scaled(5.0)],
    "class in a function": [scaled_class(2.0), scaled_class(5.0)],
    "function that calls itself": [that_calls_itself(2.0), that_calls_itself(5.0)],
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
        code._add_code(maker, texts[-1], set())
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
    assert {name for name in BLOCKS if seen[0][name] != seen[1][name]} == {"pre", "mix", "keel", "hybrid"}


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


def test_what_is_edited_later_is_not_what_this_process_runs(monkeypatch):
    """And a comment is no code."""
    lines, model = linecache.getlines(norms.__file__), GPT(ModelConfig(**TOY))
    for more, same in ((["# a word\n"], True), (["EPS = 3\n"], False)):
        code._tree.cache_clear()
        before = code_of(model)
        monkeypatch.setitem(linecache.cache, norms.__file__, (1, None, [*lines, *more], norms.__file__))
        assert code_of(model) == before
        code._tree.cache_clear()
        assert (code_of(model) == before) == same


class Thing:
    """Its text has its address, which is another in each process."""


def around(thing):
    return lambda config, layer: [(lambda x: x + 1)(thing) for _ in config]


def test_an_address_is_no_code():
    texts = []
    for _ in range(2):
        # As code makes it, in a module that has no file.
        make = types.FunctionType(around.__code__, {"__name__": "made"})
        texts.append([Thing(), set()])
        code._add_code(make(texts[-1][0]), texts[-1][-1], set())
    assert texts[0][-1] == texts[1][-1] and len(texts[0][-1]) >= 2


def test_a_run_that_goes_on_with_other_code_says_so_in_a_line(here, quick, monkeypatch, capsys):
    """A run that does not tell its code says nothing."""

    def changes(resume, steps):
        end = train.train(toy_config(data="text.txt", steps=steps), "r", resume=resume)
        out, err = capsys.readouterr()
        state = checkpoint.read_state(checkpoint.find("r", "last"))[0]
        assert state["code"] == end["code"] and "code" not in err
        return [line for line in out.splitlines() if line.startswith("changed code")], end["code"]

    assert changes(None, 2)[0] == []
    lines, before = changes("last", 3)
    assert lines == []
    monkeypatch.setattr(train, "update", lambda run, step, update=train.update: update(run, step))
    (line,), after = changes("last", 4)
    assert before[:8] in line and after[:8] in line and "step 3" in line and before != after
    path = checkpoint.find("r", "last") / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    del state["code"]
    path.write_text(json.dumps(state), encoding="utf-8")
    assert changes("last", 5)[0] == []


def test_a_run_whose_code_cannot_be_read_trains(here, quick, monkeypatch, capsys):
    """As where the files have no source. It goes on later, and says nothing of its code."""

    def fail(*arguments):
        raise OSError("could not get source code")

    config = toy_config(data="text.txt", steps=8)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "code_of", fail)
        end = train.train(config, "r")
    assert (end["code"], end["step"]) == (None, 8)
    assert capsys.readouterr().err.startswith("warning: ")
    assert train.train(config, "r", "last")["code"] == code_of(checkpoint.load_model("r"), train.update)
    assert "changed code" not in capsys.readouterr().out


def test_the_state_of_torch_is_no_code(monkeypatch):
    """As what its compiler keeps in the functions that it has wrapped."""
    model = GPT(ModelConfig(**TOY))
    before, state = code_of(model), [1]
    monkeypatch.setattr(torch.nn.Module, "made_later", lambda self: state, raising=False)
    monkeypatch.setattr(torch.nn.Module.made_later, "__module__", "torch.nn.modules.module")
    assert code_of(model) == before
