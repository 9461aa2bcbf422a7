import pytest
import torch
from conftest import toy_model, toy_tokens

from gpt import BLOCKS, GPT, ModelConfig
from gpt.blocks import Block
from gpt.model import next_token_loss

# One row for each placement: does a final norm follow, and how many norms of width d has a model of L blocks?
TABLE = {
    "pre": (True, lambda L: 2 * L + 1),
    "post": (False, lambda L: 2 * L),
    "none": (False, lambda L: 0),
}


def test_every_placement_has_its_row():
    assert set(TABLE) == set(BLOCKS)


@pytest.mark.parametrize("norm", BLOCKS)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_norms_of_each_placement(norm, n_layers):
    final, norms = TABLE[norm]
    model = toy_model(norm=norm, n_layers=n_layers)
    assert model.count_parameters("norm") == norms(n_layers) * 2 * 32
    assert hasattr(model.final_norm, "weight") == final
    assert toy_model(norm=norm, bias=False, n_layers=n_layers).count_parameters("norm") == norms(n_layers) * 32
    for forced in (True, False):  # the user's word goes over the placement's
        assert hasattr(toy_model(norm=norm, final_norm=forced).final_norm, "weight") == forced


def reference(norm, block, x):
    """The placement's equation, written out once more."""
    f1, f2 = block.attn, block.mlp
    n1, n2 = getattr(block, "attn_norm", None), getattr(block, "mlp_norm", None)
    if norm == "pre":
        y = x + f1(n1(x))
        return y + f2(n2(y))
    if norm == "post":
        y = n1(x + f1(x))
        return n2(y + f2(y))
    y = x + f1(x)
    return y + f2(y)


@pytest.mark.parametrize("norm", BLOCKS)
def test_a_block_is_its_equation(norm):
    block = toy_model(norm=norm).blocks[0]
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 32)
    assert torch.allclose(block(x), reference(norm, block, x), atol=1e-6)


@pytest.mark.parametrize("norm", BLOCKS)
def test_one_backward_reaches_every_parameter(norm):
    model, tokens = toy_model(norm=norm), toy_tokens()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_placements_with_equal_parameters_start_from_equal_weights():
    weights = {}
    for norm in BLOCKS:
        torch.manual_seed(3)
        weights[norm] = GPT(ModelConfig(norm=norm, n_layers=2, n_heads=2, d_model=32)).state_dict()
    for norm in BLOCKS:
        for name in weights[norm].keys() & weights["pre"].keys():
            assert torch.equal(weights[norm][name], weights["pre"][name]), (norm, name)
    assert weights["pre"].keys() - weights["post"].keys() == {"final_norm.weight", "final_norm.bias"}


@pytest.mark.parametrize("branch_init, branch_std", [("gpt2", 0.02 / (2 * 6) ** 0.5), ("plain", 0.02), ("zero", 0.0)])
def test_standard_deviations_at_the_start(branch_init, branch_std):
    model = GPT(ModelConfig(n_layers=6, d_model=192, branch_init=branch_init))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name
        else:
            wanted = branch_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.02), name


def test_a_placement_is_one_class_below_block():
    for block in BLOCKS.values():
        assert block.__bases__ == (Block,) and block.forward.__code__.co_varnames[:2] == ("self", "x")
    assert Block.forward is torch.nn.Module.forward
