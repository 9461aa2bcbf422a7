"""The model as a function of tokens: what it is made of, what it sees, what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from toys import TOY, toy_model, toy_tokens

from gpt import BLOCKS, GPT, ModelConfig
from gpt.config import Mistake
from gpt.loss import next_token_loss


@pytest.mark.parametrize("placement", BLOCKS)
def test_logits_of_every_position(placement):
    logits = toy_model(norm=placement)(toy_tokens(3, 7))
    assert logits.shape == (3, 7, 61) and logits.isfinite().all()


@pytest.mark.parametrize("placement", BLOCKS)
def test_the_loss_starts_at_that_of_a_uniform_guess(placement):
    model = GPT(ModelConfig(norm=placement, vocab_size=1000, n_layers=6, context_length=64))
    tokens = toy_tokens(4, 65, 1000)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(1000), rel=0.05)


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


def test_the_head_is_the_token_embedding():
    model, tokens = toy_model(), toy_tokens()
    assert not any("head" in name for name, _ in model.named_parameters())
    x = model.hidden(model.residual_stream(tokens))
    assert torch.allclose(model(tokens), x @ model.token_embedding.weight.T)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_attention_is_softmax_of_scaled_products_over_the_past(dtype, tolerance):
    """Values and gradients, as with every product written out."""
    attention = toy_model().blocks[0].attn.to(dtype)
    x = torch.randn(2, 9, 32, dtype=dtype, requires_grad=True)
    q, k, v = (part.view(2, 9, 2, 16).transpose(1, 2) for part in attention.qkv(x).split(32, dim=-1))
    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 32))
    assert torch.allclose(attention(x), expected, atol=tolerance)
    leaves = [x, *attention.parameters()]
    ours, plain = (torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (attention(x), expected))
    for gradient, other in zip(ours, plain):
        assert torch.allclose(gradient, other, atol=tolerance * other.abs().max().item())


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
