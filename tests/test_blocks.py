"""Each placement is its equation, with the norms and the start that it asks for."""

import dataclasses
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from toys import PAIRS, TOY, toy_model, toy_tokens

from gpt import BLOCKS, GPT, ModelConfig
from gpt.block import Block
from gpt.config import Mistake
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


def hybrid(b, x, l, L):
    y = x + b.attn(b.attn_norm(x)) if l == 1 else b.mlp_norm(x + b.attn(x))
    return y + b.mlp(b.mlp_norm(y) if l == 1 else y)


def resi_dual(b, x, l, L):
    x, s = x.unbind(2)
    for f, n in ((b.attn, b.attn_norm), (b.mlp, b.mlp_norm)):
        x, s = n(x + f(x)), s + f(x)
    return torch.stack((x, s), 2)


def hyper(b, h, l, L):
    for f, n, role in ((b.attn, b.attn_norm, "attn"), (b.mlp, b.mlp_norm, "mlp")):
        r, m, w = (getattr(b, f"{role}_{name}") for name in ("read", "mix", "write"))
        y = f(n(sum(r[i] * h[:, :, i] for i in range(4))))
        lanes = [sum(m.view(4, 4)[i, j] * h[:, :, j] for j in range(4)) + w[i] * y for i in range(4)]
        h = torch.stack(lanes, 2)
    return h


HEADS = TOY["n_heads"]
# For each placement: whether a final norm follows; the norms' parameters of a block in units of the width d, of the
# first block if it differs and of the others; and the equation of block l of L.
TABLE = {
    "pre": (True, [4], twice(lambda b, x, f, n, out, l, L: x + f(n(x)))),
    "post": (False, [4], twice(lambda b, x, f, n, out, l, L: n(x + f(x)))),
    "peri": (True, [8], twice(lambda b, x, f, n, out, l, L: x + out(f(n(x))))),
    "reordered": (True, [4], twice(lambda b, x, f, n, out, l, L: x + n(f(x)))),
    "none": (False, [0], twice(lambda b, x, f, n, out, l, L: x + f(x))),
    "parallel": (True, [2], lambda b, x, l, L: x + b.attn(b.norm(x)) + b.mlp(b.norm(x))),
    "deepnorm": (False, [4], twice(lambda b, x, f, n, out, l, L: n((2 * L) ** (1 / 4) * x + f(x)))),
    "lns": (True, [4], twice(lambda b, x, f, n, out, l, L: x + f(n(x) / l**0.5))),
    "rezero": (False, [0], twice(lambda b, x, f, n, out, l, L: x + b.s * f(x))),
    "mix": (True, [4], twice(lambda b, x, f, n, out, l, L: n(x + f(x)) if l <= L / 4 else x + f(n(x)))),
    "keel": (False, [4, 8], twice(lambda b, x, f, n, out, l, L: out(2 * L * x + f(n(x))) if l > 1 else x + f(n(x)))),
    "olmo2": (True, [4 + 2 / HEADS], twice(lambda b, x, f, n, out, l, L: x + n(f(x)))),
    "neox": (True, [4], lambda b, x, l, L: x + b.attn(b.attn_norm(x)) + b.mlp(b.mlp_norm(x))),
    "subln": (True, [4 + 2 + 8], twice(lambda b, x, f, n, out, l, L: x + f(n(x)))),
    "b2t": (False, [4], lambda b, x, l, L: b.mlp_norm(x + (y := b.attn_norm(x + b.attn(x))) + b.mlp(y))),
    "hybrid": (True, [4 + 2 / HEADS, 2 + 3 / HEADS], hybrid),
    "sandwich": (True, [8], twice(lambda b, x, f, n, out, l, L: x + out(f(n(x))) / L**0.5)),
    "depth_factor": (True, [4], twice(lambda b, x, f, n, out, l, L: x + f(n(x)) / L)),
    "layerscale": (
        True,
        [4],
        lambda b, x, l, L: (y := x + b.attn_scale * b.attn(b.attn_norm(x))) + b.mlp_scale * b.mlp(b.mlp_norm(y)),
    ),
    "gpas": (True, [4], twice(lambda b, x, f, n, out, l, L: (1 - F.silu(b.s)) * (x + f(n(x))))),
    "resi_dual": (True, [4], resi_dual),
    "hyper": (True, [4], hyper),
    "mhc": (True, [4], hyper),
}


def test_every_placement_has_its_row():
    assert set(TABLE) == set(BLOCKS)


@pytest.mark.parametrize("placement", BLOCKS)
@pytest.mark.parametrize("n_layers", [4, 7])
def test_norms_of_each_placement(placement, n_layers):
    final, (first, *others), _ = TABLE[placement]
    model = toy_model(norm=placement, n_layers=n_layers)
    in_blocks = first + (n_layers - 1) * (others or [first])[0]
    assert model.count_parameters("norm") == (in_blocks + 2 * final) * 32
    assert hasattr(model.final_norm, "weight") == final
    for forced in (True, False):  # the setting goes over the placement's
        assert hasattr(toy_model(norm=placement, final_norm=forced).final_norm, "weight") == forced


@pytest.mark.parametrize("placement", BLOCKS)
def test_norms_of_one_block(placement):
    """Of `mix` it is post-LN, of `keel` pre-LN: the norm before the head is that of the last block."""
    final, (first, *_), _ = TABLE[placement]
    final = {"mix": False, "keel": True}.get(placement, final)
    model = toy_model(norm=placement, n_layers=1)
    assert model.count_parameters("norm") == (first + 2 * final) * 32
    assert hasattr(model.final_norm, "weight") == final


@pytest.mark.parametrize("placement, norm_layer", PAIRS)
def test_a_block_is_its_equation(placement, norm_layer):
    model = toy_model(norm=placement, norm_layer=norm_layer, n_layers=8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = model.blocks[0].open(torch.randn(2, 5, 32))
    x = x + torch.randn_like(x)  # another for each lane
    for layer, block in enumerate(model.blocks, start=1):
        assert torch.allclose(block(x), TABLE[placement][2](block, x, layer, 8), atol=1e-5), layer


@pytest.mark.parametrize("placement, norm_layer", PAIRS)
def test_one_backward_reaches_every_parameter(placement, norm_layer):
    model, tokens = toy_model(norm=placement, norm_layer=norm_layer, qk_norm=True), toy_tokens()
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("placement", BLOCKS)
def test_placements_start_from_the_same_draws_and_at_the_common_start_from_the_same_weights(placement):
    """Where names and shapes agree; deepnorm and subln have factors of their own."""
    for start in ("gpt2", "fan_in"):
        models = []
        for each in ("pre", placement):
            torch.manual_seed(7)
            models.append(dict(GPT(ModelConfig(**TOY, norm=each, start=start)).named_parameters()))
        pre, other = models
        shared = [name for name in pre if name in other and pre[name].dim() > 1]
        assert len(shared) == 2 + 4 * TOY["n_layers"]
        for name in shared:
            scale = other[name].norm(dim=-1, keepdim=True) / pre[name].norm(dim=-1, keepdim=True)
            assert torch.allclose(pre[name] * scale, other[name], rtol=1e-5, atol=1e-8), name
            assert start == "gpt2" or placement in GAINS or torch.equal(pre[name], other[name]), name
        assert placement != "post" or pre.keys() - other.keys() == {"final_norm.weight", "final_norm.bias"}


def stds_of(block, d):
    """The standard deviations of the matrices of a block: queries and keys, values, out, up, down."""
    queries_and_keys, values = block.attn.qkv.weight.split([2 * d, d])
    matrices = queries_and_keys, values, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight
    return [weight.std().item() for weight in matrices]


L, D = 6, 128
GAINS = {"deepnorm": (8 * L) ** -0.25, "subln": math.log(2 * L) ** 0.5}
GPT2 = (0.02, 0.02, 0.02 / (2 * L) ** 0.5, 0.02, 0.02 / (2 * L) ** 0.5)
PLAIN = (0.02,) * 5
FAN_IN = tuple(n**-0.5 for n in (D, D, D, D, 4 * D))
XAVIER = tuple((2 / n) ** 0.5 for n in (2 * D, 2 * D, 2 * D, 5 * D, 5 * D))
OWN = dict.fromkeys(BLOCKS, PLAIN) | dict.fromkeys(
    ["pre", "peri", "none", "neox", "hybrid", "keel", "gpas", "hyper", "mhc"], GPT2
)
OWN |= dict.fromkeys(["rezero", "deepnorm", "subln"], XAVIER)
OWN["parallel"] = tuple(std * factor for std, factor in zip(FAN_IN, (1, 1, 2 / L, 1, 2 / L)))


@pytest.mark.parametrize("placement", BLOCKS)
def test_how_a_placement_starts(placement):
    """By itself as its source says, or as GPT-2; at the common start matrices N(0, 1/fan_in) and embeddings N(0, 1)."""
    gain = GAINS.get(placement, 1.0)
    for start, stds, embedding in (("gpt2", OWN[placement], 0.02), ("fan_in", FAN_IN, 1.0)):
        factors = {None: None, "plain": 1.0, "gpt2": (2 * L) ** -0.5, "gptj": 2 / L, "zero": 0.0}
        for branch_init, factor in factors.items():
            if (placement, branch_init) == ("rezero", "zero"):
                continue
            model = GPT(ModelConfig(norm=placement, n_layers=L, d_model=D, start=start, branch_init=branch_init))
            expected = [std * factor for std, factor in zip(stds, (1, gain, gain, gain, gain))]
            if factor is not None:
                base = {GPT2: PLAIN, OWN["parallel"]: FAN_IN}.get(stds, stds)
                expected = [std * by for std, by in zip(base, (1, gain, gain * factor, gain, gain * factor))]
            assert stds_of(model.blocks[L - 1], D) == pytest.approx(expected, rel=0.02)
            for table in (model.token_embedding, model.position_embedding):
                assert table.weight.std().item() == pytest.approx(embedding, rel=0.02)
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "bias")):
                    assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("norm.weight"))))


def test_the_scales_that_layerscale_starts_from():
    """The table of arXiv 2103.17239: smaller for deeper models."""
    for n_layers, scale in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        block = BLOCKS["layerscale"](ModelConfig(n_layers=n_layers, d_model=4), 1)
        assert torch.equal(block.mlp_scale, torch.full((4,), scale))


@torch.no_grad()
def test_hyper_connections_start_as_pre_ln():
    """Each lane is its stream, and the final norm undoes that the head reads four of them."""
    logits = []
    for placement in ("pre", "hyper"):
        torch.manual_seed(0)
        logits.append(GPT(ModelConfig(**TOY, norm=placement, start="fan_in", norm_eps=1e-12)).double()(toy_tokens()))
    assert torch.allclose(*logits, atol=1e-10) and logits[0].std() > 0.1


def test_rezero_refuses_branches_that_start_at_zero():
    """No gradient would ever reach a branch or its number."""
    with pytest.raises(Mistake, match=r"\(branch_init zero\).*--branch-init"):
        GPT(ModelConfig(**TOY, norm="rezero", branch_init="zero"))


@torch.no_grad()
@pytest.mark.parametrize("placement", ["pre", "peri", "hyper", "mhc", "resi_dual"])
def test_autocast_does_not_round_the_stream(placement):
    block = BLOCKS[placement](ModelConfig(**TOY, branch_init="zero"), 1)
    x = block.open(torch.randn(2, 5, 32))
    y = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(block(x), y, atol=1e-6)


@torch.no_grad()
def test_how_the_weights_of_lanes_start():
    """Each sublayer reads the next lane, and all lanes get its output as it is; on the manifold about so."""
    for placement in ("hyper", "mhc"):
        for layer, (attn, mlp) in {1: (0, 1), 2: (2, 3), 3: (0, 1)}.items():
            block = BLOCKS[placement](ModelConfig(**TOY), layer)
            assert (block.attn_read.argmax().item(), block.mlp_read.argmax().item()) == (attn, mlp)
            assert torch.equal(block.attn_write, torch.ones(4)) and torch.equal(block.mlp_write, torch.ones(4))
            assert block.mlp_mix.view(4, 4).argmax(0).tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_on_the_manifold_mixing_keeps_the_mean_of_the_lanes():
    block = BLOCKS["mhc"](ModelConfig(**TOY), 1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    m = block.mlp_mix.view(4, 4)
    assert torch.allclose(m.sum(0), torch.ones(4), atol=1e-3) and torch.allclose(m.sum(1), torch.ones(4))
    assert (m > 0).all()
    assert (block.mlp_read > 0).all() and (block.mlp_read < 1).all() and 1 < block.mlp_write.max() < 2
    torch.nn.init.zeros_(block.mlp.down.weight), torch.nn.init.zeros_(block.mlp.down.bias)
    torch.nn.init.zeros_(block.attn.out.weight), torch.nn.init.zeros_(block.attn.out.bias)
    x = torch.randn(2, 5, 4, 32)
    assert torch.allclose(block(x).mean(2), x.mean(2), atol=1e-3) and not torch.allclose(block(x), x, atol=0.1)


@torch.no_grad()
def test_resi_dual_is_post_ln_and_the_norm_of_all_branches():
    model = toy_model(norm="resi_dual").double()
    x, s = model.residual_stream(toy_tokens()).unbind(2)
    expected = (x + model.final_norm(s)) * model.head_scale
    assert torch.allclose(model.hidden(model.residual_stream(toy_tokens())), expected)
    post = GPT(dataclasses.replace(model.config, norm="post")).double()
    post.load_state_dict(model.state_dict(), strict=False)
    assert torch.allclose(post.residual_stream(toy_tokens()), x)


def test_deepnorms_constants():
    for n_layers in (1, 3, 12, 100):
        block = BLOCKS["deepnorm"](ModelConfig(n_layers=n_layers, d_model=4), 1)
        assert block.a * block.gain(n_layers) == pytest.approx(0.5**0.5)
    block = BLOCKS["deepnorm"](ModelConfig(n_layers=12), 1)
    assert (block.a, block.gain(12)) == pytest.approx((2.21336, 0.31947), abs=1e-5)


def test_mix_of_twelve_blocks_is_three_post_and_nine_pre():
    names = [type(block).__name__ for block in GPT(ModelConfig(norm="mix", n_layers=12)).blocks]
    assert names == ["PostLN"] * 3 + ["PreLN"] * 9
    for n_layers in (1, 2, 3):  # never silently pre
        assert type(BLOCKS["mix"](ModelConfig(n_layers=n_layers), 1)).__name__ == "PostLN"


def test_a_placement_is_one_class_below_block():
    for make in BLOCKS.values():
        block = make(ModelConfig(), 1)
        ours = [each for each in type(block).__mro__ if each.__module__.startswith("gpt.")]
        assert len(ours) == 2 and ours[1] is Block and [*inspect.signature(block.forward).parameters] == ["x"]
    assert "forward" not in vars(Block)


def test_a_weight_that_a_block_forgets_to_start_is_noticed():
    """It would be memory that something else has left, and another for each run."""
    assert Linear(3, 3).weight.isnan().all()
    for placement in BLOCKS:
        assert all(parameter.isfinite().all() for parameter in GPT(ModelConfig(norm=placement)).parameters())
