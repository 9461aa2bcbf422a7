"""Signal and gradient by depth, measured by hooks on the modules, so that no layer contains code for it."""

import torch
import torch.nn.functional as F

from gpt.loss import next_token_loss

MEASURES = ("stream", "attn", "mlp", "ratio", "cosine", "stream_grad", "mlp_grad")


def depth_profile(model, tokens: torch.Tensor) -> dict[str, list[float]]:
    """What one forward and backward of the next-token loss on (B, T + 1) tokens shows of each of the L blocks.

    stream       root mean square of the stream after the block
    attn, mlp    root mean square of the output of each branch, before the placement normalizes or scales it
    ratio        root mean square of the block's change of the stream, divided by that of the stream before the block
    cosine       between the stream before and after the block, mean over tokens
    stream_grad  norm of the loss's gradient with respect to the stream before the block
    mlp_grad     norm of the loss's gradient with respect to the MLP's last matrix

    Each is a list of L numbers. The model keeps its mode and its weights, and has no gradients afterwards.
    """
    seen: list[dict] = [{} for _ in model.blocks]

    def watch(place, name):
        def keep(module, inputs, output):
            place[name] = output
            if name == "after":
                (place["before"],) = inputs
                place["before"].retain_grad()

        return keep

    training = model.training
    handles = []
    for block, place in zip(model.blocks, seen):
        for module, name in ((block, "after"), (block.attn, "attn"), (block.mlp, "mlp")):
            handles.append(module.register_forward_hook(watch(place, name)))
    try:
        model.eval()
        model.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        next_token_loss(logits, tokens[:, 1:]).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    profile: dict[str, list[float]] = {name: [] for name in MEASURES}
    for block, place in zip(model.blocks, seen):
        before, after = place["before"].detach(), place["after"].detach()
        values = (
            _rms(after),
            _rms(place["attn"].detach()),
            _rms(place["mlp"].detach()),
            _rms(after - before) / _rms(before),
            F.cosine_similarity(after.float(), before.float(), dim=-1).mean(),
            place["before"].grad.float().norm(),
            block.mlp.down.weight.grad.float().norm(),
        )
        for name, value in zip(MEASURES, values):
            if hasattr(value, "full_tensor"):  # of a weight of which each process has a part
                value = value.full_tensor()
            profile[name].append(float(value))
    model.zero_grad(set_to_none=True)
    return profile


def random_stack(depth=12, gain=0.7, norm=False, residual=False, width=256, seed=0) -> dict[str, list[float]]:
    """The lesson's random layers. Each is x <- f(x), or x <- x + f(x) with `residual`, where f(x) = x W and W is drawn
    so that it multiplies the scale of x by about `gain`. With `norm`, f normalizes its output, or its input if there is
    a residual.

    Returns the root mean square of x ("stream") and its cosine with the first x ("cosine") at depths 0 to `depth`.
    """
    generator = torch.Generator().manual_seed(seed)
    x = first = torch.randn(256, width, generator=generator, dtype=torch.float64)
    profile = {"stream": [float(_rms(x))], "cosine": [1.0]}
    for _ in range(depth):
        weight = torch.randn(width, width, generator=generator, dtype=torch.float64) * gain / width**0.5
        if residual:
            x = x + (_normalized(x) if norm else x) @ weight
        else:
            x = _normalized(x @ weight) if norm else x @ weight
        profile["stream"].append(float(_rms(x)))
        profile["cosine"].append(float(F.cosine_similarity(x, first, dim=-1).mean()))
    return profile


def _rms(x):
    return x.float().square().mean().sqrt()


def _normalized(x):
    x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt()
