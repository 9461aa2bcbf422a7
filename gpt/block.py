"""What the placements share: two branches, their norms, and how all of them start."""

import math

import torch
from torch import nn

from gpt.config import ModelConfig, lookup
from gpt.layers import MLP, Attention, draw
from gpt.norms import NORMS

# The standard deviation at the start of a matrix that reads n numbers and writes m.
STARTS = {
    "gpt2": lambda n, m: 0.02,
    "fan_in": lambda n, m: n**-0.5,
    "xavier": lambda n, m: (2 / (n + m)) ** 0.5,  # Glorot and Bengio 2010
}
PER_HEAD = ("attn.q_norm", "attn.k_norm", "attn.v_norm")


def make_norm(config: ModelConfig, name: str = "final_norm") -> nn.Module:
    """A new norm of the class that `config.norm_layer` names, for the place `name`. Those of queries, keys and values
    act on one head and have no shift; mlp.inner_norm is as wide as the MLP inside; all others as the stream."""
    width = {"mlp.inner_norm": 4 * config.d_model} | dict.fromkeys(PER_HEAD, config.d_model // config.n_heads)
    make = lookup(NORMS, config.norm_layer, "norm_layer")
    return make(width.get(name, config.d_model), eps=config.norm_eps, bias=config.bias and name not in PER_HEAD)


class Block(nn.Module):
    """What the placements share. A placement adds `forward(x)`, with no more arguments. Modules are named by role, so
    that placements with equal parameters start from equal draws.

    As class attributes a placement states

        norms             the names of its norms. Those within the branches are attn.q_norm, attn.k_norm, attn.v_norm,
                          attn.inner_norm (before the last matrix) and mlp.inner_norm
        needs_final_norm  whether the model needs a norm before the head
        start             how its matrices start, a key of STARTS
        branch_init       how much smaller the last matrix of a branch starts
        wants_warmup      whether training wants a warm-up
        norm_on_stream    whether a norm stands on the stream itself, and not only on the branches
    """

    norms: tuple[str, ...] = ("attn_norm", "mlp_norm")
    needs_final_norm = True
    start = "gpt2"
    branch_init = "gpt2"
    wants_warmup = False
    norm_on_stream = False

    def __init__(self, config: ModelConfig, layer: int):
        """`layer` counts from 1 to config.n_layers."""
        super().__init__()
        attn, mlp = Attention(config), MLP(config)
        owners = {"": self, "attn": attn, "mlp": mlp}
        for name in dict.fromkeys((*self.norms, *(PER_HEAD[:2] if config.qk_norm else ()))):
            owner, _, attribute = name.rpartition(".")
            setattr(owners[owner], attribute, make_norm(config, name))
        self.attn, self.mlp = attn, mlp
        self.init_weights(config)

    def gain(self, n_layers: int) -> float:
        """A factor on the start of the matrices that the signal goes through: values, attention's output, the MLP's."""
        return 1.0

    def init_weights(self, config: ModelConfig):
        """Start the matrices: by the placement's own rule, or by the one that `config.start` makes common to all. The
        last one of each of the 2 n_layers branches starts smaller, as `branch_init` says: the configuration's, or else
        the placement's; at the common start "plain"."""
        std = STARTS[lookup({"gpt2": self.start, "fan_in": "fan_in"}, config.start, "start")]
        branch_init = self.branch_init if config.start == "gpt2" else "plain"
        branch_init = branch_init if config.branch_init is None else config.branch_init
        L, d, gain = config.n_layers, config.d_model, self.gain(config.n_layers)
        divisors = {"gpt2": math.sqrt(2 * L), "gptj": L / 2, "plain": 1.0, "zero": math.inf}
        divisor = lookup(divisors, branch_init, "branch_init")
        draw(self.attn.qkv.weight, std(d, d))
        if gain != 1:
            with torch.no_grad():
                self.attn.qkv.weight[2 * d :] *= gain
        draw(self.attn.out.weight, std(d, d) * gain / divisor)
        draw(self.mlp.up.weight, std(d, 4 * d) * gain)
        draw(self.mlp.down.weight, std(4 * d, d) * gain / divisor)

    # Where the stream has several lanes, (B, T, lanes, C), a placement says how they begin, are measured and end.

    def open(self, x):
        """The sum of the embeddings (B, T, C) -> the stream before the first block."""
        return x

    def measured(self, x):
        """The stream -> what the probe measures of it, (B, T, C)."""
        return x

    def close(self, x, final_norm):
        """The stream after the last block -> what the head reads, (B, T, C)."""
        return final_norm(x)
