"""Each placement is its equation, with the norms and the start that it asks for."""

import inspect

import pytest
import torch
from toys import TOY, toy_model, toy_tokens

from gpt import BLOCKS, GPT, NORMS, ModelConfig
from gpt.blocks import Block
from gpt.layers import Linear
from gpt.loss import next_token_loss


def twice(step):
    """A block that takes the same step around attention and around the MLP: step(block, x, branch, norm, norm of the
    branch's output, number of the block, number of blocks)."""

    def block(b, x, l, L):
        for f, role in ((b.attn, "attn"), (b.mlp, "mlp")):
            n, out = getattr(b, f"{role}_norm", None), getattr(b, f"{role}_out_norm", None)
            x = step(b, x, f, n, out, l, L)
        return x

    return block


# For each placement: whether a final norm follows, how many norms a block has, and its equation for block l of L.
TABLE = {
    "pre": (True, 2, twice(lambda b, x, f, n, out, l, L: x + f(n(x)))),
    "post": (False, 2, twice(lambda b, x, f, n, out, l, L: n(x + f(x)))),
    "peri": (True, 4, twice(lambda b, x, f, n, out, l, L: x + out(f(n(x))))),
    "reordered": (True, 2, twice(lambda b, x, f, n, out, l, L: x + n(f(x)))),
    "none": (False, 0, twice(lambda b, x, f, n, out, l, L: x + f(x))),
    "parallel": (True, 1, lambda b, x, l, L: x + b.attn(b.norm(x)) + b.mlp(b.norm(x))),
    "deepnorm": (False, 2, twice(lambda b, x, f, n, out, l, L: n((2 * L) ** (1 / 4) * x + f(x)))),
    "lns": (True, 2, twice(lambda b, x, f, n, out, l, L: x + f(n(x) / l**0.5))),
    "rezero": (False, 0, twice(lambda b, x, f, n, out, l, L: x + b.s * f(x))),
    "mix": (True, 2, twice(lambda b, x, f, n, out, l, L: n(x + f(x)) if l <= L / 4 else x + f(n(x)))),
    "keel": (False, 4, twice(lambda b, x, f, n, out, l, L: out(2 * L * x + f(n(x))))),
}


def test_every_placement_has_its_row():
    assert set(TABLE) == set(BLOCKS)


@pytest.mark.parametrize("placement", BLOCKS)
@pytest.mark.parametrize("n_layers", [1, 4])
def test_norms_of_each_placement(placement, n_layers):
    final, in_a_block, _ = TABLE[placement]
    model = toy_model(norm=placement, n_layers=n_layers)
    assert model.count_parameters("norm") == (in_a_block * n_layers + final) * 2 * 32
    assert hasattr(model.final_norm, "weight") == final
    for forced in (True, False):  # the setting goes over the placement's
        assert hasattr(toy_model(norm=placement, final_norm=forced).final_norm, "weight") == forced


@pytest.mark.parametrize("placement", BLOCKS)
@pytest.mark.parametrize("norm_layer", NORMS)
def test_a_block_is_its_equation(placement, norm_layer):
    model = toy_model(norm=placement, norm_layer=norm_layer, n_layers=8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 32)
    for layer, block in enumerate(model.blocks, start=1):
        assert torch.allclose(block(x), TABLE[placement][2](block, x, layer, 8), atol=1e-5), layer


@pytest.mark.parametrize("placement", BLOCKS)
def test_one_backward_reaches_every_parameter(placement):
    model, tokens = toy_model(norm=placement), toy_tokens()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_placements_with_equal_parameters_start_from_equal_weights():
    weights = {}
    for placement in BLOCKS:
        torch.manual_seed(3)
        weights[placement] = GPT(ModelConfig(**TOY, norm=placement, branch_init="gpt2")).state_dict()
    for placement in set(BLOCKS) - {"deepnorm"}:
        for name in weights[placement].keys() & weights["pre"].keys():
            assert torch.equal(weights[placement][name], weights["pre"][name]), (placement, name)
    assert weights["pre"].keys() - weights["post"].keys() == {"final_norm.weight", "final_norm.bias"}


@pytest.mark.parametrize("branch_init, branch_std", [("gpt2", 0.02 / (2 * 6) ** 0.5), ("plain", 0.02), ("zero", 0.0)])
@pytest.mark.parametrize("placement", [name for name in BLOCKS if name not in ("deepnorm", "rezero")])
def test_standard_deviations_at_the_start(placement, branch_init, branch_std):
    model = GPT(ModelConfig(norm=placement, n_layers=6, branch_init=branch_init))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name
        else:
            wanted = branch_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.02), name


@pytest.mark.parametrize("placement", BLOCKS)
def test_the_start_a_placement_asks_for(placement):
    """GPT-2's 0.02/sqrt(2 L) on branch outputs, but for lns, which asks for 0.02, and deepnorm (below)."""
    L, d = 12, 128
    beta = (8 * L) ** -0.25 if placement == "deepnorm" else 1.0
    branch = 0.02 if placement in ("lns", "deepnorm") else 0.02 / (2 * L) ** 0.5
    block = GPT(ModelConfig(norm=placement, n_layers=L, d_model=d)).blocks[L - 1]
    queries_and_keys, values = block.attn.qkv.weight.split([2 * d, d])
    for weight, std in (
        (queries_and_keys, 0.02),
        (values, 0.02 * beta),
        (block.attn.out.weight, branch * beta),
        (block.mlp.up.weight, 0.02 * beta),
        (block.mlp.down.weight, branch * beta),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.02)


def test_deepnorms_constants():
    for n_layers in (1, 3, 12, 100):
        block = BLOCKS["deepnorm"](ModelConfig(n_layers=n_layers, d_model=4), 1)
        assert block.a * (8 * n_layers) ** -0.25 == pytest.approx(0.5**0.5)
    assert BLOCKS["deepnorm"](ModelConfig(n_layers=12), 1).a == pytest.approx(2.21336, abs=1e-5)


def test_mix_of_twelve_blocks_is_three_post_and_nine_pre():
    names = [type(block).__name__ for block in GPT(ModelConfig(norm="mix", n_layers=12)).blocks]
    assert names == ["PostLN"] * 3 + ["PreLN"] * 9


def test_a_placement_is_one_class_below_block():
    for make in BLOCKS.values():
        block = make(ModelConfig(), 1)
        assert type(block).__bases__ == (Block,) and [*inspect.signature(block.forward).parameters] == ["x"]
    assert "forward" not in vars(Block)


def test_a_weight_that_a_block_forgets_to_start_is_noticed():
    """It would be memory that something else has left, and another for each run."""
    assert Linear(3, 3).weight.isnan().all()
    for placement in BLOCKS:
        assert all(parameter.isfinite().all() for parameter in GPT(ModelConfig(norm=placement)).parameters())
