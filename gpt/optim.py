"""Parameter groups, the optimizer, the learning rate of a step. `config` is a TrainConfig."""

import math

import torch


def parameter_groups(model, weight_decay: float) -> list[dict]:
    """Every parameter once: matrices decay, vectors (biases, norms) do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model, config) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101). The rate is set before each step, from `lr_at`."""
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=next(model.parameters()).device.type in ("cpu", "cuda"),
    )


def lr_at(step: int, config) -> float:
    """The rate of update number `step`, counted from 0: lr/warmup_steps, 2 lr/warmup_steps, ... lr, then half a cosine
    down to last_lr, reached at the last update."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps + 1) / max(1, config.steps - config.warmup_steps)
    return config.last_lr + (config.lr - config.last_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
