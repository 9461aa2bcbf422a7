import math

import pytest
import torch
from conftest import toy_config, toy_model, toy_tokens

from gpt import BLOCKS
from gpt.model import next_token_loss
from gpt.optim import lr_at, make_optimizer, parameter_groups


@pytest.mark.parametrize("norm", BLOCKS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(norm):
    model = toy_model(norm=norm)
    decayed, rest = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    grouped = [id(p) for p in decayed["params"] + rest["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}
    vectors = {id(p) for name, p in model.named_parameters() if "norm" in name or name.endswith(("bias", ".s"))}
    assert vectors == {id(p) for p in rest["params"]}


def test_a_step_is_adamws():
    """One and two updates against the formulas of arXiv 1711.05101, written out."""
    config = toy_config(lr=1e-2, min_lr=0.0, weight_decay=0.3, beta1=0.8, beta2=0.9, adam_eps=1e-6)
    model = toy_model().double()
    optimizer, tokens = make_optimizer(model, config), toy_tokens()
    expected = {name: (p.detach().clone(), 0.0, 0.0) for name, p in model.named_parameters()}
    for t in (1, 2):
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        for name, p in model.named_parameters():
            x, m, v = expected[name]
            m, v = 0.8 * m + 0.2 * p.grad, 0.9 * v + 0.1 * p.grad**2
            x = x * (1 - 1e-2 * (0.3 if p.dim() == 2 else 0))
            x = x - 1e-2 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
            expected[name] = x, m, v
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.allclose(p, expected[name][0], atol=1e-12), name


def test_the_rate_warms_up_from_above_zero_and_ends_at_the_least():
    config = toy_config(steps=100, warmup_steps=10, lr=1.0, min_lr=0.2)
    rates = [lr_at(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert all(after < before for before, after in zip(rates[9:], rates[10:]))
    assert rates[99] == pytest.approx(0.2) and rates[54] == pytest.approx(0.6)
    assert rates[32] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 23 / 90)))


def test_the_least_rate_is_a_tenth_of_the_peak_unless_said():
    assert toy_config(lr=0.5, steps=20).last_lr == lr_at(19, toy_config(lr=0.5, steps=20)) == pytest.approx(0.05)
    assert toy_config(lr=0.5, min_lr=0.0).last_lr == 0.0


@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 9])
def test_corners_of_the_schedule(warmup_steps):
    config = toy_config(steps=5, warmup_steps=warmup_steps, lr=1.0, min_lr=0.1)
    rates = [lr_at(step, config) for step in range(8)]
    assert all(0 < rate <= 1 for rate in rates)
    if warmup_steps < 5:
        assert rates[4:] == pytest.approx([0.1] * 4 if warmup_steps < 4 else rates[4:])
