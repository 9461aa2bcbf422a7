"""The device, its number format, compilation, and the layout of weights for sampling on a CPU."""

import contextlib
import functools
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gpt.config import Mistake
from gpt.layers import Linear
from gpt.model import GPT
from gpt.training.distributed import ALONE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Machine:
    """The devices of a machine: CUDA GPUs, whether they all compute in bfloat16, and an Apple GPU."""

    cuda: int = 0
    bfloat16: bool = False
    mps: bool = False


@dataclass(frozen=True)
class Compute:
    """A device, the number format of matrix products on it, and whether to compile: on, off, or auto, which goes on
    without the compiler if that fails. Parameters are float32 on every device."""

    device: str
    dtype: str
    compile: str

    def autocast(self):
        """A context in which matrix products use `dtype`."""
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=DTYPES[self.dtype])

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` on the device; the CPU does not wait for a GPU's copy."""
        if self.device.startswith("cuda"):
            return tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens.to(self.device)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss, because gradients underflow in float16; for other formats it does nothing."""
        return torch.amp.GradScaler(torch.device(self.device).type, enabled=self.dtype == "float16")


FEW_ROWS = 2  # with more rows an ordinary matmul is as fast or faster (four, bfloat16, one core)


def by_columns(x, weight, bias=None):
    """F.linear, x W^T + b, (..., in) -> (..., out), for a W that is laid out by columns. For few rows x this is a sum
    of W's columns, weighted by the numbers in x: an embedding bag, and torch's reads memory twice as fast as its
    product of a matrix and a vector."""
    C = x.size(-1)
    rows = x.numel() // C
    if not 1 <= rows <= FEW_ROWS or weight.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns, starts = _bags(rows, C, torch.get_num_threads())
    y = F.embedding_bag(columns, weight.t(), starts, mode="sum", per_sample_weights=x.flatten())
    y = y.view(*x.shape[:-1], -1, len(weight)).sum(-2)
    return y if bias is None else y + bias


@functools.cache
@torch.inference_mode(False)  # cached across calls, so these must not be inference tensors
def _bags(rows: int, width: int, threads: int):
    """All columns for each row, and where each thread's part of a row's sum starts."""
    parts = torch.arange(0, width, -(-width * rows // max(rows, threads)))
    return torch.arange(width).repeat(rows), (torch.arange(rows)[:, None] * width + parts).flatten()


class LinearByColumns(torch.nn.Linear):
    def forward(self, x):
        return by_columns(x, self.weight, self.bias)


class GPTByColumns(GPT):
    def readout(self, x):
        return by_columns(self.hidden(x), self.token_embedding.weight)


def for_sampling(model: GPT, compute: Compute) -> GPT:
    """`model`, in place, in evaluation mode, on the device and with its weights in the number format. On an x86 CPU its
    matrices are laid out by columns; in float16 they are not: there torch is as fast by rows."""
    model.eval().to(compute.device, DTYPES[compute.dtype])
    columns = compute.device == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if columns and compute.dtype != "float16":
        # A subclass, which may compute something else, keeps its class.
        swapped = {Linear: LinearByColumns, torch.nn.Linear: LinearByColumns, GPT: GPTByColumns}
        for module in [each for each in model.modules() if type(each) in swapped]:
            module.__class__ = swapped[type(module)]
            layer = model.token_embedding if module is model else module
            weight = layer.get_parameter("weight")
            weight.data = weight.data.t().contiguous().t()
    return model


def look(device: str) -> Machine:
    """The devices of this machine; for the `device` "cpu" CUDA is not asked."""
    if device == "cpu":
        return Machine()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(
        cuda=cuda,
        # Before compute capability 8 bfloat16 is emulated, and slow.
        bfloat16=cuda > 0 and all(torch.cuda.get_device_capability(index)[0] >= 8 for index in range(cuda)),
        mps=torch.backends.mps.is_available(),
    )


def choose(device: str, dtype: str, compile: str, machine: Machine, world=ALONE, training=True) -> Compute:
    """The device, format and compilation that the user asked for, with "auto" settled. Pure; raises Mistake if the
    machine does not have them.

    Devices: CUDA, a GPU for each of several processes, else Apple's GPU, else the CPU. Formats: bfloat16 on a GPU that
    computes in it, else float16 with a loss scaler; float32 on the others. Compilation: on CUDA. `world` are the
    processes; sampling, which is not `training`, may use float16 on a CPU.
    """
    if device == "auto":
        device = "cuda" if machine.cuda else "mps" if machine.mps and world.size == 1 else "cpu"
    kind, _, index = device.partition(":")
    if not re.fullmatch("cpu|mps|cuda(:(0|[1-9][0-9]*))?", device):
        raise Mistake(f"unknown device ({device}). Use auto, cpu, cuda, cuda:N or mps.")
    there = {"cpu": True, "cuda": machine.cuda > int(index or 0), "mps": machine.mps}
    if not there[kind]:
        raise Mistake(
            f"the device is not there ({device}; this machine has {machine.cuda} CUDA GPUs"
            f"{' and an Apple GPU' if machine.mps else ''}). Use --device auto or --device cpu."
        )
    if world.size > 1 and (index or kind == "mps"):
        raise Mistake(f"several processes cannot share a GPU ({device}). Use --device auto, cpu or cuda.")
    if world.size > 1 and kind == "cuda":
        if world.local_size > machine.cuda:
            found = f"{world.local_size} on this machine, {machine.cuda} GPUs"
            raise Mistake(f"more processes than GPUs ({found}). Use --nproc_per_node {machine.cuda}.")
        device = f"cuda:{world.local_rank}"
    formats = {
        "cpu": ["float32", "bfloat16"] if training else ["float32", "bfloat16", "float16"],
        "cuda": ["bfloat16", "float16", "float32"] if machine.bfloat16 else ["float16", "float32"],
        "mps": ["float32"],
    }[kind]
    if dtype == "auto":
        dtype = formats[0]
    if dtype not in formats:
        raise Mistake(f"no such number format on {device} ({dtype}). Use auto, {', '.join(formats)}.")
    if compile == "auto" and kind != "cuda":
        compile = "off"
    return Compute(device, dtype, compile)


def compiled(net, tokens, compute: Compute):
    """`net`, a NextToken, or torch.compile around it after a first forward and backward on `tokens` (B, T + 1); and a
    warning or None.

    Compiling starts here, so that a failure is met before any step is taken: "on" raises Mistake, "auto" goes on
    without the compiler.
    """
    if compute.compile == "off":
        return net, None
    try:
        torch.compiler.reset()  # else torch silently leaves the ninth model of a process uncompiled
        fast = torch.compile(net)
        with compute.autocast():
            fast(tokens).backward()
    except Exception as error:  # the parts of the compiler raise errors of many kinds
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if compute.compile == "on":
            with compute.autocast():
                net(tokens).backward()  # if the model has a bug, this raises it with its traceback
            raise Mistake(f"torch.compile failed ({reason}). Use --compile off.") from error
        return net, f"warning: torch.compile failed ({reason}). Going on without it."
    finally:
        net.zero_grad(set_to_none=True)
    return fast, None
