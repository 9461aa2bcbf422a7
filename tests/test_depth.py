"""Signal and gradient by depth, and the script that shows them."""

import dataclasses
import re

import pytest
import torch
from toys import TOY, TOY_RUN, as_flags, call, records, toy_config, toy_model, toy_tokens

import compare
import probe
import train
from gpt import BLOCKS
from gpt.blocks import Block
from gpt.files import append
from gpt.loss import next_token_loss
from gpt.study import plots
from gpt.study.depth import MEASURES, STACK_SHOWN, depth_profile, random_stack
from gpt.training import checkpoint


@pytest.mark.parametrize("placement", BLOCKS)
def test_a_profile_is_what_one_measures_by_hand(placement):
    model, tokens = toy_model(norm=placement, n_layers=3, dropout=0.5), toy_tokens(2, 13)
    profile = depth_profile(model, tokens)
    model.eval()
    first = model.blocks[0]
    streams = [first.open(model.token_embedding(tokens[:, :-1]) + model.position_embedding.weight[:12])]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    matrices = [block.mlp.down.weight for block in model.blocks]
    gradients = torch.autograd.grad(next_token_loss(model.readout(streams[-1]), tokens[:, 1:]), streams[:-1] + matrices)
    assert tuple(profile) == MEASURES and all(len(values) == 3 for values in profile.values())
    for layer in range(3):
        before, after = (first.measured(stream) for stream in streams[layer : layer + 2])
        assert profile["stream"][layer] == pytest.approx(after.square().mean().sqrt().item(), rel=1e-4)
        change = ((after - before).square().mean() / before.square().mean()).sqrt().item()
        assert profile["ratio"][layer] == pytest.approx(change, rel=1e-4)
        cosine = torch.cosine_similarity(after, before, dim=-1).mean().item()
        assert profile["cosine"][layer] == pytest.approx(cosine, rel=1e-4)
        assert profile["stream_grad"][layer] == pytest.approx(gradients[layer].norm().item(), rel=1e-4)
        assert profile["mlp_grad"][layer] == pytest.approx(gradients[3 + layer].norm().item(), rel=1e-4)


def test_branches_are_measured_where_they_come_out():
    model, tokens = toy_model(norm="pre", n_layers=1), toy_tokens(2, 9)
    profile = depth_profile(model, tokens)
    x = model.token_embedding(tokens[:, :-1]) + model.position_embedding.weight[:8]
    attn = model.blocks[0].attn(model.blocks[0].attn_norm(x))
    mlp = model.blocks[0].mlp(model.blocks[0].mlp_norm(x + attn))
    assert profile["attn"] == pytest.approx([attn.square().mean().sqrt().item()])
    assert profile["mlp"] == pytest.approx([mlp.square().mean().sqrt().item()])


class TwoStreams(Block):
    """Two streams in one tensor, (B, T, 2 C), from the first block to the last, which adds them up."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.first, self.last = layer == 1, layer == config.n_layers

    def forward(self, x):
        x, y = (x, x) if self.first else x.chunk(2, -1)
        x, y = x + self.attn(self.attn_norm(y)), y + self.mlp(self.mlp_norm(x))
        return x + y if self.last else torch.cat([x, y], -1)


class Pair(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x), None


class Pairs(Block):
    """Attention alone; it puts out a pair, and all blocks but the last do."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.attn, self.last = Pair(self.attn), layer == config.n_layers
        del self.mlp, self.mlp_norm

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else x[0]
        x = x + self.attn(self.attn_norm(x))[0]
        return x if self.last else (x, None)


class Wrapped(Block):
    """Pre-LN with a last matrix of the MLP that has no weight of that name."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.mlp.down = torch.nn.Sequential(self.mlp.down)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


UNMEASURED = {TwoStreams: {"ratio", "cosine"}, Pairs: {*MEASURES}, Wrapped: {"mlp_grad"}}


@pytest.mark.parametrize("placement", UNMEASURED)
def test_what_some_block_does_not_have_is_left_out(here, quick, capsys, monkeypatch, placement):
    """The placement trains with a probe, and is probed and compared."""
    monkeypatch.setitem(BLOCKS, "mine", placement)
    measures = [measure for measure in MEASURES if measure not in UNMEASURED[placement]]
    assert list(depth_profile(toy_model(norm="mine", n_layers=3), toy_tokens())) == measures
    train.train(toy_config(norm="mine", data="text.txt", steps=2, probe_every=1), "r")
    assert all(record.keys() == {"step", *measures} for record in records(here / "r", "probe.jsonl"))
    capsys.readouterr()
    for arguments in (["mine", *SMALL], ["r"]):
        status, out, err = call(probe, *arguments, "--out", "p.png", capsys=capsys)
        assert (status, err) == (0, "") and (here / "p.png").exists()
        assert ["depth", *measures] in [line.split() for line in out.splitlines()]
    flags = as_flags(TOY_RUN | TOY | {"data": "text.txt", "steps": 1, "seeds": 1})
    assert call(compare, "mine", "pre", *flags, "--out", "c", capsys=capsys)[0] == 0
    assert is_picture(here / "c" / "depth.png")


class InPlace(Block):
    """Pre-LN that adds to its input in place."""

    def forward(self, x):
        x += self.attn(self.attn_norm(x))
        x += self.mlp(self.mlp_norm(x))
        return x


def test_a_block_that_changes_its_input_in_place_has_the_same_profile(monkeypatch):
    monkeypatch.setitem(BLOCKS, "mine", InPlace)
    mine, pre = (depth_profile(toy_model(norm=name), toy_tokens()) for name in ("mine", "pre"))
    assert mine.keys() == pre.keys() and all(mine[name] == pytest.approx(pre[name], rel=1e-5) for name in pre)


def test_a_module_that_is_several_blocks_is_measured_at_each():
    one, three = toy_model(n_layers=3), toy_model(n_layers=3)
    one.blocks[1] = one.blocks[2] = one.blocks[0]
    three.load_state_dict(one.state_dict())
    one, three = depth_profile(one, toy_tokens()), depth_profile(three, toy_tokens())
    for name in one.keys() - {"mlp_grad"}:
        assert one[name] == pytest.approx(three[name], rel=1e-5)
    assert len({*one["stream"]}) == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = toy_model().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    depth_profile(model, toy_tokens())
    assert model.training == training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_with_zero_branches_nothing_changes_by_depth():
    model = toy_model(n_layers=4)
    for block in model.blocks:
        for linear in (block.attn.out, block.mlp.down):
            torch.nn.init.zeros_(linear.weight)
    profile = depth_profile(model, toy_tokens())
    assert profile["ratio"] == [0.0] * 4 and profile["cosine"] == pytest.approx([1.0] * 4)
    assert profile["stream_grad"] == pytest.approx([profile["stream_grad"][0]] * 4)


def test_a_random_stack_starts_from_its_input():
    """At depth 0, and at every depth if the layers add nothing. The gradient starts from the output."""
    profile = random_stack(depth=3, gain=0.0, residual=True)
    assert profile["cosine"] == pytest.approx([1.0] * 4)
    assert profile["stream"] == pytest.approx([1.0] * 4, rel=0.02)
    assert profile["stream_grad"] == [1.0] * 4
    nothing = random_stack(depth=3, gain=0.0)
    assert nothing["stream"][1:] == [0.0] * 3 and nothing["stream_grad"] == [0.0] * 3 + [1.0]


def is_picture(path):
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000


SMALL = ["--n-layers", 3, "--d-model", 32, "--n-heads", 2, "--context-length", 16]


def test_every_placement_in_one_table_and_picture(here, capsys):
    status, out, err = call(probe, *BLOCKS, *SMALL, "--out", "p.png", capsys=capsys)
    assert (status, err) == (0, "") and is_picture(here / "p.png")
    lines = out.splitlines()
    assert [line for line in lines if line in BLOCKS] == list(BLOCKS)
    assert sum(line.startswith("depth") and line.split()[1:] == list(MEASURES) for line in lines) == len(BLOCKS)
    one = call(probe, "pre", *SMALL, "--out", "one.png", capsys=capsys)[1].partition("\npicture")[0]
    assert out.startswith(one) and len(one.splitlines()) == 6  # the same numbers every time


def test_the_lessons_stack(here, capsys, monkeypatch):
    """Cosines may be 0 or less, so their panel has no log scale."""
    figures, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure) or save(figure, path))
    status, out, err = call(probe, "stack", "--out", "stack.png", capsys=capsys)
    assert (status, err) == (0, "") and is_picture(here / "stack.png")
    scales = {axis.get_ylabel(): axis.get_yscale() for axis in figures[0].axes}
    assert scales == {text: "linear" if key == "cosine" else "log" for key, text in STACK_SHOWN.items()}
    assert [line for line in out.splitlines() if line in probe.STACKS] == list(probe.STACKS)


def test_a_run_at_its_end_and_along_training(here, quick, capsys):
    """Probing changes no bit of the training, and each probed step has one line, also after a stop."""
    weights = {}
    for name, probe_every in (("without", None), ("with", 2)):
        config = toy_config(data="text.txt", steps=4, dropout=0.2, probe_every=probe_every)
        train.train(config, name)
        weights[name] = checkpoint.load_model(name).state_dict()
        status, out, err = call(probe, name, "--out", f"{name}.png", capsys=capsys)
        assert status == 0 and is_picture(here / f"{name}.png"), err
    assert all(torch.equal(weights["with"][key], weights["without"][key]) for key in weights["with"])
    append(here / "with" / "probe.jsonl", {"step": 6})  # of a run that stopped after this step and before saving
    train.train(dataclasses.replace(config, steps=6), "with", resume="last")
    probed = records(here / "with", "probe.jsonl")
    assert [record["step"] for record in probed] == [0, 2, 4, 6]
    assert all(len(record[measure]) == 2 for record in probed for measure in MEASURES)


def test_records_of_other_types_cost_the_picture_alone(here, quick, capsys):
    train.train(toy_config(data="text.txt", steps=1), "r")
    for stream in ("ab", ["a", "b"], 3, None, {"a": 1}, [10**400, 1], [[1], [2]], []):
        (here / "r" / "probe.jsonl").unlink(missing_ok=True)
        for record in ({"step": 0, "stream": [1.0, 2.0]}, {"step": 2, "stream": stream}):
            append(here / "r" / "probe.jsonl", record)
        capsys.readouterr()
        status, out, err = call(probe, "r", capsys=capsys)
        assert status == 0 and "stream" in out and err.count("\n") == 1 and "probe.png" in err, (stream, err)


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        (["pree"], r"\(pree\).* pre\b"),
        (["pre", "--out", "a.xyz"], r"\(a\.xyz\).*\.png"),
        (["pre", "stack"], r"\(pre, stack\)"),
        (["stack", "--n-layers", 3], r"\(stack, n_layers\)"),
        (["pre", "--n-heads", 5], r"n_heads.*\b5\b.*128"),
        (["pre", "--seed", -1], r"seed.*\(-1\)"),
        ([], "BLOCK.*--help"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(probe, *arguments, capsys=capsys)
    assert (status, out) == (2, "") and err.count("\n") == 1 and re.search(pattern, err), err
    assert not any(tmp_path.iterdir())
