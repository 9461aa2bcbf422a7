"""The placements of the norms. A block is its equation: x is the residual stream, (B, T, C) in and out, and f a branch,
attention or the MLP, whose output is added to the stream."""

import math

import torch
from torch import nn

from gpt.config import ModelConfig, lookup
from gpt.layers import MLP, Attention, draw
from gpt.norms import NORMS


def make_norm(config: ModelConfig) -> nn.Module:
    """A new norm of the class that `config.norm_layer` names, as wide as the stream."""
    return lookup(NORMS, config.norm_layer, "norm_layer")(config.d_model, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """What the placements share: two branches and their norms. A placement adds `forward(x)` and no more arguments.
    Modules are named by role, so that placements with equal parameters start from equal weights.

    As class attributes a placement states the names of its norms, whether the model needs a norm before the head, how
    the branch outputs start (`branch_init`), and whether training wants a warm-up.
    """

    norms: tuple[str, ...] = ("attn_norm", "mlp_norm")
    needs_final_norm = True
    branch_init = "gpt2"
    wants_warmup = False

    def __init__(self, config: ModelConfig, layer: int):
        """`layer` counts from 1 to config.n_layers."""
        super().__init__()
        for name in self.norms:
            setattr(self, name, make_norm(config))
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.init_weights(config)

    def init_weights(self, config: ModelConfig):
        """Start the matrices from N(0, 0.02^2), as GPT-2 does. The last one of each of the 2 n_layers branches starts
        as `branch_init` says: the configuration's, or else the placement's."""
        stds = {"gpt2": 0.02 / math.sqrt(2 * config.n_layers), "plain": 0.02, "zero": 0.0}
        branch_std = lookup(stds, self.branch_init if config.branch_init is None else config.branch_init, "branch_init")
        for linear, std in (
            (self.attn.qkv, 0.02),
            (self.attn.out, branch_std),
            (self.mlp.up, 0.02),
            (self.mlp.down, branch_std),
        ):
            draw(linear.weight, std)


class PreLN(Block):
    """x + f(norm(x)): GPT-2 (Radford et al. 2019). The stream itself is never normalized before the final norm."""

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PostLN(Block):
    """norm(x + f(x)): the original (Vaswani et al. 2017, arXiv 1706.03762), GPT-1. The last block ends in a norm, so no
    final norm is needed. Deep stacks want a warm-up."""

    needs_final_norm = False
    wants_warmup = True

    def forward(self, x):
        x = self.attn_norm(x + self.attn(x))
        return self.mlp_norm(x + self.mlp(x))


class Peri(Block):
    """x + norm(f(norm(x))): a norm on both sides of the branch (Gemma 2; Kim et al. 2025, arXiv 2502.02732)."""

    norms = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")

    def forward(self, x):
        x = x + self.attn_out_norm(self.attn(self.attn_norm(x)))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))


class Reordered(Block):
    """x + norm(f(x)): the norm on the branch's output only (OLMo 2, arXiv 2501.00656)."""

    def forward(self, x):
        x = x + self.attn_norm(self.attn(x))
        return x + self.mlp_norm(self.mlp(x))


class NoNorm(Block):
    """x + f(x): the control, without any norm."""

    norms = ()
    needs_final_norm = False

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Parallel(Block):
    """x + attn(norm(x)) + mlp(norm(x)): both branches read one norm (GPT-J, Wang and Komatsuzaki 2021)."""

    norms = ("norm",)

    def forward(self, x):
        n = self.norm(x)
        return x + self.attn(n) + self.mlp(n)


class DeepNorm(Block):
    """norm(a x + f(x)), a = (2 n_layers)^(1/4). The matrices of the values, of attention's output and of the MLP start
    (8 n_layers)^(-1/4) times as large (Wang et al. 2022, arXiv 2203.00555, decoder-only)."""

    needs_final_norm = False
    branch_init = "plain"

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.a = (2 * config.n_layers) ** 0.25

    def init_weights(self, config: ModelConfig):
        super().init_weights(config)
        values = self.attn.qkv.weight[2 * config.d_model :]
        with torch.no_grad():
            for weight in (values, self.attn.out.weight, self.mlp.up.weight, self.mlp.down.weight):
                weight.mul_((8 * config.n_layers) ** -0.25)

    def forward(self, x):
        x = self.attn_norm(self.a * x + self.attn(x))
        return self.mlp_norm(self.a * x + self.mlp(x))


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


class ReZero(Block):
    """x + s f(x), s one learned number for each block that starts at 0 (Bachlechner et al. 2020, arXiv 2003.04887):
    every block starts as the identity."""

    norms = ()
    needs_final_norm = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x + self.s * self.attn(x)
        return x + self.s * self.mlp(x)


class Keel(Block):
    """norm(a x + f(norm(x))), a = 2 n_layers, the number of sublayers (Chen and Wei 2026, arXiv 2601.19895)."""

    norms = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
    needs_final_norm = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.a = 2 * config.n_layers

    def forward(self, x):
        x = self.attn_out_norm(self.a * x + self.attn(self.attn_norm(x)))
        return self.mlp_out_norm(self.a * x + self.mlp(self.mlp_norm(x)))


def mix(config: ModelConfig, layer: int) -> Block:
    """Post-LN in the first quarter of the blocks, pre-LN in the rest (Li et al. 2024, arXiv 2412.13795)."""
    return (PostLN if layer <= config.n_layers // 4 else PreLN)(config, layer)


# Any callable (config, layer) -> Block.
BLOCKS = {
    "pre": PreLN,
    "post": PostLN,
    "peri": Peri,
    "reordered": Reordered,
    "none": NoNorm,
    "parallel": Parallel,
    "deepnorm": DeepNorm,
    "lns": LNScaling,
    "rezero": ReZero,
    "mix": mix,
    "keel": Keel,
}
