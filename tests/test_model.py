"""The model as a function of tokens: what it is made of, what it sees, what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from toys import TOY, toy_model, toy_tokens

from gpt import BLOCKS, GPT, NORMS, ModelConfig
from gpt.config import Mistake
from gpt.loss import next_token_loss


@pytest.mark.parametrize("placement", BLOCKS)
def test_logits_of_every_position(placement):
    logits = toy_model(norm=placement)(toy_tokens(3, 7))
    assert logits.shape == (3, 7, 61) and logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("placement", BLOCKS)
def test_the_loss_starts_at_that_of_a_uniform_guess(placement):
    """At the common start not without norms: nothing bounds a stream that every block enlarges, and the head reads it
    as it is."""
    tokens = toy_tokens(4, 65, 1000)
    for start in ("gpt2", "fan_in"):
        model = GPT(ModelConfig(norm=placement, vocab_size=1000, n_layers=6, context_length=64, start=start))
        stream = model.residual_stream(tokens[:, :-1])
        loss = next_token_loss(model.readout(stream), tokens[:, 1:]).item()
        if (placement, start) == ("none", "fan_in"):
            assert stream.std() > 10 and loss > 1.2 * math.log(1000)
        else:
            assert loss == pytest.approx(math.log(1000), rel=0.05)


@pytest.mark.parametrize("placement", BLOCKS)
def test_the_future_does_not_leak(placement):
    """The gradient of the logits at position t with respect to the embeddings after t is zero, and before is not."""
    model, t = toy_model(norm=placement), 7
    tokens = torch.arange(16)[None]  # all different, so that a row of the table is a position
    model(tokens)[0, t].sum().backward()
    through_tokens = model.position_embedding.weight.grad.abs().sum(-1)
    assert (through_tokens[: t + 1] > 0).all() and (through_tokens[t + 1 :] == 0).all()


@pytest.mark.parametrize("placement", BLOCKS)
def test_one_batch_is_learnt_by_heart(placement):
    model = GPT(ModelConfig(**TOY, norm=placement, vocab_size=61))
    optimizer, tokens, loss = torch.optim.AdamW(model.parameters(), lr=2e-2), toy_tokens(2), math.inf
    for _ in range(120):
        if loss < 0.5:
            break
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss < 0.5


def test_the_stream_starts_as_the_sum_of_both_embeddings():
    model, tokens = toy_model(norm="rezero"), toy_tokens(3, 7)
    for block in model.blocks:
        block.s.data.zero_()  # without branches
    expected = model.token_embedding.weight[tokens] + model.position_embedding.weight[:7]
    assert torch.equal(model.residual_stream(tokens), expected)
    later = model.token_embedding.weight[tokens] + model.position_embedding.weight[4:11]
    assert torch.equal(model.residual_stream(tokens, start=4), later)


@torch.no_grad()
@pytest.mark.parametrize("norm_layer", NORMS)
def test_norms_that_keep_a_small_stream_small_have_a_learned_scale_before_them(norm_layer):
    """It multiplies the token embeddings, which start 1 / sqrt(d_model) times as large at GPT-2's start. The control
    without norms has none."""
    assert GPT(ModelConfig(**TOY, norm="none", norm_layer=norm_layer)).embedding_scale is None
    for start, scale in (("gpt2", 32**0.5), ("fan_in", 1.0)):
        model, tokens = GPT(ModelConfig(**TOY, norm_layer=norm_layer, start=start)), toy_tokens(3, 7)
        assert ("embedding_scale" in dict(model.named_parameters())) == (norm_layer in ("dyt", "derf"))
        if model.embedding_scale is not None:
            assert model.embedding_scale.item() == pytest.approx(scale)
            model.embedding_scale.fill_(3)
        for block in model.blocks:
            block.attn.out.weight.zero_(), block.mlp.down.weight.zero_()
        factor = 1 if model.embedding_scale is None else 3
        expected = factor * model.token_embedding.weight[tokens] + model.position_embedding.weight[:7]
        assert torch.allclose(model.residual_stream(tokens), expected)


def test_the_head_is_the_token_embedding():
    model, tokens = toy_model(), toy_tokens()
    assert not any("head" in name for name, _ in model.named_parameters())
    x = model.hidden(model.residual_stream(tokens))
    assert torch.allclose(model(tokens), x @ model.token_embedding.weight.T)


# Placements and settings, with the names of the norms in their last block's branches.
WITHIN = [({}, ""), ({"qk_norm": True}, "q k"), ({"norm": "hybrid"}, "q k v"), ({"norm": "subln"}, "inner")]
WITHIN += [({"norm": "subln", "qk_norm": True, "bias": False}, "q k inner"), ({"norm": "olmo2"}, "q k")]


@pytest.mark.parametrize("settings, names", WITHIN, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_attention_is_softmax_of_scaled_products_over_the_past(dtype, tolerance, settings, names):
    """Values and gradients, as with every product written out. Queries, keys and values are normed per head."""
    attention = toy_model(**settings).blocks[1].attn.to(dtype)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    weights = dict(attention.named_parameters())
    assert {name for name in weights if "norm" in name} == {
        f"{name}_norm.{role}"
        for name in names.split()
        for role in ("weight", "bias")
        if role == "weight" or (name == "inner" and settings.get("bias", True))
    }

    def normed(name, x):
        parameters = [weights.get(f"{name}_norm.{role}") for role in ("weight", "bias")]
        return F.layer_norm(x, x.shape[-1:], *parameters) if name in names.split() else x

    x = torch.randn(2, 9, 32, dtype=dtype, requires_grad=True)
    parts = (part.view(2, 9, 2, 16).transpose(1, 2) for part in attention.qkv(x).split(32, dim=-1))
    q, k, v = (normed(name, part) for name, part in zip("qkv", parts))
    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    expected = attention.out(normed("inner", (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 32)))
    assert torch.allclose(attention(x), expected, atol=tolerance)
    leaves = [x, *attention.parameters()]
    ours, plain = (torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (attention(x), expected))
    for gradient, other in zip(ours, plain):
        assert torch.allclose(gradient, other, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("placement", BLOCKS)
def test_the_mlp_is_two_matrices_around_an_activation(placement):
    """And in subln a norm, as wide as the MLP inside."""
    mlp, x = toy_model(norm=placement).blocks[1].mlp.double(), torch.randn(2, 9, 32, dtype=torch.float64)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    inside = F.gelu(mlp.up(x), approximate="tanh")
    if placement == "subln":
        inside = F.layer_norm(inside, (128,), mlp.inner_norm.weight, mlp.inner_norm.bias)
    assert torch.allclose(mlp(x), mlp.down(inside))


def change(part, **settings) -> float:
    """The largest change of a toy model's logits where a part of its last block's weights is three times as large."""
    with torch.no_grad():
        model, tokens = toy_model(norm_eps=1e-12, **settings).double(), toy_tokens()
        before, block = model(tokens), model.blocks[-1]
        parts = dict(zip("qkv", block.attn.qkv.weight.split(32))) | {"up": block.mlp.up.weight}
        parts[part] *= 3
        return (model(tokens) - before).abs().max().item()


@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("placement", BLOCKS)
def test_with_norms_of_queries_and_keys_their_size_does_not_matter(placement, part):
    assert change(part, norm=placement, qk_norm=True) < 1e-9
    assert (change(part, norm=placement) < 1e-9) == (placement in ("hybrid", "olmo2"))
    if placement == "hybrid":  # its equation has them
        with pytest.raises(Mistake, match=r"\(qk_norm False\).*--no-qk-norm"):
            change(part, norm=placement, qk_norm=False)
    else:
        assert change(part, norm=placement, qk_norm=False) > 1e-9


@pytest.mark.parametrize("part, within", [("v", {"hybrid", "subln"}), ("up", {"subln"})])
def test_what_a_norm_in_or_after_a_branch_reads_may_have_any_size(part, within):
    """A relu's output is three times as large where its input is."""
    sizes = {placement: change(part, norm=placement, activation="relu") for placement in BLOCKS}
    after = {"peri", "reordered", "olmo2", "sandwich"}
    assert {placement for placement, size in sizes.items() if size < 1e-9} == within | after, sizes


class Past:
    """A cache, as attention asks for one: it joins the keys and values of all calls."""

    def __init__(self):
        self.calls = []

    def append(self, k, v):
        self.calls.append((k, v))
        return (torch.cat(tensors, dim=2) for tensors in zip(*self.calls))


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(5, 2, 2), (1, 8), (2, 1, 1, 5)])
def test_attention_behind_a_cached_past_is_that_of_one_pass(chunks):
    """Each token sees the whole past and, of the tokens that come with it, those before it."""
    attention, x = toy_model().blocks[0].attn, torch.randn(2, 9, 32)
    expected = attention(x)
    attention.cache = Past()
    assert torch.allclose(torch.cat([attention(part) for part in x.split(chunks, dim=1)], dim=1), expected, atol=1e-5)


def test_gelu_is_the_tanh_form_of_gpt2():
    x = torch.linspace(-4, 4, 99, dtype=torch.float64)
    tanh_form = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    activation = toy_model().blocks[0].mlp.activation
    assert torch.allclose(activation(x), tanh_form, atol=1e-12) and not torch.allclose(F.gelu(x), tanh_form, atol=1e-6)


def test_same_seed_same_bits():
    first, second = ([p.clone() for p in toy_model(seed=5).parameters()] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("norm", "prre", "pre"),
        ("norm", "batch", "pre, post, peri"),
        ("norm_layer", "layer_norm", "layernorm"),
        ("branch_init", "gpt", "gpt2"),
        ("activation", "gelu_tan", "gelu_tanh"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, value, remedy):
    with pytest.raises(Mistake, match=rf"\({value}\).*\b{remedy}\b"):
        toy_model(**{name: value})


def test_more_tokens_than_the_context_are_refused():
    for tokens, start in ((toy_tokens(1, 17), 0), (toy_tokens(1, 3), 14)):
        with pytest.raises(Mistake, match=r"\(17\).* 16\b"):
            toy_model().residual_stream(tokens, start)


def test_parameters_of_an_unknown_part_are_refused():
    with pytest.raises(Mistake, match=r"\(norms\).*\bnorm\b"):
        toy_model().count_parameters("norms")
