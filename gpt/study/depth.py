"""Signal and gradient by depth, measured by hooks on the modules, so that no layer contains code for it."""

import contextlib

import torch
import torch.nn.functional as F

from gpt.loss import next_token_loss

MEASURES = ("stream", "attn", "mlp", "ratio", "cosine", "stream_grad", "mlp_grad")

# The measures of a depth profile that are drawn.
SHOWN = {"stream": "root mean square of the stream", "stream_grad": "norm of the gradient at the stream"}
STACK_SHOWN = SHOWN | {"cosine": "cosine with the input"}  # of a random stack


def depth_profile(model, tokens: torch.Tensor) -> dict[str, list[float]]:
    """What one forward and backward of the next-token loss on (B, T + 1) tokens shows of each of the L blocks.

    stream       root mean square of the stream after the block
    attn, mlp    root mean square of the output of each branch, before the placement normalizes or scales it
    ratio        root mean square of the block's change of the stream, divided by that of the stream before the block
    cosine       between the stream before and after the block, mean over tokens
    stream_grad  norm of the loss's gradient with respect to the stream before the block
    mlp_grad     norm of the loss's gradient with respect to the MLP's last matrix

    Each is a list of L numbers. Of a stream of several lanes it is of what `Block.measured` takes of them; stream_grad
    is of all. A measure that some block does not have is left out: a branch that is not there or puts out more than a
    tensor, a change between streams of different shapes. The model keeps its mode and its weights, and has no gradients
    afterwards.
    """
    places: list[dict] = []  # the measures of each block, in the order of the calls

    def enter(block, inputs):
        (x,), place = inputs, {}
        places.append(place)
        if isinstance(x, torch.Tensor):
            place["before"] = block.measured(x.detach()).clone()  # a block may change it in place
            if x.requires_grad:
                x.register_hook(lambda grad: place.update(stream_grad=grad.float().norm()))

    def leave(block, inputs, output):
        before = places[-1].pop("before", None)
        if isinstance(output, torch.Tensor):
            output = block.measured(output.detach())
            places[-1]["stream"] = _rms(output)
            if before is not None and before.shape == output.shape:
                places[-1]["ratio"] = _rms(output - before) / _rms(before)
                places[-1]["cosine"] = F.cosine_similarity(output.float(), before.float(), dim=-1).mean()

    def branch(name):
        def keep(module, inputs, output):
            if isinstance(output, torch.Tensor):
                places[-1][name] = _rms(output.detach())

        return keep

    training = model.training
    handles = []
    for block in dict.fromkeys(model.blocks):  # a module that is several blocks is watched once
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        for name in ("attn", "mlp"):
            with contextlib.suppress(AttributeError):
                handles.append(block.get_submodule(name).register_forward_hook(branch(name)))
    try:
        model.eval()
        model.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        next_token_loss(logits, tokens[:, 1:]).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    for block, place in zip(model.blocks, places):
        with contextlib.suppress(AttributeError):
            if (grad := block.get_parameter("mlp.down.weight").grad) is not None:
                place["mlp_grad"] = grad.float().norm()
    profile = {}
    for name in MEASURES:
        if all(name in place for place in places):
            profile[name] = [_number(place[name]) for place in places]
    model.zero_grad(set_to_none=True)
    return profile


def panels_of(profiles: dict[str, dict[str, dict]], shown: dict[str, str] = SHOWN) -> dict[str, dict[str, list[float]]]:
    """The panels of plots.depth_lines for {time: {line's name: depth profile}}, of the measures in `shown`, without
    those that a profile lacks."""
    panels = {}
    for key, text in shown.items():
        for time, by_name in profiles.items():
            if lines := {name: profile[key] for name, profile in by_name.items() if key in profile}:
                panels[f"{text} {time}".strip()] = lines
    return panels


def random_stack(depth=12, gain=0.7, norm=False, residual=False, width=256, seed=0) -> dict[str, list[float]]:
    """The lesson's random layers. Each is x <- f(x), or x <- x + f(x) with `residual`, where f(x) = x W and W is drawn
    so that it multiplies the scale of x by about `gain`. With `norm`, f normalizes its output, or its input if there is
    a residual.

    Returns lists of depth + 1 numbers, from the input on: the root mean square of x ("stream"); its cosine with the
    input ("cosine"), mean over rows; and the norm of the gradient at x of a random linear function of the last x,
    divided by that norm at the last x ("stream_grad").
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, width, generator=generator, dtype=torch.float64, requires_grad=True)
    streams = [x]
    for _ in range(depth):
        weight = torch.randn(width, width, generator=generator, dtype=torch.float64) * gain / width**0.5
        if residual:
            x = x + (_normalized(x) if norm else x) @ weight
        else:
            x = _normalized(x @ weight) if norm else x @ weight
        streams.append(x)
    direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(x, streams, direction)
    first, *_ = streams = [x.detach() for x in streams]
    return {
        "stream": [float(_rms(x)) for x in streams],
        "cosine": [float(F.cosine_similarity(x, first, dim=-1).mean()) for x in streams],
        "stream_grad": [float(gradient.norm() / direction.norm()) for gradient in gradients],
    }


def _number(value) -> float:
    """The value of a tensor, or of the DTensor that a measure of a shared-out weight is."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _rms(x):
    return x.float().square().mean().sqrt()


def _normalized(x):
    x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt()
