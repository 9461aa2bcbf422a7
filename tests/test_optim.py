import math

import pytest
import torch
from toys import records, toy_config, toy_model, toy_tokens

import train
from gpt import BLOCKS
from gpt.blocks import Block, PreLN
from gpt.loss import next_token_loss
from gpt.training import checkpoint
from gpt.training.device import Compute
from gpt.training.optim import Muon, lr_at, make_optimizer, orthogonal, parameter_groups
from gpt.training.report import Diverged


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("norm", BLOCKS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(norm, optimizer):
    model = toy_model(norm=norm)
    groups = parameter_groups(model, toy_config(optimizer=optimizer, weight_decay=0.3))
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}
    matrices = tuple(f"{name}.weight" for name in ("embedding", "qkv", "out", "up", "down"))
    vectors = {id(p) for name, p in model.named_parameters() if not name.endswith(matrices)}
    assert vectors == {id(p) for p in groups[-1]["params"]} and groups[-1]["weight_decay"] == 0
    assert {group["weight_decay"] for group in groups[:-1]} == {0.3}
    hidden = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    assert [{id(p) for p in group["params"]} for group in groups if group["momentum"]] == [hidden] * (
        optimizer == "muon"
    )


def train_twice(optimizer, **settings):
    """Yields, after each of two updates of a toy model in float64, its parameters before, now, and their gradients."""
    config = toy_config(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9, adam_eps=1e-6, optimizer=optimizer, **settings)
    model = toy_model(norm="peri").double()
    optimizer, tokens = make_optimizer(model, config), toy_tokens()
    for _ in range(2):
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
        yield before, dict(model.named_parameters()), grads


def is_hidden(name, parameter):
    return name.startswith("blocks.") and parameter.dim() == 2


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_is_adamws(optimizer):
    """Against the formulas of arXiv 1711.05101, written out; under Muon three times the rate, but not for the blocks'
    matrices."""
    moments, lr = {}, 3e-2 if optimizer == "muon" else 1e-2
    for t, (before, now, grads) in enumerate(train_twice(optimizer), start=1):
        for name, x in before.items():
            if optimizer == "muon" and is_hidden(name, x):
                continue
            m, v = moments.get(name, (0.0, 0.0))
            m, v = moments[name] = 0.8 * m + 0.2 * grads[name], 0.9 * v + 0.1 * grads[name] ** 2
            x = x * (1 - lr * (0.3 if x.dim() == 2 else 0))
            x = x - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
            assert torch.allclose(now[name], x, atol=1e-12), name


def test_a_step_is_muons():
    """The blocks' matrices against the formula, one by one, with U V^T from the singular value decomposition: the same
    singular vectors, and singular values within the polynomials' error."""
    momentum = {}
    for before, now, grads in train_twice("muon"):
        for name, w in before.items():
            if not is_hidden(name, w):
                continue
            momentum[name] = 0.9 * momentum.get(name, 0.0) + 0.1 * grads[name]
            u, s, vh = torch.linalg.svd(0.9 * momentum[name] + 0.1 * grads[name], full_matrices=False)
            update = ((1 - 1e-2 * 0.3) * w - now[name]) / (1e-2 * 0.2 * math.sqrt(max(w.shape)))
            core = u.mT @ update @ vh.mT
            assert torch.allclose(core, core.diagonal().diag(), atol=1e-8)
            large = s > 0.003 * s.norm()
            assert large.sum() > 10 and (core.diagonal()[large] - 1).abs().max() < 0.65, name


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 40), (1, 5)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_singular_values_become_one_and_singular_vectors_stay(shape, scale):
    """For singular values of 0.005 and more of the largest, whatever their scale; the least grow by the slope at 0."""
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    result = orthogonal(u * (scale * torch.logspace(0, math.log10(0.005), u.size(-1))) @ vh)
    core = u.mT @ result @ vh.mT
    values = core.diagonal(dim1=-2, dim2=-1)
    assert (values - 1).abs().max() < 0.65 and torch.allclose(core, values.diag_embed(), atol=1e-3)
    least = orthogonal(torch.tensor([[1.0, 0.0], [0.0, 1e-5]]))
    assert least[1, 1] == pytest.approx(1e-5 * 8.3837 * 4.0434 * 3.5056, rel=0.01)


def test_no_gradient_is_no_update():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_matrices_taken_together_move_as_they_would_alone():
    x = torch.randn(4, 8, 12)
    assert torch.allclose(orthogonal(x), torch.stack([orthogonal(each) for each in x]), atol=1e-5)


def test_a_gradient_that_overflowed_in_float16_moves_nothing():
    """The loss scaler leaves its finding at the optimizer, since the fused AdamW wants to see it."""
    model = toy_model()
    optimizer = make_optimizer(model, toy_config())
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before)) and not optimizer.state


class Overflowing(Block):
    """Pre-LN with a gradient that is not finite at any scale of the loss."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.mlp.down.weight.register_hook(lambda grad: grad * math.inf)

    forward = PreLN.forward


@pytest.mark.parametrize("norm", ["overflowing", "pre"])
def test_a_float16_run_ends_when_no_scale_of_the_loss_is_left(here, quick, monkeypatch, norm):
    """Every step that overflows is left out and halves the scale; nothing else would say so."""
    monkeypatch.setitem(BLOCKS, "overflowing", Overflowing)
    monkeypatch.setattr(Compute, "scaler", lambda self: torch.amp.GradScaler("cpu"))
    config = toy_config(norm=norm, data="text.txt", steps=40, n_layers=1, val_fraction=0.0, save_every=10)
    if norm == "pre":
        assert train.train(config, "r")["step"] == 40
    else:
        with pytest.raises(Diverged, match="scale .*--dtype float32") as raised:
            train.train(config, "r")
        assert raised.value.step == 16 + 11 and len(records(here / "r")) == 26
        assert checkpoint.find("r", "last").name == "step-000020"


def test_the_rate_warms_up_from_above_zero_and_ends_at_the_least():
    """It reaches the least one update after the last."""
    config = toy_config(steps=99, warmup_steps=10, lr=1.0, min_lr=0.2, optimizer="adamw")
    rates = [lr_at(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert all(after < before for before, after in zip(rates[9:], rates[10:]))
    assert rates[99] == pytest.approx(0.2) and rates[54] == pytest.approx(0.6)
    assert rates[32] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 23 / 90)))


def test_muons_rate_falls_along_a_line():
    config = toy_config(steps=99, warmup_steps=10, lr=1.0, min_lr=0.1)
    rates = [lr_at(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10:] == pytest.approx([1 - 0.01 * k for k in range(1, 91)])


def test_rates_that_are_not_given_are_the_optimizers():
    assert toy_config(optimizer="adamw", lr=0.5).last_lr == pytest.approx(0.05)
    assert toy_config(lr=0.5).last_lr == lr_at(8, toy_config(lr=0.5, steps=8)) == 0.0
    assert toy_config().peak_lr > toy_config(optimizer="adamw").peak_lr > toy_config(optimizer="adamw").last_lr > 0
    assert toy_config(lr=0.5, min_lr=0.1).last_lr == 0.1


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 5, 6, 9])
def test_corners_of_the_schedule(warmup_steps, optimizer):
    config = toy_config(steps=5, warmup_steps=warmup_steps, lr=1.0, min_lr=0.1, optimizer=optimizer)
    rates = [lr_at(step, config) for step in range(12)]
    assert all(0.1 <= rate <= 1 for rate in rates) and rates[10:] == pytest.approx([0.1] * 2)
    if warmup_steps:
        assert rates[warmup_steps - 1] == 1.0
    if warmup_steps <= 5:
        assert rates[5:] == pytest.approx([0.1] * 7)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("done, warmup_steps", [(0, 0), (0, 1), (5, 0), (5, 2), (5, 6)])
def test_every_step_trains_also_a_first_that_is_the_last(done, warmup_steps, optimizer):
    """And one that a run is resumed for."""
    assert lr_at(done, toy_config(steps=done + 1, warmup_steps=warmup_steps, min_lr=0.0, optimizer=optimizer)) > 0


def test_large_matrices_of_one_shape_all_move_and_those_without_a_gradient_do_not():
    """Large ones are not taken together, to save memory."""
    matrices = [torch.nn.Parameter(torch.zeros(1100, 1000)) for _ in range(3)]
    optimizer = Muon([{"params": matrices, "momentum": 0.9, "weight_decay": 0.0}], lr=1.0, fused=True)
    grads = [torch.randn(1100, 1000) for _ in range(2)]
    for matrix, grad in zip(matrices, grads):
        matrix.grad = grad
    optimizer.step()
    for matrix, grad in zip(matrices, grads):
        assert torch.allclose(matrix, -0.2 * 1100**0.5 * orthogonal(grad.mT * 0.19).mT, atol=1e-4)
    assert not matrices[2].any()
