"""The placements of the norms. A block is its equation; x is the residual stream, (B, T, C) in and out."""

import math

from torch import nn

from gpt.config import ModelConfig, lookup
from gpt.layers import MLP, Attention
from gpt.norms import NORMS


def make_norm(config: ModelConfig) -> nn.Module:
    """A new norm of the kind that the configuration names, as wide as the stream."""
    return lookup(NORMS, config.norm_layer, "norm_layer")(config.d_model, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """What the placements share: two branches and their norms. A placement adds `forward(x)`, and nothing to its
    signature. Modules are named by role, so that placements with equal parameters start from equal weights."""

    norms = ("attn_norm", "mlp_norm")
    needs_final_norm = True

    def __init__(self, config: ModelConfig, layer: int):
        """`layer` counts from 1 to config.n_layers."""
        super().__init__()
        for name in self.norms:
            setattr(self, name, make_norm(config))
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.init_weights(config)

    def init_weights(self, config: ModelConfig):
        """GPT-2's: N(0, 0.02^2), and for the last matrix of each of the 2 n_layers branches as `branch_init` says."""
        stds = {"gpt2": 0.02 / math.sqrt(2 * config.n_layers), "plain": 0.02, "zero": 0.0}
        branch_std = lookup(stds, config.branch_init, "branch_init")
        for linear, std in (
            (self.attn.qkv, 0.02),
            (self.attn.out, branch_std),
            (self.mlp.up, 0.02),
            (self.mlp.down, branch_std),
        ):
            nn.init.normal_(linear.weight, std=std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class PreLN(Block):
    """x + f(norm(x)): GPT-2 (Radford et al. 2019). The stream itself is never normalized before the final norm."""

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PostLN(Block):
    """norm(x + f(x)): the original (Vaswani et al. 2017, arXiv 1706.03762), GPT-1. A norm stands on the main path,
    so no final norm is needed; deep stacks want a warm-up."""

    needs_final_norm = False

    def forward(self, x):
        x = self.attn_norm(x + self.attn(x))
        return self.mlp_norm(x + self.mlp(x))


class NoNorm(Block):
    """x + f(x): the control, without any norm."""

    norms = ()
    needs_final_norm = False

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


# Any callable (config, layer) -> Block will do, so a mixture of placements by layer is a function of three lines.
BLOCKS = {"pre": PreLN, "post": PostLN, "none": NoNorm}
