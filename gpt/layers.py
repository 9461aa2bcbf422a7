"""The two branches of a block. Shapes: B batch, T tokens, C channels (d_model), H heads, D = C / H."""

import torch
import torch.nn.functional as F
from torch import nn

from gpt.config import ModelConfig, lookup

ACTIVATIONS = {"gelu_tanh": lambda: nn.GELU(approximate="tanh"), "gelu": nn.GELU, "relu": nn.ReLU}


def draw(weight: torch.Tensor, std: float):
    """Start a matrix from N(0, std^2), in place. The meta device is left out: torch would import its compiler (1 s)."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """torch's, but its bias starts at 0, and its weights are left to the block, so that they are drawn once. Until then
    they are NaN: a weight that a block forgets ends the first step."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            nn.init.constant_(self.weight, float("nan"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """torch's, but it starts from N(0, std^2)."""

    def __init__(self, count: int, width: int, std: float):
        self.std = std
        super().__init__(count, width)

    def reset_parameters(self):
        draw(self.weight, self.std)


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, C) -> (B, T, C). A block may put norms in the places of q_norm, k_norm,
    v_norm, which act on (B, H, T, D), and inner_norm, on (B, T, C).

    `cache` is None, or an object whose `append(k, v)` takes the (B, H, T, D) keys and values of these T tokens and
    returns those of all tokens so far. gpt/generate.py sets it; no other part of the model uses it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.q_norm, self.k_norm, self.v_norm, self.inner_norm = (nn.Identity() for _ in range(4))
        self.cache = None

    def forward(self, x):
        B, T, C = x.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(B, T, self.n_heads, C // self.n_heads).transpose(1, 2) for part in self.qkv(x).split(C, dim=-1)
        )
        q_BHTD, k_BHTD, v_BHTD = self.q_norm(q_BHTD), self.k_norm(k_BHTD), self.v_norm(v_BHTD)
        mask, dtype = None, q_BHTD.dtype
        if self.cache is not None:
            k_BHTD, v_BHTD = self.cache.append(k_BHTD, v_BHTD)
            q_BHTD = q_BHTD.to(k_BHTD.dtype)
            past = k_BHTD.size(2) - T
            if past and T > 1:  # is_causal aligns the first query with the first key, so it would hide the past
                mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask, is_causal=mask is None and T > 1)
        y = y_BHTD.transpose(1, 2).reshape(B, T, C).to(dtype)
        return self.dropout(self.out(self.inner_norm(y)))


class MLP(nn.Module):
    """Two linear layers with an activation between, four times as wide inside, (B, T, C) -> (B, T, C). A block may put
    a norm in the place of inner_norm, on (B, T, 4 C)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = Linear(config.d_model, 4 * config.d_model, bias=config.bias)
        self.activation = lookup(ACTIVATIONS, config.activation, "activation")()
        self.inner_norm = nn.Identity()
        self.down = Linear(4 * config.d_model, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.inner_norm(self.activation(self.up(x)))))
