"""The loss in parts is the loss of all logits, with its gradients."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import PAIRS, toy_model, toy_tokens

from gpt import BLOCKS
from gpt import loss as losses
from gpt.loss import HeadLoss, NextToken, next_token_loss


def test_the_loss_is_the_mean_over_tokens_in_float32():
    logits, targets = torch.randn(2, 5, 61), toy_tokens(2, 5)
    expected = -torch.stack([logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(5)]).mean()
    assert torch.allclose(next_token_loss(logits, targets), expected)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        loss = next_token_loss(logits.to(dtype), targets)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(loss, expected.to(loss.dtype), atol=1e-2)


@pytest.mark.parametrize("placement", BLOCKS)
def test_a_model_with_its_loss_is_the_loss_of_its_logits(placement):
    """With its gradients in every parameter, and the same without gradients."""
    model, tokens = toy_model(norm=placement), toy_tokens(3, 17)
    values, gradients = [], []
    for loss in (next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]), NextToken(model)(tokens)):
        (3 * loss).backward()
        values.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients))
    with torch.no_grad():
        assert NextToken(model)(tokens).item() == values[1]


@pytest.mark.parametrize("placement, norm_layer", [pair for pair in PAIRS if pair[0] != "gpas"])  # stops its gradient
def test_the_second_derivative_is_that_of_the_first(placement, norm_layer):
    """A product of the Hessian of the loss and a direction, in all parameters, beside the difference of gradients."""
    model = toy_model(norm=placement, norm_layer=norm_layer, d_model=8, vocab_size=7, context_length=4).double()
    tokens, parameters = toy_tokens(2, 5, vocab_size=7), list(model.parameters())
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def gradients(**settings):
        with sdpa_kernel(SDPBackend.MATH):
            logits = model(tokens[:, :-1])
        return torch.autograd.grad(next_token_loss(logits, tokens[:, 1:]), parameters, **settings)

    along = sum((one * other).sum() for one, other in zip(gradients(create_graph=True), direction))
    product = torch.autograd.grad(along, parameters)
    ends = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, way in zip(parameters, direction):
                parameter.add_(way, alpha=step)
        ends.append(gradients())
    for one, *two in zip(product, *ends):
        assert torch.allclose(one, (two[0] - two[1]) / 2e-5, rtol=1e-5, atol=1e-6 * one.norm().item() + 1e-8)


def test_the_loss_in_parts_refuses_a_second_derivative():
    """Also where it would leave a part of it out: what comes back to it does not depend on anything."""
    model, tokens = toy_model(norm="none"), toy_tokens(2, 9)
    for factor in (1.0, model.token_embedding.weight[0, 0]):
        with pytest.raises(RuntimeError, match="next_token_loss"):
            torch.autograd.grad(factor * NextToken(model)(tokens), list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_in_float16_no_sum_over_many_tokens_overflows(kind, scale):
    """4,096 equal targets and a channel of mean 64, with autocast or with weights that are in float16 themselves."""
    x, embedding, targets = torch.randn(1, 4096, 4), 1e-3 * torch.randn(7, 4), torch.full((1, 4096), 3)
    x[..., 1] += 64 * scale
    embedding[:, 1] = 0.0
    exact = x.double().requires_grad_(), embedding.double().requires_grad_()
    expected = torch.autograd.grad(next_token_loss(exact[0] @ exact[1].T, targets), exact)
    leaves = x.to(kind).requires_grad_(), embedding.to(kind).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = HeadLoss.apply(*leaves, targets, True, 1)
    for one, other, leaf in zip(torch.autograd.grad(loss, leaves), expected, leaves):
        tolerance = 0.003 if kind == torch.float32 else 0.3  # a small gradient has few digits in float16
        assert one.dtype == leaf.dtype and (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("logits", [2**24, 61 * 5, 1])
@pytest.mark.parametrize("multiple", [1, 64])
def test_neither_parts_nor_padding_change_the_loss(monkeypatch, logits, multiple):
    """`logits` of them at a time, and ids added that do not exist, up to a `multiple`."""
    monkeypatch.setattr(losses, "LOGITS", logits)
    x, embedding = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (61, 5)))
    leaves, targets = (x.requires_grad_(), embedding.requires_grad_()), toy_tokens(3, 4)
    loss, expected = HeadLoss.apply(*leaves, targets, True, multiple), next_token_loss(x @ embedding.T, targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("logits", [2**24, 61 * 5])
def test_it_follows_autocast(monkeypatch, logits):
    """Its products are in half precision, the loss and the gradients in float32."""
    monkeypatch.setattr(losses, "LOGITS", logits)
    model, tokens = toy_model(), toy_tokens(3, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss = NextToken(model)(tokens)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), abs=1e-5)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
        assert one.dtype == torch.float32 and (one - other).norm() <= 0.02 * other.norm()
