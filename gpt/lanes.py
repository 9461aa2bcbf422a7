"""Placements whose stream has several lanes, (B, T, lanes, C): the first block opens them, the last one closes them."""

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from gpt.block import Block
from gpt.config import ModelConfig


class ResiDual(Block):
    """Two lanes, both the embedding at first: post-LN, x <- norm(x + y), y = f(x), and the sum of all branches without
    a norm, s <- s + y. The head reads x + norm(s) (Xie et al. 2023, arXiv 2304.14802, with Xavier's start)."""

    branch_init = "plain"
    wants_warmup = True
    norm_on_stream = True

    def open(self, x):
        return torch.stack((x, x), dim=2)

    def forward(self, x):
        x, s = x.unbind(2)
        for f, norm in ((self.attn, self.attn_norm), (self.mlp, self.mlp_norm)):
            y = f(x)
            x, s = norm(x + y), s + y
        return torch.stack((x, s), dim=2)

    def measured(self, x):
        return x[:, :, 0]  # what the branches read

    def close(self, x, final_norm):
        x, s = x.unbind(2)
        return x + final_norm(s)


class HyperConnections(Block):
    """Four lanes h_i, all the embedding at first. A branch reads a mix of them, x = sum_i r_i h_i, and writes into all:
    h_i <- sum_j m_ij h_j + w_i f(norm(x)). The head reads the norm of their sum (Zhu et al. 2024, arXiv 2409.19606, the
    static form). r, m and w are learned. At the start each sublayer reads the next lane, m is the unit matrix and w is
    1, so that the model is pre-LN. (Theirs starts the branches' last matrices sqrt(4) times smaller.)"""

    lanes = 4

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        for role, sublayer in (("attn", 2 * layer - 2), ("mlp", 2 * layer - 1)):
            # Vectors, so that they are not taken for matrices of a branch: these decay, and are trained by Muon.
            unit = torch.eye(self.lanes)
            starts = {"read": unit[sublayer % self.lanes].clone(), "mix": unit.flatten(), "write": unit.sum(0)}
            for name, start in starts.items():
                setattr(self, f"{role}_{name}", nn.Parameter(start))

    def open(self, x):
        return x.unsqueeze(2).repeat(1, 1, self.lanes, 1)

    def forward(self, x):
        y = self.attn(self.attn_norm(summed(x, self.attn_read)))
        x = mixed(x, self.attn_mix) + written(y, self.attn_write)
        y = self.mlp(self.mlp_norm(summed(x, self.mlp_read)))
        return mixed(x, self.mlp_mix) + written(y, self.mlp_write)

    def measured(self, x):
        return x.mean(2)

    def close(self, x, final_norm):
        return final_norm(x.sum(2))


def summed(x, r):
    """Lanes (B, T, n, C) and weights (n,) -> their weighted sum, (B, T, C)."""
    with torch.autocast(x.device.type, enabled=False):  # which would round the stream to half precision
        return torch.einsum("n,btnc->btc", r, x)


def mixed(x, m):
    """Lanes (B, T, n, C) and weights (n * n,) -> n weighted sums of them."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("mn,btnc->btmc", m.view(x.size(2), -1), x)


def written(y, w):
    """A branch's output (B, T, C) and weights (n,) -> what each lane gets of it, (B, T, n, C)."""
    return y.unsqueeze(2) * w[:, None]


class Sigmoid(nn.Module):
    """Learned numbers -> numbers from 0 to `most`."""

    def __init__(self, most: float):
        super().__init__()
        self.most = most

    def forward(self, w):
        return self.most * w.sigmoid()


class DoublyStochastic(nn.Module):
    """Learned numbers (n * n,) -> a matrix of positive numbers, flattened, in which each row and each column adds up to
    1: exp, then all columns and all rows are divided by their sums, 20 times (Sinkhorn and Knopp 1967)."""

    def forward(self, w):
        logits = w.view(round(w.numel() ** 0.5), -1)
        for _ in range(20):
            logits = logits - logits.logsumexp(0, keepdim=True)
            logits = logits - logits.logsumexp(1, keepdim=True)
        return logits.exp().flatten()


def mhc(config: ModelConfig, layer: int) -> Block:
    """Hyper-connections on a manifold: m is doubly stochastic, so that mixing leaves the mean of the lanes as it is, r
    is between 0 and 1, and w, which starts at 1, between 0 and 2 (Xie et al. 2025, arXiv 2512.24880, which leaves most
    starts open; here, too, the static form)."""
    block = HyperConnections(config, layer)
    for role in ("attn", "mlp"):
        nn.init.zeros_(block.get_parameter(f"{role}_write"))
        register_parametrization(block, f"{role}_read", Sigmoid(1.0))
        register_parametrization(block, f"{role}_mix", DoublyStochastic())
        register_parametrization(block, f"{role}_write", Sigmoid(2.0))
    return block
