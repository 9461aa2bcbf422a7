"""GPT: embed -> blocks -> final norm -> logits."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from gpt.blocks import BLOCKS, make_norm
from gpt.config import Mistake, ModelConfig, lookup, unknown
from gpt.layers import linear
from gpt.norms import NORMS


class GPT(nn.Module):
    """GPT-2 with the block that `config.norm` names (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners"). Maps (B, T) int64 tokens to (B, T, vocab_size) logits; or, with their (B, T) `targets`, to
    the mean loss, which takes less memory and time than `next_token_loss` of the logits.

    The head has no weight of its own: it reads the stream with the token embedding's.
    Raises Mistake for a name in the configuration that does not exist.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=0.02)
        block = lookup(BLOCKS, config.norm, "norm")
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(1, config.n_layers + 1))
        wanted = self.blocks[-1].needs_final_norm if config.final_norm is None else config.final_norm
        self.final_norm = make_norm(config) if wanted else nn.Identity()

    def forward(self, tokens, targets=None):
        x = self.residual_stream(tokens)
        if targets is None:
            return self.readout(x)
        multiple = 64 if x.is_cuda else 1  # of which tensor cores want the vocabulary to be
        embedding = self.token_embedding.weight
        return _HeadLoss.apply(self.final_norm(x), embedding, targets, torch.is_grad_enabled(), multiple)

    def residual_stream(self, tokens, start: int = 0):
        """(B, T) tokens, the first at position `start`, -> the (B, T, d_model) stream after the last block."""
        end = start + tokens.size(1)
        if end > self.config.context_length:
            raise Mistake(f"too many tokens ({end}). The context length is {self.config.context_length}.")
        x = self.token_embedding(tokens) + self.position_embedding.weight[start:end]
        for block in self.blocks:
            x = block(x)
        return x

    def readout(self, x):
        """The stream (B, T, d_model) -> logits (B, T, vocab_size)."""
        return linear(self.final_norm(x), self.token_embedding.weight)

    def count_parameters(self, kind: str = "all") -> int:
        """Numbers that are trained, in the whole model ("all") or in its normalization layers ("norm")."""
        if kind not in ("all", "norm"):
            raise Mistake(unknown("kind of parameters", kind, ("all", "norm")))
        modules = [self] if kind == "all" else [m for m in self.modules() if isinstance(m, tuple(NORMS.values()))]
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _NoStart(torch.overrides.TorchFunctionMode):
    """Within it torch.nn.init leaves tensors as they are."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return named["tensor"] if named else arguments[0]
        return function(*arguments, **(named or {}))


def shape_only(config: ModelConfig) -> GPT:
    """A GPT whose weights have no memory yet (torch's device "meta"), to be loaded with `assign=True`. That nothing is
    drawn for them saves a second: torch would import its compiler to draw nothing."""
    with torch.device("meta"), _NoStart():
        return GPT(config)


class _HeadLoss(torch.autograd.Function):
    """`next_token_loss` of the logits z = E x of all tokens, and its gradient, for some of the tokens at a time: the
    logits of GPT-2 are 65 times as large as the stream, and never all there. For one token with target t

        loss = log(sum of exp(z)) - z_t        dloss/dz = softmax(z) - onehot(t) = p
        dloss/dx = E^T p                       dloss/dE = p x^T

    so that one pass over the logits gives the loss and both gradients, which backward only scales.
    """

    LOGITS = 2**24  # at a time

    @staticmethod
    def forward(ctx, x, embedding, targets, with_gradient, multiple):
        V, C = embedding.shape
        targets = targets.flatten()
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else embedding.dtype
        x_NC, E = x.reshape(-1, C).to(dtype), embedding.to(dtype)
        if V % multiple:  # more ids, of probability 0
            E = F.pad(E, (0, 0, 0, -V % multiple))
        loss, dx, dE = 0.0, None, None
        if with_gradient:
            dx, dE = torch.empty_like(x_NC, dtype=x.dtype), torch.zeros_like(E, dtype=embedding.dtype)
        rows = max(1, _HeadLoss.LOGITS // V)
        for part in (slice(start, start + rows) for start in range(0, len(targets), rows)):
            t = targets[part, None]
            z = (x_NC[part] @ E.T).float()
            z[:, V:] = -torch.inf
            normalizer = z.logsumexp(-1, keepdim=True)
            loss += (normalizer - z.gather(-1, t)).sum()
            if with_gradient:
                p = z.sub_(normalizer).exp_().scatter_add_(-1, t, -torch.ones_like(normalizer)).to(dtype)
                dx[part] = p @ E
                if dtype == dE.dtype:
                    dE.addmm_(p.T, x_NC[part])
                else:
                    dE += p.T @ x_NC[part]
        if with_gradient:
            ctx.save_for_backward(dx.view(x.shape), dE[:V])
            ctx.scale = 1 / len(targets)
        return loss / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        dx, dE = ctx.saved_tensors
        scale = g * ctx.scale
        return dx.mul_(scale), dE.mul_(scale), None, None, None


def next_token_loss(logits, targets):
    """Mean cross-entropy in nats of (B, T, vocab_size) logits against (B, T) targets; float32 in any precision."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def mean_loss(model: GPT, windows, rank: int = 0, size: int = 1, total=lambda values: values) -> float:
    """`next_token_loss` over every target of the (B, T + 1) `windows` of tokens, in evaluation mode. Of `size`
    processes, number `rank` takes every size-th of the windows; `total` adds numbers up over all of them."""
    windows, loss, count = iter(windows), 0.0, 0
    training = model.training
    model.eval()
    while together := list(itertools.islice(windows, size)):
        # A process without a window does the last one too, uncounted: a sharded model wants all of them there.
        tokens = together[min(rank, len(together) - 1)].to(model.token_embedding.weight.device)
        targets = tokens[:, 1:]
        mean = model(tokens[:, :-1], targets).item()
        if rank < len(together):
            loss, count = loss + mean * targets.numel(), count + targets.numel()
    model.train(training)
    loss, count = total([loss, count])
    return loss / count
