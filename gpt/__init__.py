"""A GPT-2 whose block normalization is one word:
`from gpt import GPT, ModelConfig, BLOCKS, NORMS, LayerNorm, next_token_loss`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from gpt.blocks import BLOCKS
    from gpt.config import ModelConfig
    from gpt.loss import next_token_loss
    from gpt.model import GPT
    from gpt.norms import NORMS, LayerNorm

__all__ = ["BLOCKS", "GPT", "NORMS", "LayerNorm", "ModelConfig", "next_token_loss"]
_FILES = {"BLOCKS": "blocks", "ModelConfig": "config", "next_token_loss": "loss", "GPT": "model"}
_FILES |= {"NORMS": "norms", "LayerNorm": "norms"}


def __getattr__(name: str):
    # Imported on first use (PEP 562): `--help` needs no model, so it should not wait for torch.
    if name not in _FILES:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpt.{_FILES[name]}"), name)
