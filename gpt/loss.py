"""The next-token loss, of logits or of a model. The second never holds all logits at once."""

import torch
import torch.nn.functional as F
from torch import nn

LOGITS = 2**24  # about as many exist at once


def next_token_loss(logits, targets):
    """Mean cross-entropy in nats of (B, T, vocab_size) logits against (B, T) targets, in float32 or, of float64 logits,
    float64. For second derivatives compute the logits within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(dtype).flatten(0, 1), targets.flatten())


class NextToken(nn.Module):
    """A GPT with its loss, the module that training wraps: (B, T + 1) int64 tokens -> `next_token_loss` of the logits
    for the first T tokens against the last T. It takes less memory and time than computing the logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        x = self.model.hidden(self.model.residual_stream(tokens[:, :-1]))
        multiple = 64 if x.is_cuda else 1  # tensor cores are fast for multiples of 64
        return HeadLoss.apply(x, self.model.token_embedding.weight, tokens[:, 1:], torch.is_grad_enabled(), multiple)


class HeadLoss(torch.autograd.Function):
    """`next_token_loss` of the logits z = E x, and its gradient, in chunks of tokens, so that all logits (65 times the
    stream, in GPT-2) never exist at once. For one token with target t

        loss = log(sum of exp(z)) - z_t        dloss/dz = softmax(z) - onehot(t) = p
        dloss/dx = E^T p                       dloss/dE = p x^T

    One pass over the logits gives the loss and both gradients; backward only scales them. The vocabulary is padded to
    a multiple of `multiple` with ids of probability 0. There is no second derivative, because x is not kept.
    """

    @staticmethod
    def forward(ctx, x, embedding, targets, with_gradient, multiple):
        V, C = embedding.shape
        targets = targets.flatten()
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedding.dtype
        x_NC, E = x.reshape(-1, C).to(dtype), embedding.to(dtype)
        if V % multiple:
            E = F.pad(E, (0, 0, 0, -V % multiple))
        loss, dx, dE = 0.0, None, None
        if with_gradient:
            sums = torch.float32 if dtype == torch.float16 else embedding.dtype
            dx, dE = torch.empty_like(x_NC, dtype=x.dtype), torch.zeros_like(E, dtype=sums)
        rows = max(1, LOGITS // V)
        for part in (slice(start, start + rows) for start in range(0, len(targets), rows)):
            t = targets[part, None]
            z = (x_NC[part] @ E.T).float()
            z[:, V:] = -torch.inf
            normalizer = z.logsumexp(-1, keepdim=True)
            loss += (normalizer - z.gather(-1, t)).sum()
            if with_gradient:
                p = z.sub_(normalizer).exp_().scatter_add_(-1, t, -torch.ones_like(normalizer)).to(dtype)
                dx[part] = p @ E
                if dtype == torch.float16:
                    # The sum over many tokens may exceed 65,504. As |p| <= 1, it cannot for x times `fit`.
                    fit = (2**15 / (len(t) * x_NC[part].abs().amax().float())).clamp(max=1)
                    dE += (p.T @ (x_NC[part] * fit)).float() / fit
                elif dtype == dE.dtype:
                    dE.addmm_(p.T, x_NC[part])
                else:
                    dE += p.T @ x_NC[part]
        if with_gradient:
            ctx.save_for_backward(dx.view(x.shape), dE[:V])
            ctx.scale = 1 / len(targets)
        return loss / len(targets)

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled():  # create_graph: what is saved would count as constant
            raise RuntimeError("NextToken has no second derivative. Use next_token_loss(model(tokens), targets).")
        dx, dE = ctx.saved_tensors
        scale = g * ctx.scale
        return dx.mul_(scale), dE.mul_(scale), None, None, None
