"""GPT: embed -> blocks -> final norm -> logits."""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from gpt.block import Block, make_norm
from gpt.blocks import BLOCKS
from gpt.config import Mistake, ModelConfig, lookup
from gpt.layers import Embedding
from gpt.norms import NORMS

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
    raise Mistake(f"torch is too old ({torch.__version__}, not 2.6 or newer). pip install -r requirements.txt")


class GPT(nn.Module):
    """GPT-2 with the block that `config.norm` names (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners"): (B, T) int64 tokens -> (B, T, vocab_size) logits.

    The head has no weight of its own: it is the token embedding. Raises Mistake for an unknown name in the
    configuration.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        starts = {"gpt2": (0.02, 1.0), "fan_in": (1.0, 1 / config.d_model)}
        std, self.head_scale = lookup(starts, config.start, "start")
        self.token_embedding = Embedding(config.vocab_size, config.d_model, std)
        self.position_embedding = Embedding(config.context_length, config.d_model, std)
        block = lookup(BLOCKS, config.norm, "placement")
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(1, config.n_layers + 1))
        final = self.blocks[-1].needs_final_norm if config.final_norm is None else config.final_norm
        self.final_norm = make_norm(config) if final else nn.Identity()
        self.embedding_scale = None
        if any(getattr(module, "pointwise", False) for module in self.modules()):
            scale = math.sqrt(config.d_model) if config.start == "gpt2" else 1.0
            self.embedding_scale = nn.Parameter(torch.full((1,), scale))

    def forward(self, tokens):
        return self.readout(self.residual_stream(tokens))

    def residual_stream(self, tokens, start: int = 0):
        """(B, T) tokens at the positions from `start` on -> the stream after the last block, (B, T, d_model), or
        (B, T, lanes, d_model) if the placement has several. Raises Mistake for a position beyond the context."""
        end = start + tokens.size(1)
        if end > self.config.context_length:
            raise Mistake(f"too many tokens ({end}). The context length is {self.config.context_length}.")
        x = self.token_embedding(tokens)
        if self.embedding_scale is not None:
            x = self.embedding_scale * x
        x = cast(Block, self.blocks[0]).open(x + self.position_embedding.weight[start:end])
        for block in self.blocks:
            x = block(x)
        return x

    def hidden(self, x):
        """The stream after the last block -> what the head multiplies by the embedding, (B, T, d_model)."""
        return cast(Block, self.blocks[-1]).close(x, self.final_norm) * self.head_scale

    def readout(self, x):
        """The stream after the last block -> logits (B, T, vocab_size)."""
        return F.linear(self.hidden(x), self.token_embedding.weight)

    def count_parameters(self, part: str = "all") -> int:
        """The number of parameters in the whole model ("all") or in its normalization layers ("norm")."""
        norms = [module for module in self.modules() if isinstance(module, tuple(NORMS.values()))]
        modules = lookup({"all": [self], "norm": norms}, part, "part of the model")
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


def with_weights(stored: ModelConfig, weights: dict[str, torch.Tensor], config: ModelConfig | None, device: str) -> GPT:
    """The model that has these `weights`, those of a `stored` architecture, in evaluation mode. `config` may differ
    from it in its dropout and in a shorter context_length, which crops the table of positions. The `device` "meta"
    makes shapes alone: it is quick, and loses tensors that a placement makes and that are not among the weights; "cpu"
    keeps them. Raises Mistake if the model cannot be made, or if the weights do not fit it."""
    config = config or stored
    if config.n_layers > len(weights):  # before anything is made as large as an untrusted file says
        raise Mistake(f"{len(weights)} tensors, {config.n_layers} blocks")
    with torch.device(device), torch.random.fork_rng(devices=[]):
        model = GPT(config)
    positions = weights.get("position_embedding.weight")
    if positions is not None and positions.shape[:1] == (stored.context_length,):
        weights = weights | {"position_embedding.weight": positions[: config.context_length].clone()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reason = str(error).removeprefix("Error(s) in loading state_dict for GPT:")
        raise Mistake(" ".join(reason.split())[:400]) from None
    return model.eval()
