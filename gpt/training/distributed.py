"""The processes that torchrun starts, and how they share a model's work."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from gpt.config import Failure, Mistake

# torch is imported in the functions: a user's mistake should be answered at once.


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started: number `rank` of `size`, `local_rank` of `local_size` on this
    machine. Alone it is number 0 of 1, and nothing is exchanged."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and saves."""
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """The sums over all processes, on each of them."""
        return self._reduce(values, "SUM")

    def largest(self, value: int) -> int:
        """The largest of all processes' values, on each of them."""
        return int(self._reduce([value], "MAX")[0])

    def _reduce(self, values, operation):
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return tensor.tolist()

    def from_first(self, function: Callable):
        """Call `function` on process 0 while the others wait; return its result on all. A Mistake, a Failure or an
        OSError is raised on all; for another error the others lose process 0."""
        if self.size == 1:
            return function()
        import torch.distributed as dist

        outcome: list = [None, None]
        if self.first:
            try:
                outcome[0] = function()
            except (Mistake, Failure, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1]:
            raise outcome[1]
        return outcome[0]

    def in_turn(self, function: Callable):
        """Call `function` on process 0 first, then on the others (so that downloads happen once); return its result on
        this process."""
        result = []
        self.from_first(lambda: result.append(function()))
        return result[0] if result else function()


ALONE = World()


def world() -> World:
    """The processes that torchrun started, as its environment describes them; else this one alone. Raises Mistake if
    that describes none that can meet, or if torchrun may restart processes while its rendezvous store keeps stale
    addresses."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    values = {name: os.environ.get(name, "") for name in names}
    if not (values["RANK"] and values["WORLD_SIZE"]) or (values["RANK"], values["WORLD_SIZE"]) == ("0", "1"):
        return ALONE
    rank, size, local_rank, local_size, port = (
        int(value) if value.isdecimal() and len(value) < 20 else -1 for value in [*values.values()][:-1]
    )
    able = 0 <= rank < size and 0 <= local_rank < local_size <= size and 0 < port < 2**16
    if not (able and values["MASTER_ADDR"]):
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        raise Mistake(f"these processes cannot meet ({text}). Start them by torchrun, or unset RANK and WORLD_SIZE.")
    restarts, shared = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("MAX_RESTARTS", "USE_AGENT_STORE"))
    if restarts not in (None, "0") and shared == "True":
        remedy = "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        raise Mistake(f"restarted processes may not find each other (--max-restarts {restarts}). {remedy}.")
    return World(rank, size, local_rank, local_size)


@contextlib.contextmanager
def joined(world: World, device: str):
    """Connect the processes for the length of a `with` block: NCCL for GPUs, gloo for CPUs. Raises Failure if one of
    them cannot be reached or is lost later."""
    if world.size == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"  # Windows has no NCCL
    elif os.environ.get("OMP_NUM_THREADS", "1") == "1" and world.local_size > 1:  # torchrun's value, not the user's
        torch.set_num_threads(max(1, cores() // world.local_size))
    try:
        # Python's handler would wait until the processes have met.
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
        signal.signal(signal.SIGTERM, before)
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # torchrun repeats the words of the process that failed first, by times in whole seconds. So this one waits: it
        # speaks later, or torchrun ends it by SIGTERM before.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
        reason = str(error).partition("\n")[0]
        remedy = "Its own message says why; if it was tokenizing for long, prepare the corpus: data/prepare.py"
        raise Failure(f"another process of this job is gone or late ({reason}). {remedy}") from error
    finally:
        if dist.is_initialized():
            gc.collect()  # DistributedDataParallel is in a cycle, and threads of a group that lives on abort the exit
            dist.destroy_process_group()


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reported(main: Callable) -> Callable:
    """`main`, wrapped so that torchrun, if it started this process, repeats the message that ends it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return main
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(main)


def shard(model):
    """Split a model's weights over all processes, block by block, in place (FSDP2). Raises Mistake for a weight that
    cannot be split."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    unfit = {name: "two modules share it" for name in shared(model)}
    for name, weight in model.named_parameters():
        if weight.dim() == 0:
            unfit[name] = "it has no dimension"
        elif not weight.is_contiguous():
            unfit[name] = "it is a transposed view"
        elif weight.requires_grad and weight.dtype != model.token_embedding.weight.dtype:
            unfit[name] = f"it is in {weight.dtype}, unlike the rest"
    for name, reason in unfit.items():
        raise Mistake(f"--shard cannot split a weight ({name}: {reason}). Leave --shard out.")
    mesh = init_device_mesh(model.token_embedding.weight.device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "residual_stream")  # the loss calls it without model.forward


def shared(model) -> list[str]:
    """The second names of weights that have two."""
    first = dict(model.named_parameters())
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in first]


def replicated(net, device: str):
    """`net` in DistributedDataParallel: all processes average their gradients in each backward."""
    import torch

    devices = [device] if device.startswith("cuda") else None
    return torch.nn.parallel.DistributedDataParallel(net, device_ids=devices, gradient_as_bucket_view=True)


def exchanging(model, net, last: bool):
    """A context for the forward and backward of a micro-batch: processes exchange gradients in the last one only.
    `model` may be sharded, and `net`, which calls it, replicated."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(net, "no_sync") and not last:
        return net.no_sync()
    return contextlib.nullcontext()


def whole(x):
    """The full tensor: gathers a DTensor, returns others unchanged."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x, full):
    """`full`, sharded like x if x is a DTensor."""
    if not hasattr(x, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, Replicate  # takes a second, and only sharded models need it

    replicas = DTensor.from_local(full, x.device_mesh, [Replicate()], run_check=False)
    return replicas.redistribute(placements=x.placements)


def gathered(model, optimizer, world: World) -> tuple[dict, dict]:
    """The weights by name and each one's optimizer tensors, {"wte": {"exp_avg": ...}}, in full; of several processes
    only the first gets them, on the CPU."""
    if world.size == 1:
        return model.state_dict(), {name: optimizer.state[p] for name, p in model.named_parameters()}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, rest = get_state_dict(model, optimizer, options=options)
    return weights, cast(dict, rest.get("state", {}))


def restore(model, optimizer, world: World, weights: dict, moments: dict):
    """The opposite of `gathered`: the first process hands them to all."""
    groups = optimizer.state_dict()["param_groups"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if world.size == 1:
        model.load_state_dict(weights)
        # torch numbers the parameters in the order of the groups, and knows which value belongs on which device.
        state = dict(enumerate(moments[name] for names in order for name in names))
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    groups = [group | {"params": names} for group, names in zip(groups, order)]
    # torch gives a weight of two names one of them.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not shared(model))
    # Not set_state_dict, which passes over the weights where there are none to give.
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=options)
