import dataclasses
import json

import pytest
import torch
from toys import toy_config, toy_model, toy_tokens

import probe
import train
from gpt import BLOCKS
from gpt.loss import next_token_loss
from gpt.study.depth import MEASURES, depth_profile
from gpt.training import checkpoint
from gpt.training.files import append


@pytest.mark.parametrize("norm", BLOCKS)
def test_a_profile_is_what_one_measures_by_hand(norm):
    model, tokens = toy_model(norm=norm, n_layers=3, dropout=0.5), toy_tokens(2, 13)
    profile = depth_profile(model, tokens)
    model.eval()
    streams = [model.token_embedding(tokens[:, :-1]) + model.position_embedding.weight[:12]]
    for block in model.blocks:
        streams.append(block(streams[-1]))
    matrices = [block.mlp.down.weight for block in model.blocks]
    gradients = torch.autograd.grad(next_token_loss(model.readout(streams[-1]), tokens[:, 1:]), streams[:-1] + matrices)
    assert tuple(profile) == MEASURES and all(len(values) == 3 for values in profile.values())
    for layer in range(3):
        before, after = streams[layer], streams[layer + 1]
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


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = toy_model().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    depth_profile(model, toy_tokens())
    assert model.training == training and all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_with_zero_branches_nothing_changes_by_depth():
    profile = depth_profile(toy_model_with_zero_branches(), toy_tokens())
    assert profile["ratio"] == [0.0] * 4 and profile["cosine"] == pytest.approx([1.0] * 4)
    assert profile["stream_grad"] == pytest.approx([profile["stream_grad"][0]] * 4)


def toy_model_with_zero_branches():
    model = toy_model(n_layers=4)
    for block in model.blocks:
        for linear in (block.attn.out, block.mlp.down):
            torch.nn.init.zeros_(linear.weight)
    return model


def call(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        probe.main(list(map(str, arguments)))
    return exit.value.code or 0, *capsys.readouterr()


def is_picture(path):
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000


SMALL = ["--n-layers", 3, "--d-model", 32, "--n-heads", 2, "--context-length", 16]


def test_every_placement_in_one_table_and_picture(tmp_path, capsys):
    status, out, err = call(*BLOCKS, *SMALL, "--out", tmp_path / "p.png", capsys=capsys)
    assert (status, err) == (0, "") and is_picture(tmp_path / "p.png")
    lines = out.splitlines()
    assert [line for line in lines if line in BLOCKS] == list(BLOCKS)
    assert sum(line.startswith("depth") and line.split()[1:] == list(MEASURES) for line in lines) == len(BLOCKS)
    again = call(*BLOCKS, *SMALL, "--out", tmp_path / "p.png", capsys=capsys)
    assert again[1] == out


def test_the_lessons_stack(tmp_path, capsys):
    status, out, _ = call("stack", "--out", tmp_path / "stack.png", capsys=capsys)
    assert status == 0 and is_picture(tmp_path / "stack.png")
    assert [line for line in out.splitlines() if line in probe.STACKS] == list(probe.STACKS)


def test_a_run_at_its_end_and_along_training(tmp_path, text_file, capsys):
    """Probing changes no bit of the training, and each probed step has one line, also after a stop."""
    weights = {}
    for name, probe_every in (("without", None), ("with", 2)):
        config = toy_config(data=str(text_file), steps=8, dropout=0.2, probe_every=probe_every)
        train.train(config, str(tmp_path / name))
        weights[name] = checkpoint.load_model(tmp_path / name).state_dict()
        status, out, err = call(tmp_path / name, "--out", tmp_path / f"{name}.png", capsys=capsys)
        assert status == 0 and is_picture(tmp_path / f"{name}.png"), err
    assert all(torch.equal(weights["with"][key], weights["without"][key]) for key in weights["with"])
    append(tmp_path / "with" / "probe.jsonl", {"step": 10})
    train.train(dataclasses.replace(config, steps=10), str(tmp_path / "with"), resume="last")
    lines = (tmp_path / "with" / "probe.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 4, 6, 8, 10]
    assert all(len(json.loads(line)[measure]) == 2 for line in lines for measure in MEASURES)


def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["pree"], "unknown placement or run (pree). Did you mean pre"),
        (["pre", "--out", "a.xyz"], "no such kind of picture (a.xyz). Name a .png, .svg or .pdf."),
        (["pre", "stack"], "nothing can be added to stack (pre, stack)"),
        (["stack", "--n-layers", 3], "nothing can be added to stack (stack, n_layers)"),
        (["pre", "--n-heads", 5], "n_heads must divide d_model"),
        (["pre", "--seed", -1], "seed is out of range"),
        ([], "the following arguments are required"),
    ):
        status, out, err = call(*arguments, capsys=capsys)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not any(tmp_path.iterdir())
