"""The two branches of a block. Shapes: B batch, T tokens, C channels (d_model), H heads, D = C / H."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from gpt.config import ModelConfig, lookup

ACTIVATIONS = {"gelu_tanh": lambda: nn.GELU(approximate="tanh"), "gelu": nn.GELU, "relu": nn.ReLU}


FEW_ROWS = 2  # with four, bfloat16 on one core is slower than by a product of matrices


def linear(x, weight, bias=None):
    """F.linear: x W^T + b, (..., in) -> (..., out).

    Few rows of x and a W that is laid out by columns, as gpt/training/device.py does it for sampling, make each row's
    product a sum of W's columns, weighted by the row. That is what an embedding bag computes, and torch's reads memory
    twice as fast as the product of a matrix and a vector.
    """
    C = x.size(-1)
    N = x.numel() // C
    if weight.is_contiguous() or weight.device.type != "cpu" or not 1 <= N <= FEW_ROWS:
        return F.linear(x, weight, bias)
    columns, starts = _bags(N, C, torch.get_num_threads())
    y = F.embedding_bag(columns, weight.t(), starts, mode="sum", per_sample_weights=x.flatten())
    y = y.view(*x.shape[:-1], -1, len(weight)).sum(-2)
    return y if bias is None else y + bias


@functools.cache
@torch.inference_mode(False)  # since it is kept for those who want gradients, too
def _bags(rows: int, width: int, threads: int):
    """All columns for each row, and where each thread's part of a row's sum starts."""
    parts = torch.arange(0, width, -(-width * rows // max(rows, threads)))
    return torch.arange(width).repeat(rows), (torch.arange(rows)[:, None] * width + parts).flatten()


class Linear(nn.Linear):
    """torch's, by the `linear` above."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, C) -> (B, T, C).

    `cache` is None, or an object whose `append(k, v)` takes the (B, H, T, D) keys and values of these T tokens and
    returns those of all tokens so far. gpt/generate.py sets it; nothing else in the model knows of it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.cache = None

    def forward(self, x):
        B, T, C = x.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(B, T, self.n_heads, C // self.n_heads).transpose(1, 2) for part in self.qkv(x).split(C, dim=-1)
        )
        mask, dtype = None, q_BHTD.dtype
        if self.cache is not None:
            k_BHTD, v_BHTD = self.cache.append(k_BHTD, v_BHTD)
            q_BHTD = q_BHTD.to(k_BHTD.dtype)
            past = k_BHTD.size(2) - T
            if past and T > 1:  # is_causal counts from the upper left corner, so it would hide the past
                mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask, is_causal=mask is None and T > 1)
        return self.dropout(self.out(y_BHTD.transpose(1, 2).reshape(B, T, C).to(dtype)))


class MLP(nn.Module):
    """Two linear layers with an activation between, four times as wide inside, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = Linear(config.d_model, 4 * config.d_model, bias=config.bias)
        self.activation = lookup(ACTIVATIONS, config.activation, "activation")()
        self.down = Linear(4 * config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.activation(self.up(x))))
