"""The lesson, statement by statement: layer normalization, residual connections, and the two together."""

import itertools
import math

import pytest
import torch
from torch.autograd.functional import jacobian
from toys import toy_model, toy_tokens

from gpt import BLOCKS, GPT, LayerNorm, ModelConfig
from gpt.study.depth import depth_profile, random_stack

ROW = torch.tensor([2.0, 4.0, 6.0, 8.0])


def test_the_worked_row():
    expected = torch.tensor([-1.3416, -0.4472, 0.4472, 1.3416])
    assert torch.allclose(LayerNorm(4)(ROW), expected, atol=5e-5)
    unbiased = (ROW - ROW.mean()) / ROW.std()  # divides by d - 1: the common mistake
    assert torch.allclose(unbiased, torch.tensor([-1.162, -0.387, 0.387, 1.162]), atol=5e-4)
    assert not torch.allclose(LayerNorm(4)(ROW), unbiased, atol=0.1)


def test_the_worked_row_with_scale_and_shift():
    norm = LayerNorm(4)
    norm.weight.data = torch.tensor([1.0, 1.0, 2.0, 2.0])
    norm.bias.data = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert torch.allclose(norm(ROW), torch.tensor([-1.3416, -0.4472, 1.8944, 3.6833]), atol=5e-5)


def test_eps_within_the_root_makes_the_variance_of_the_result_a_little_less_than_one():
    for scale in (10.0, 1.0, 0.01, 1e-4):
        x = scale * ROW.double()
        variance = x.var(correction=0)
        y = LayerNorm(4).double()(x)
        assert y.var(correction=0).item() == pytest.approx((variance / (variance + 1e-5)).item(), rel=1e-12)


def test_two_numbers_become_minus_one_and_one():
    assert torch.equal(LayerNorm(2, eps=0.0)(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]))


def test_a_row_of_equal_numbers_becomes_beta():
    norm = LayerNorm(4)
    norm.bias.data = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert torch.equal(norm(torch.full((4,), 7.0)), norm.bias.data)


def test_gamma_starts_at_one_and_beta_at_zero_two_numbers_per_channel():
    norm = LayerNorm(48)
    assert torch.equal(norm.weight, torch.ones(48)) and torch.equal(norm.bias, torch.zeros(48))
    assert sum(p.numel() for p in norm.parameters()) == 2 * 48


def test_each_token_of_each_example_has_mean_zero_and_variance_one():
    y = LayerNorm(64)(torch.randn(3, 5, 64) * 7 + 2)
    assert torch.allclose(y.mean(-1), torch.zeros(3, 5), atol=1e-5)
    assert torch.allclose(y.var(-1, correction=0), torch.ones(3, 5), atol=1e-4)


def changes_elsewhere(norm):
    """Whether the result of token (0, 0) depends on another token, or on another example."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    other_token, other_example = x.clone(), x.clone()
    other_token[0, 3] += 5
    other_example[2] += 5
    y = norm(x)[0, 0]
    return [not torch.equal(y, norm(changed)[0, 0]) for changed in (other_token, other_example)]


def test_a_token_is_normalized_by_itself_as_batch_norm_does_not():
    assert changes_elsewhere(LayerNorm(8)) == [False, False]
    batch_norm = torch.nn.BatchNorm1d(8)
    assert changes_elsewhere(lambda x: batch_norm(x.transpose(1, 2)).transpose(1, 2)) == [True, True]


def test_training_and_generation_compute_the_same_as_batch_norm_does_not():
    x = torch.randn(4, 8) * 3 + 1
    norm, batch_norm = LayerNorm(8), torch.nn.BatchNorm1d(8)
    assert torch.equal(norm.train()(x), norm.eval()(x))
    assert not torch.allclose(batch_norm.train()(x), batch_norm.eval()(x), atol=0.1)


def test_padding_and_a_batch_of_one_do_not_matter_as_they_do_to_batch_norm():
    text, padding = torch.randn(5, 8), torch.zeros(3, 8)
    norm, batch_norm = LayerNorm(8), torch.nn.BatchNorm1d(8).train()
    assert torch.equal(norm(torch.cat([text, padding]))[:5], norm(text)) and torch.equal(norm(text[:1]), norm(text)[:1])
    assert not torch.allclose(batch_norm(torch.cat([text, padding]))[:5], batch_norm(text), atol=0.1)
    with pytest.raises(ValueError):
        batch_norm(text[:1])


def test_the_norm_is_over_the_last_axis_and_over_no_other():
    x = torch.randn(8, 8)
    assert torch.allclose(LayerNorm(8)(x)[3], LayerNorm(8)(x[3]))
    assert not torch.allclose(LayerNorm(8)(x).T, LayerNorm(8)(x.T), atol=0.1)


def test_a_residual_adds_and_has_no_parameters():
    x, branch = torch.tensor([1.0, -1.0]), torch.tensor([0.1, 0.2])
    assert torch.allclose(x + branch, torch.tensor([1.1, -0.8]))
    branches = {name for name, _ in BLOCKS["none"](ModelConfig(), 1).named_parameters()}
    assert branches and all(name.startswith(("attn.", "mlp.")) for name in branches)


def test_the_gradient_has_a_path_around_the_branch():
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    (x + 0.5 * x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.5, 1.5]))  # 1 around, 0.5 through
    deep = torch.ones(1, requires_grad=True)
    y, without = deep, deep
    for _ in range(12):
        y, without = y + 0.01 * y, 0.01 * without
    assert math.isclose(torch.autograd.grad(y, deep)[0].item(), 1.01**12, rel_tol=1e-5)
    assert torch.autograd.grad(without, deep)[0].item() < 1e-23


@pytest.mark.parametrize("placement", ["pre", "peri", "none"])
def test_the_jacobian_of_three_blocks_is_the_sum_over_all_ways_through_them(placement):
    """(I + J3)(I + J2)(I + J1): each block is gone through, as J, or around, as I. The whole is measured by
    differences, so this holds the norm's own gradient as well."""
    blocks = toy_model(norm=placement, n_layers=3, d_model=8, start="fan_in").double().blocks
    x = first = torch.randn(1, 2, 8, dtype=torch.float64)
    ways = [torch.eye(16, dtype=torch.float64)]
    for block in blocks:
        J = jacobian(lambda x: block(x) - x, x).view(16, 16)  # noqa: B023
        ways += [J @ way for way in ways]
        x = block(x).detach()
    with torch.no_grad():
        y = [torch.nn.Sequential(*blocks)(first + step * torch.eye(16).view(16, 2, 8)) for step in (1e-5, -1e-5)]
    stack = ((y[0] - y[1]) / 2e-5).view(16, 16).T
    assert len(ways) == 8 and torch.allclose(sum(ways), stack, atol=1e-6)
    assert (ways[-1].abs() > 1e-3).any()  # even the longest way counts


def twelve_layers(**settings):
    """(scale left of the signal, cosine with the input, gradient at the input) after 12 random layers."""
    profile = random_stack(depth=12, **settings)
    assert all(len(values) == 13 for values in profile.values()) and profile["stream_grad"][-1] == 1
    return profile["stream"][-1] / profile["stream"][0], profile["cosine"][-1], profile["stream_grad"][0]


def test_twelve_random_layers():
    for gain, left in ((0.7, 0.7**12), (1.3, 1.3**12)):
        scale, cosine, gradient = twelve_layers(gain=gain)
        assert scale == pytest.approx(left, rel=0.1) and abs(cosine) < 0.05
        assert gradient == pytest.approx(left, rel=0.1)
        scale, cosine, gradient = twelve_layers(gain=gain, norm=True)
        assert scale == pytest.approx(1, rel=0.01) and abs(cosine) < 0.05  # no drift, but another direction
        assert gradient == pytest.approx(1, rel=0.05)
    shrinking, growing = twelve_layers(gain=0.7, residual=True), twelve_layers(gain=1.3, residual=True)
    assert shrinking[1] > 0.05 and min(growing[0], growing[2]) > 100  # the input shows, but the scale runs away
    for gain in (0.7, 1.3):
        scale, cosine, gradient = twelve_layers(gain=gain, norm=True, residual=True)
        assert scale == pytest.approx((1 + 12 * gain**2) ** 0.5, rel=0.05)  # adds up like a root, whatever the gain
        assert cosine == pytest.approx(1 / scale, rel=0.15)
        assert gradient == pytest.approx(scale, rel=0.05)  # each norm divides by the scale that is there


def stream_scales(n_layers, **settings):
    """Root mean square of the stream after each block, for branches of unit gain."""
    model = toy_model(n_layers=n_layers, d_model=64, bias=False, **settings)
    tokens = toy_tokens(8)
    x, scales = model.token_embedding(tokens), []
    for block in model.blocks:
        x = block(x)
        scales.append(x.square().mean().sqrt().item())
    return scales, model.final_norm(x).square().mean().sqrt().item()


def test_the_pre_ln_stream_grows_like_a_root_and_the_final_norm_restores_it():
    scales, after_final_norm = stream_scales(64, norm="pre")
    for depth in (4, 16):
        assert 1.7 < scales[4 * depth - 1] / scales[depth - 1] < 2.6  # four times as deep, about twice as large
    assert scales[-1] > 5 and after_final_norm == pytest.approx(1, rel=1e-3)
    _, without = stream_scales(64, norm="pre", final_norm=False)
    assert without == pytest.approx(scales[-1])


def test_the_gradient_steps_down_where_a_norm_magnifies_small_embeddings():
    """They start at sqrt(2) 0.02, and the backward pass of the first norm on the stream divides by that."""
    for placement, step in (("pre", 1), ("post", 1 / (0.02 * 2**0.5))):
        model = toy_model(norm=placement, n_layers=3, d_model=64, start="gpt2", branch_init="gpt2")
        gradient = depth_profile(model, toy_tokens())["stream_grad"]
        assert gradient[0] / gradient[1] == pytest.approx(step, rel=0.1)
        assert gradient[1] / gradient[2] == pytest.approx(1, rel=0.1)


def test_around_the_branches_pre_ln_keeps_the_gradient_and_post_ln_with_strong_branches_hardly_any():
    """Each norm of post-LN divides by the deviation of x + f(x), which is above 1. That the whole gradient stays (see
    test_theory.py) is the branches' work. At GPT-2's start branches are so weak that nearly all of it comes around."""
    around = {}
    for placement, start in itertools.product(("pre", "post"), ("gpt2", "fan_in")):
        model = toy_model(norm=placement, n_layers=12, d_model=64, start=start)
        for branch in (branch for block in model.blocks for branch in (block.attn, block.mlp)):
            branch.register_forward_hook(lambda module, inputs, output: output.detach())
        around[placement, start] = depth_profile(model, toy_tokens())["stream_grad"]
    for start in ("gpt2", "fan_in"):
        assert around["pre", start] == pytest.approx([around["pre", start][0]] * 12)
    assert around["post", "fan_in"] == sorted(around["post", "fan_in"])
    assert around["post", "fan_in"][0] < 0.02 * around["post", "fan_in"][-1]
    assert around["post", "gpt2"][1:] == pytest.approx([around["post", "gpt2"][-1]] * 11, rel=0.05)


def test_the_post_ln_stream_does_not_grow():
    scales, after = stream_scales(64, norm="post")
    assert scales == pytest.approx([1.0] * 64, rel=1e-3) and after == scales[-1]


def test_pre_ln_logits_ignore_the_scale_of_the_last_stream_only_with_the_final_norm():
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for final_norm in (True, False):
        model = toy_model(final_norm=final_norm, norm_eps=1e-12).double()
        assert torch.allclose(model.readout(x), model.readout(3 * x), atol=1e-8) == final_norm


@torch.no_grad()
@pytest.mark.parametrize("placement", BLOCKS)
def test_with_zero_branches_a_stack_is_the_identity_or_its_norms(placement):
    """The identity bit for bit, at any depth, where nothing stands on the main path; else only norms are left."""
    branch_init = None if placement == "rezero" else "zero"
    blocks = GPT(ModelConfig(norm=placement, branch_init=branch_init, n_layers=12, n_heads=2, d_model=32)).blocks
    x = y = blocks[0].open(torch.randn(2, 7, 32))
    for block in blocks:
        y = block(y)
    if placement == "resi_dual":
        (x, sum_of_branches), (y, same) = x.unbind(2), y.unbind(2)
        assert torch.equal(sum_of_branches, same)
    if any(block.norm_on_stream for block in blocks):
        assert torch.allclose(y, LayerNorm(32)(x), atol=1e-3) and not torch.allclose(y, x, atol=0.01)
    elif placement == "mhc":  # a mean of equal lanes may be rounded
        assert torch.allclose(y, x, atol=1e-5)
    else:
        assert torch.equal(y, x)


def test_dropout_acts_on_the_branch_and_never_on_the_stream():
    x = torch.randn(2, 7, 32)
    for placement in ("pre", "none"):
        silent = BLOCKS[placement](ModelConfig(branch_init="zero", n_heads=2, d_model=32, dropout=0.9), 1).train()
        assert torch.equal(silent(x), x)
    block = BLOCKS["pre"](ModelConfig(n_heads=2, d_model=32, dropout=0.5), 1)
    for branch in (block.attn, block.mlp):
        share = (branch.train()(x) == 0).float().mean().item()
        assert share == pytest.approx(0.5, abs=0.1) and (branch.eval()(x) != 0).all()
