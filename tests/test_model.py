import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import toy_model, toy_tokens

from gpt import BLOCKS, GPT, ModelConfig
from gpt import loss as losses
from gpt.layers import Attention
from gpt.loss import HeadLoss, NextToken, next_token_loss


@pytest.mark.parametrize("norm", BLOCKS)
def test_logits_of_every_position(norm):
    logits = toy_model(norm=norm)(toy_tokens(3, 7))
    assert logits.shape == (3, 7, 61) and logits.isfinite().all()


@pytest.mark.parametrize("norm", BLOCKS)
def test_the_loss_starts_at_that_of_a_uniform_guess(norm):
    model = GPT(ModelConfig(norm=norm, vocab_size=1000, n_layers=6, context_length=64))
    tokens = toy_tokens(4, 65, 1000)
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(1000), rel=0.05)


@pytest.mark.parametrize("norm", BLOCKS)
def test_the_future_does_not_leak(norm):
    """The gradient of the logits at position t with respect to the embeddings after t is zero, and before is not."""
    model, t = toy_model(norm=norm), 7
    tokens = torch.arange(16)[None]  # all different, so that a row of the table is a position
    model(tokens)[0, t].sum().backward()
    through_tokens = model.position_embedding.weight.grad.abs().sum(-1)
    assert (through_tokens[: t + 1] > 0).all() and (through_tokens[t + 1 :] == 0).all()


@pytest.mark.parametrize("norm", BLOCKS)
def test_one_batch_is_learnt_by_heart(norm):
    model = GPT(ModelConfig(norm=norm, vocab_size=61, n_layers=2, n_heads=2, d_model=32, context_length=16))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-2), toy_tokens(2)
    for _ in range(120):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_attention_is_softmax_of_scaled_products_over_the_past():
    attention = toy_model().blocks[0].attn.double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.view(2, 9, 2, 16).transpose(1, 2) for part in attention.qkv(x).split(32, dim=-1))
    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 32))
    assert torch.allclose(attention(x), expected, atol=1e-12)
    ours, plain = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (attention(x), expected))
    assert torch.allclose(ours, plain, atol=1e-10)


def test_gelu_is_the_tanh_form_of_gpt2():
    x = torch.linspace(-4, 4, 99, dtype=torch.float64)
    tanh_form = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    activation = toy_model().blocks[0].mlp.activation
    assert torch.allclose(activation(x), tanh_form, atol=1e-12) and not torch.allclose(F.gelu(x), tanh_form, atol=1e-6)


def test_the_head_is_the_token_embedding():
    model, tokens = toy_model(), toy_tokens()
    assert not any("head" in name for name, _ in model.named_parameters())
    x = model.final_norm(model.residual_stream(tokens))
    assert torch.allclose(model(tokens), x @ model.token_embedding.weight.T)


def test_the_loss_is_the_mean_over_tokens_in_float32():
    logits, targets = torch.randn(2, 5, 61), toy_tokens(2, 5)
    expected = -torch.stack([logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(5)]).mean()
    assert torch.allclose(next_token_loss(logits, targets), expected)
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


def test_same_seed_same_bits():
    first, second = ([p.clone() for p in toy_model(seed=5).parameters()] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_cache_is_absent_unless_someone_sets_it():
    assert all(module.cache is None for module in toy_model().modules() if isinstance(module, Attention))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"norm": "prre"}, r"unknown norm \(prre\)\. Did you mean pre"),
        ({"norm": "batch"}, r"unknown norm \(batch\)\. Known: pre, post, peri"),
        ({"norm_layer": "layer_norm"}, r"unknown norm_layer \(layer_norm\)\. Did you mean layernorm"),
        ({"branch_init": "gpt"}, r"unknown branch_init \(gpt\)\. Did you mean gpt2\?"),
        ({"activation": "gelu_tan"}, r"Did you mean gelu_tanh"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(settings, message):
    with pytest.raises(ValueError, match=message):
        toy_model(**settings)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match=r"too many tokens \(17\)\. The context length is 16"):
        toy_model()(toy_tokens(1, 17))
    with pytest.raises(ValueError, match="unknown kind of parameters"):
        toy_model().count_parameters("norms")


@pytest.mark.parametrize("norm", BLOCKS)
def test_fused_attention_is_the_plain_one(norm):
    """What torch chooses, and the formula written out, forward and backward."""
    found = []
    for backends in ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH]):
        model, tokens = toy_model(norm=norm), toy_tokens(length=17)
        with sdpa_kernel(backends):
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("norm", BLOCKS)
@pytest.mark.parametrize("logits, multiple", [(2**24, 1), (61 * 5, 1), (1, 1), (61 * 5, 64)])
def test_the_loss_without_all_logits_is_that_of_the_logits(monkeypatch, norm, logits, multiple):
    """With its gradients, for some tokens at a time, and with ids added that do not exist."""
    monkeypatch.setattr(losses, "LOGITS", logits)
    apply = HeadLoss.apply
    monkeypatch.setattr(HeadLoss, "apply", lambda *arguments: apply(*arguments[:-1], multiple))
    model, tokens = toy_model(norm=norm), toy_tokens(3, 17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    found = []
    for loss in (next_token_loss(model(inputs), targets), NextToken(model)(tokens)):
        (3 * loss).backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
        model.zero_grad(set_to_none=True)
    (one, gradients), (other, others) = found
    assert one == pytest.approx(other, abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, others))
    with torch.no_grad():
        assert NextToken(model)(tokens).item() == other


def test_the_loss_without_all_logits_follows_autocast():
    model, tokens = toy_model(), toy_tokens(3, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss = NextToken(model)(tokens)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_the_loss_has_the_derivative_it_says():
    torch.manual_seed(0)
    x, embedding = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    targets = torch.randint(7, (2, 3))
    x, embedding = x.requires_grad_(), embedding.requires_grad_()
    loss = HeadLoss.apply(x, embedding, targets, True, 1)
    exact = torch.autograd.grad(next_token_loss(x @ embedding.T, targets), (x, embedding))
    for one, other in zip(torch.autograd.grad(loss, (x, embedding)), exact):
        assert torch.allclose(one, other, atol=1e-6)
