"""Toy models, texts and settings, and ways to start a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt import GPT, ModelConfig
from gpt.training.settings import TrainConfig, configure

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
# Toy matrices are too small to share out, and the threads of several processes get in each other's way.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# For a process that imports once and forks for each run, since most of the time of a process goes to imports.
IMPORTS = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports the compiler
import gpt.training.checkpoint, gpt.training.corpus, gpt.training.data, gpt.training.device, gpt.training.distributed
import gpt.training.optim, gpt.study.depth, gpt.study.plots, gpt.generate, gpt.pretrained
import pydoc_data.topics, tqdm, train
from gpt.training.settings import configure
"""

TOY = {"n_layers": 2, "n_heads": 2, "d_model": 32, "context_length": 16}
TOY_RUN = TOY | {"batch_size": 4, "eval_every": 4, "log_every": 1, "warmup_steps": 2, "val_fraction": 0.2}


def toy_model(seed=0, **settings) -> GPT:
    """A small GPT whose weights, unlike the usual ones, are large enough for every part to matter."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**TOY | {"vocab_size": 61} | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.size(1) ** -0.5)
            elif parameter.numel() == 1:
                parameter.fill_(0.5)
    return model


def toy_tokens(rows=2, length=16, vocab_size=61, seed=1) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def toy_config(**settings) -> TrainConfig:
    return configure(TOY_RUN | settings)


def as_flags(settings: dict) -> list[str]:
    """The settings as words of a command line; a boolean is its flag or nothing."""
    found = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [] if value is False else [flag, str(value)]
    return found


def call(module, *arguments, capsys):
    """A script's main in this process: (status, stdout, stderr)."""
    with pytest.raises(SystemExit) as exit:
        module.main(list(map(str, arguments)))
    return exit.value.code or 0, *capsys.readouterr()


def python(*arguments, cwd, **settings):
    """A process of its own, finished."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120, **settings)


def shared(name: str) -> Path:
    """A file of the developers' shared folder; skips the test where there is none."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{name}")
    return path
