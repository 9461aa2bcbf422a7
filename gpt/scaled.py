"""Placements that scale: what a branch reads or gives, or the stream itself."""

import torch
import torch.nn.functional as F
from torch import nn

from gpt.block import Block
from gpt.config import Mistake, ModelConfig


class DeepNorm(Block):
    """norm(a x + f(x)), a = (2 n_layers)^(1/4). The matrices of the values, of attention's output and of the MLP start
    (8 n_layers)^(-1/4) times as large as Xavier's (Wang et al. 2022, arXiv 2203.00555, decoder-only)."""

    needs_final_norm = False
    norm_on_stream = True
    start = "xavier"
    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.a = (2 * config.n_layers) ** 0.25

    def gain(self, n_layers):
        return (8 * n_layers) ** -0.25

    def forward(self, x):
        x = self.attn_norm(self.a * x + self.attn(x))
        return self.mlp_norm(self.a * x + self.mlp(x))


class Keel(Block):
    """norm(a x + f(norm(x))), a = 2 n_layers, the number of sublayers (Chen and Wei 2026, arXiv 2601.19895). There the
    norms are RMSNorms: norm_layer="rmsnorm"."""

    norms = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
    needs_final_norm = False
    norm_on_stream = True

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.a = 2 * config.n_layers

    def forward(self, x):
        x = self.attn_out_norm(self.a * x + self.attn(self.attn_norm(x)))
        return self.mlp_out_norm(self.a * x + self.mlp(self.mlp_norm(x)))


class LNScaling(Block):
    """x + f(norm(x) / sqrt(l)) in block l = 1, 2, ...: deeper branches read a smaller input, and the stream grows less
    (Sun et al. 2025, arXiv 2502.05795). GPT-2's smaller start of the branches would undo the benefit."""

    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.g = layer**-0.5

    def forward(self, x):
        x = x + self.attn(self.g * self.attn_norm(x))
        return x + self.mlp(self.g * self.mlp_norm(x))


class DepthFactor(Block):
    """x + f(norm(x)) / n_layers: the branches of a model of any depth add up to as much (Dey et al. 2025, arXiv
    2505.01618, alpha = 1, base depth 1). CompleteP also sets rates, decay and eps by width and depth; this does not."""

    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.s = 1 / config.n_layers

    def forward(self, x):
        x = x + self.s * self.attn(self.attn_norm(x))
        return x + self.s * self.mlp(self.mlp_norm(x))


class Sandwich(Block):
    """x + s norm(f(norm(x))), s = n_layers^(-1/2): the depth-scaled sandwich (Yin et al. 2025, arXiv 2504.07866). There
    the gains of the outer norms start at s, times 0.28 for attention and 0.43 for the MLP, the matrices from
    N(0, 1/(2 d n_layers)), the embeddings from N(0, 1/4). Here s is a factor, so that norms without a gain will do."""

    norms = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.s = config.n_layers**-0.5

    def forward(self, x):
        x = x + self.s * self.attn_out_norm(self.attn(self.attn_norm(x)))
        return x + self.s * self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class ReZero(Block):
    """x + s f(x), s one learned number for each block that starts at 0 (Bachlechner et al. 2020, arXiv 2003.04887):
    every block starts as the identity. Its matrices start as Xavier's, as in their language model, whose embeddings
    start larger than GPT-2's. Raises Mistake for branch_init="zero"."""

    norms = ()
    needs_final_norm = False
    start = "xavier"
    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        if config.branch_init == "zero":
            raise Mistake("rezero would stay the identity for ever (branch_init zero). Leave --branch-init out.")
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x + self.s * self.attn(x)
        return x + self.s * self.mlp(x)


class LayerScale(Block):
    """x + s f(norm(x)), s a learned gain for each channel, 0.1 at the start, 1e-5 above 18 blocks and 1e-6 above 24
    (Touvron et al. 2021, arXiv 2103.17239)."""

    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        small = 0.1 if config.n_layers <= 18 else 1e-5 if config.n_layers <= 24 else 1e-6
        self.attn_scale, self.mlp_scale = (nn.Parameter(torch.full((config.d_model,), small)) for _ in range(2))

    def forward(self, x):
        x = x + self.attn_scale * self.attn(self.attn_norm(x))
        return x + self.mlp_scale * self.mlp(self.mlp_norm(x))


class GPAS(Block):
    """h - silu(s) stop(h), h = x + f(norm(x)), s one learned number for each block that starts at 0: the stream is
    scaled down, the gradient is not, since stop(h) is a constant for it (Chen et al. 2025, arXiv 2506.22049, whose
    embeddings start from N(0, 2/5))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        h = x + self.attn(self.attn_norm(x))
        x = h - F.silu(self.s) * h.detach()
        h = x + self.mlp(self.mlp_norm(x))
        return h - F.silu(self.s) * h.detach()
