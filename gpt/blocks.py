"""The placements of the norms. A block is its equation: x is the residual stream, (B, T, C) in and out, and f a branch,
attention or the MLP, whose output is added to the stream. Placements that scale something are in gpt/scaled.py, those
with several streams in gpt/lanes.py."""

import dataclasses
import math

from gpt.block import Block
from gpt.config import Mistake, ModelConfig
from gpt.lanes import HyperConnections, ResiDual, mhc
from gpt.scaled import GPAS, DeepNorm, DepthFactor, Keel, LayerScale, LNScaling, ReZero, Sandwich


class PreLN(Block):
    """x + f(norm(x)): GPT-2 (Radford et al. 2019). The stream itself is never normalized before the final norm."""

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PostLN(Block):
    """norm(x + f(x)): the original (Vaswani et al. 2017, arXiv 1706.03762), GPT-1. The last block ends in a norm, so no
    final norm is needed. Deep stacks want a warm-up. It starts as GPT-1, without a factor for depth."""

    needs_final_norm = False
    branch_init = "plain"
    wants_warmup = True
    norm_on_stream = True

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

    branch_init = "plain"

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
    """x + attn(norm(x)) + mlp(norm(x)): both branches read one norm (GPT-J, Wang and Komatsuzaki 2021, whose MLP's last
    matrix starts twice as large as here)."""

    norms = ("norm",)
    start = "fan_in"
    branch_init = "gptj"

    def forward(self, x):
        n = self.norm(x)
        return x + self.attn(n) + self.mlp(n)


class TwoNorms(Block):
    """x + attn(norm(x)) + mlp(norm(x)): as `parallel`, with a norm for each branch (GPT-NeoX, Black et al. 2022,
    arXiv 2204.06745; Pythia). GPT-NeoX's matrices start from N(0, 2/(5 d)), its branch outputs at 2/(L sqrt(d))."""

    def forward(self, x):
        return x + self.attn(self.attn_norm(x)) + self.mlp(self.mlp_norm(x))


class SubLN(Block):
    """x + f(norm(x)) with a second norm in f, before its last matrix (Sub-LN: Wang et al. 2022, arXiv 2210.06423). The
    matrices of the values, of attention's output and of the MLP start sqrt(log(2 n_layers)) times as large as Xavier's.
    """

    norms = ("attn_norm", "attn.inner_norm", "mlp_norm", "mlp.inner_norm")
    start = "xavier"
    branch_init = "plain"

    def gain(self, n_layers):
        return math.log(2 * n_layers) ** 0.5

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class B2T(Block):
    """norm(x + y + mlp(y)), y = norm(x + attn(x)): post-LN with a way from a block's bottom to its top around all but
    its last norm (Takase et al. 2022, arXiv 2206.00330, whose code also divides its matrices by sqrt(n_layers))."""

    needs_final_norm = False
    branch_init = "plain"
    wants_warmup = True
    norm_on_stream = True

    def forward(self, x):
        y = self.attn_norm(x + self.attn(x))
        return self.mlp_norm(x + y + self.mlp(y))


class Hybrid(Block):
    """y + mlp(y), y = norm(x + attn(x)): post-LN's norm before the MLP, and in attention norms of queries, keys and
    values (Zhuo et al. 2025, arXiv 2503.04598, whose matrices start from N(0, 2/(5 d)))."""

    norms = ("attn.q_norm", "attn.k_norm", "attn.v_norm", "mlp_norm")
    norm_on_stream = True

    def forward(self, x):
        y = self.mlp_norm(x + self.attn(x))
        return y + self.mlp(y)


def mix(config: ModelConfig, layer: int) -> Block:
    """Post-LN in the first quarter of the blocks, at least in one, pre-LN in the rest; plain start (Li et al. 2024,
    arXiv 2412.13795)."""
    if config.branch_init is None:
        config = dataclasses.replace(config, branch_init="plain")
    return (PostLN if layer <= max(1, config.n_layers // 4) else PreLN)(config, layer)


def keel(config: ModelConfig, layer: int) -> Block:
    """Pre-LN in the first block, Keel in the rest (Chen and Wei 2026, arXiv 2601.19895)."""
    return (PreLN if layer == 1 else Keel)(config, layer)


def olmo2(config: ModelConfig, layer: int) -> Block:
    """Reordered, with norms of queries and keys (OLMo 2, arXiv 2501.00656, which norms all heads together). There they
    are RMSNorms with an eps of 1e-6: norm_layer="rmsnorm", norm_eps=1e-6."""
    return Reordered(dataclasses.replace(config, qk_norm=config.qk_norm is not False), layer)


def hybrid(config: ModelConfig, layer: int) -> Block:
    """Hybrid, but for the first block: pre-LN with norms of queries and keys (HybridNorm* of arXiv 2503.04598, where
    those values are normed too). Raises Mistake for qk_norm=False."""
    if config.qk_norm is False:
        raise Mistake("hybrid has norms of queries and keys (qk_norm False). Leave --no-qk-norm out.")
    return PreLN(dataclasses.replace(config, qk_norm=True), layer) if layer == 1 else Hybrid(config, layer)


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
    "keel": keel,
    "olmo2": olmo2,
    "neox": TwoNorms,
    "subln": SubLN,
    "b2t": B2T,
    "hybrid": hybrid,
    "sandwich": Sandwich,
    "depth_factor": DepthFactor,
    "layerscale": LayerScale,
    "gpas": GPAS,
    "resi_dual": ResiDual,
    "hyper": HyperConnections,
    "mhc": mhc,
}
