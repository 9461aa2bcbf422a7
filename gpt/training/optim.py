"""Parameter groups, the optimizers, the learning rate of a step."""

import math

import torch

from gpt.training.distributed import like, whole
from gpt.training.settings import TrainConfig

# Odd polynomials a s + b s^3 + c s^5, applied in turn (Amsel et al. 2025, arXiv 2505.16932). Each is the best degree-5
# approximation of 1 on the interval that the previous ones map [0.003, 1] to; all three end within 1 +- 0.65.
POLYNOMIALS = ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257))


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """(..., n, m) matrices x = U S V^T, n <= m -> roughly U V^T: singular values near 1. Zeros stay zeros.

    All products but the first and the last are of (n, n) matrices, since p(x x^T) x has the singular vectors of x.
    """
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)  # so that no square over- or underflows
    gram = x @ x.mT
    square = gram.norm(dim=(-2, -1), keepdim=True).clamp_min(tiny)  # at least that of the largest singular value
    gram = gram / square
    product = unit = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    for number, (a, b, c) in enumerate(POLYNOMIALS, start=1):
        p = a * unit + b * gram + c * (gram @ gram)
        product = p @ product if number > 1 else p
        if number < len(POLYNOMIALS):
            gram = p @ gram @ p
    return product @ x / square.sqrt()


class Muon(torch.optim.AdamW):
    """AdamW, except for matrices in groups with a "momentum" beta, which move in orthogonal directions (Jordan et al.
    2024, kellerjordan.github.io/posts/muon). For a gradient g of shape (n, m) and momentum v:

        v <- beta v + (1 - beta) g
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(n, m)) orthogonal(beta v + (1 - beta) g)

    The factor makes the update as large as AdamW's usually is, a root mean square of 0.2 lr (Liu et al. 2025,
    arXiv 2502.16982). All is computed in float32; small matrices of one shape are taken together.
    """

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a count of steps for each parameter

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", None):  # the loss scaler met a float16 gradient that overflowed
            return
        for group in self.param_groups:
            if group["momentum"] is None:
                continue
            wide = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(grad, 1 - group["momentum"])
                update = grad.lerp(state["momentum"], group["momentum"])
                tall = update.size(0) > update.size(1)
                pair = (parameter.mT, update.mT) if tall else (parameter, update)
                wide.setdefault(pair[1].shape, []).append(pair)
                parameter.grad = None  # so that AdamW passes over it
            for (n, m), pairs in wide.items():
                together = max(1, 2**20 // (n * m))
                for start in range(0, len(pairs), together):
                    parameters, updates = zip(*pairs[start : start + together])
                    for parameter, update in zip(parameters, orthogonal(torch.stack([whole(u) for u in updates]))):
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                        parameter.sub_(like(parameter, update.mul_(group["lr"] * 0.2 * math.sqrt(m))))
        super().step()


def parameter_groups(model, config: TrainConfig) -> list[dict]:
    """Every parameter once: matrices decay, vectors (biases, norms) do not. A group's rate is lr_at times its "scale":
    under Muon the embeddings and the vectors, which AdamW moves, learn best at three times the rate."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    common = {"scale": 1.0, "momentum": None, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return [common | {"params": matrices}, common | {"params": vectors, "weight_decay": 0.0}]
    hidden = {p for p in model.blocks.parameters() if p.dim() == 2}
    return [
        common | {"params": [p for p in matrices if p in hidden], "momentum": 0.9},
        common | {"params": [p for p in matrices if p not in hidden], "scale": 3.0},
        common | {"params": vectors, "scale": 3.0, "weight_decay": 0.0},
    ]


def make_optimizer(model, config: TrainConfig) -> torch.optim.Optimizer:
    """Muon, or AdamW alone (Loshchilov and Hutter, arXiv 1711.05101). Set the rate before each step, by `lr_at`."""
    return {"muon": Muon, "adamw": torch.optim.AdamW}[config.optimizer](
        parameter_groups(model, config),
        lr=config.peak_lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=next(model.parameters()).device.type in ("cpu", "cuda"),
    )


def lr_at(step: int, config: TrainConfig) -> float:
    """The rate of update number `step`, counted from 0: peak_lr/warmup_steps, 2 peak_lr/warmup_steps, ... peak_lr, then
    down to last_lr, reached one update after the last: along half a cosine, or for Muon along a line."""
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps + 1) / max(1, config.steps - config.warmup_steps + 1))
    left = 1 - progress if config.optimizer == "muon" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.last_lr + (config.peak_lr - config.last_lr) * left
