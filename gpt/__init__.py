"""A GPT-2 whose block normalization is one word: `from gpt import GPT, ModelConfig, BLOCKS, NORMS, LayerNorm`."""

import importlib

_HOME = {"GPT": "model", "ModelConfig": "config", "BLOCKS": "blocks", "NORMS": "norms", "LayerNorm": "norms"}
__all__ = sorted(_HOME)


def __getattr__(name):
    # Imported on first use (PEP 562), so that `--help`, which needs no model, does not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpt.{_HOME[name]}"), name)
