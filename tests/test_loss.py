"""The loss in parts is the loss of all logits, with its gradients."""

import pytest
import torch
from toys import toy_model, toy_tokens

from gpt import BLOCKS
from gpt import loss as losses
from gpt.loss import HeadLoss, NextToken, next_token_loss


def test_the_loss_is_the_mean_over_tokens_in_float32():
    logits, targets = torch.randn(2, 5, 61), toy_tokens(2, 5)
    expected = -torch.stack([logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(5)]).mean()
    assert torch.allclose(next_token_loss(logits, targets), expected)
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


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
