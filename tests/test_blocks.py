import pytest
import torch
from toys import toy_model, toy_tokens

from gpt import BLOCKS, GPT, NORMS, ModelConfig
from gpt.blocks import Block
from gpt.loss import next_token_loss


def twice(step):
    """A block that takes the same step around attention and around the MLP."""

    def block(b, x, l, L):
        for f, role in ((b.attn, "attn"), (b.mlp, "mlp")):
            n, out = getattr(b, f"{role}_norm", None), getattr(b, f"{role}_out_norm", None)
            x = step(b, x, f, n, out, l, L)
        return x

    return block


# One row for each placement: does a final norm follow, how many norms has a block, and block l of L once more.
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


@pytest.mark.parametrize("norm", BLOCKS)
@pytest.mark.parametrize("n_layers", [1, 4])
def test_norms_of_each_placement(norm, n_layers):
    final, in_a_block, _ = TABLE[norm]
    model = toy_model(norm=norm, n_layers=n_layers)
    assert model.count_parameters("norm") == (in_a_block * n_layers + final) * 2 * 32
    assert hasattr(model.final_norm, "weight") == final
    for forced in (True, False):  # the user's word goes over the placement's
        assert hasattr(toy_model(norm=norm, final_norm=forced).final_norm, "weight") == forced


@pytest.mark.parametrize("norm", BLOCKS)
@pytest.mark.parametrize("norm_layer", NORMS)
def test_a_block_is_its_equation(norm, norm_layer):
    model = toy_model(norm=norm, norm_layer=norm_layer, n_layers=8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 32)
    for layer, block in enumerate(model.blocks, start=1):
        assert torch.allclose(block(x), TABLE[norm][2](block, x, layer, 8), atol=1e-5), layer


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
        shape = {"n_layers": 2, "n_heads": 2, "d_model": 32, "branch_init": "gpt2"}
        weights[norm] = GPT(ModelConfig(norm=norm, **shape)).state_dict()
    for norm in set(BLOCKS) - {"deepnorm"}:
        for name in weights[norm].keys() & weights["pre"].keys():
            assert torch.equal(weights[norm][name], weights["pre"][name]), (norm, name)
    assert weights["pre"].keys() - weights["post"].keys() == {"final_norm.weight", "final_norm.bias"}


@pytest.mark.parametrize("branch_init, branch_std", [("gpt2", 0.02 / (2 * 6) ** 0.5), ("plain", 0.02), ("zero", 0.0)])
@pytest.mark.parametrize("norm", [norm for norm in BLOCKS if norm not in ("deepnorm", "rezero")])
def test_standard_deviations_at_the_start(norm, branch_init, branch_std):
    model = GPT(ModelConfig(norm=norm, n_layers=6, branch_init=branch_init))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name
        else:
            wanted = branch_std if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.02), name


@pytest.mark.parametrize("norm", BLOCKS)
def test_the_start_a_placement_asks_for(norm):
    """GPT-2's 0.02/sqrt(2 L) on branch outputs, but for lns, which asks for 0.02, and deepnorm (below)."""
    L, d = 12, 128
    beta = (8 * L) ** -0.25 if norm == "deepnorm" else 1.0
    branch = 0.02 if norm in ("lns", "deepnorm") else 0.02 / (2 * L) ** 0.5
    block = GPT(ModelConfig(norm=norm, n_layers=L, d_model=d)).blocks[L - 1]
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
    assert (8 * 12) ** -0.25 == pytest.approx(0.31947, abs=1e-5)


def test_mix_of_twelve_blocks_is_three_post_and_nine_pre():
    names = [type(block).__name__ for block in GPT(ModelConfig(norm="mix", n_layers=12)).blocks]
    assert names == ["PostLN"] * 3 + ["PreLN"] * 9


def test_a_placement_is_one_class_below_block():
    for make in BLOCKS.values():
        block = make(ModelConfig(), 1)
        assert type(block).__bases__ == (Block,) and block.forward.__func__.__code__.co_argcount == 2
    assert Block.forward is torch.nn.Module.forward


SMALL = {"vocab_size": 50257, "context_length": 1024, "n_layers": 12, "n_heads": 12, "d_model": 768}


@pytest.mark.parametrize("norm", BLOCKS)
def test_parameters_at_the_size_of_gpt2_small(norm):
    """Without norms GPT-2 small has 124,401,408; each norm adds 2 d, rezero one number a block."""
    final, in_a_block, _ = TABLE[norm]
    with torch.device("meta"):
        count = GPT(ModelConfig(norm=norm, **SMALL)).count_parameters()
    assert count == 124_401_408 + (12 * in_a_block + final) * 2 * 768 + (12 if norm == "rezero" else 0)
