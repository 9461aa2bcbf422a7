"""The lesson, statement by statement: layer normalization, residual connections, and the two together."""

import math

import pytest
import torch
from toys import toy_model, toy_tokens

from gpt import BLOCKS, GPT, LayerNorm, ModelConfig
from gpt.study.depth import random_stack

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


def twelve_layers(**settings):
    """(scale left of the signal, cosine with the input) after 12 random layers."""
    profile = random_stack(depth=12, **settings)
    assert all(len(values) == 13 for values in profile.values())
    return profile["stream"][-1] / profile["stream"][0], profile["cosine"][-1]


def test_twelve_random_layers():
    for gain, left in ((0.7, 0.014), (1.3, 23.0)):
        scale, cosine = twelve_layers(gain=gain)
        assert scale == pytest.approx(left, rel=0.1) and abs(cosine) < 0.05
        scale, cosine = twelve_layers(gain=gain, norm=True)
        assert scale == pytest.approx(1, rel=0.01) and abs(cosine) < 0.05  # no drift, and nothing left of the input
    shrinking, growing = twelve_layers(gain=0.7, residual=True), twelve_layers(gain=1.3, residual=True)
    assert shrinking[1] > 0.05 and growing[0] > 100  # the input shows, but the scale runs away with the gain
    for gain in (0.7, 1.3):
        scale, cosine = twelve_layers(gain=gain, norm=True, residual=True)
        assert scale == pytest.approx((1 + 12 * gain**2) ** 0.5, rel=0.05)  # adds up like a root, whatever the gain
        assert cosine == pytest.approx(1 / scale, rel=0.15)


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
    blocks = GPT(ModelConfig(norm=placement, branch_init="zero", n_layers=12, n_heads=2, d_model=32)).blocks
    x = y = blocks[0].open(torch.randn(2, 7, 32))
    for block in blocks:
        y = block(y)
    if placement == "resi_dual":
        (x, sum_of_branches), (y, same) = x.unbind(2), y.unbind(2)
        assert torch.equal(sum_of_branches, same)
    if placement in ("post", "deepnorm", "mix", "keel", "b2t", "hybrid", "resi_dual"):
        assert torch.allclose(y, LayerNorm(32)(x), atol=1e-3) and not torch.allclose(y, x, atol=0.01)
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
