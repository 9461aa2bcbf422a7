"""What a training run says, and the lines it keeps of its numbers."""

import importlib
import math
import shlex
from pathlib import Path

from gpt.config import Failure, Mistake
from gpt.files import append, courtesy
from gpt.training.distributed import World, whole
from gpt.training.settings import TrainConfig, assumed

MARGIN = 0.1  # nats below the entropy of single tokens, from which on a model has learnt more than their frequencies

# `run` is a gpt.training.trainer.Trainer, `end` the result of train.train.
# torch is imported in the functions: `--help` of the scripts should not wait for it.


class Diverged(Failure, FloatingPointError):
    """The loss or the weights of a run are not finite; `step` is the first at which this was seen."""

    def __init__(self, record: dict):
        super().__init__(record)
        self.record, self.step = record, record["step"]

    def __str__(self):
        words = {"loss": "loss", "val_loss": "val_loss", "lr": "rate", "grad_norm": "gradient norm", "scale": "scale"}
        numbers = ", ".join(f"{words[name]} {self.record[name]}" for name in words if name in self.record)
        other = " Or give --dtype float32." if "scale" in self.record else ""
        return f"the run diverged (step {self.step}: {numbers}). Lower --lr or lengthen --warmup-steps.{other}"


def finite(number: float) -> float | None:
    """The number for a line of JSON, which has no infinity: None for what is not finite."""
    return number if math.isfinite(number) else None


def require_finite(record: dict, model, scaler):
    """Raise Diverged if a step's numbers or the weights after it are not finite. In float16 the scaler mends a gradient
    that is not finite, up to a limit."""
    numbers = [record["loss"]] if scaler.is_enabled() else [record["loss"], record["grad_norm"]]
    weights = [whole(parameter.isfinite().all()) for parameter in model.parameters()]
    if not (all(map(math.isfinite, numbers)) and all(weights)):
        raise Diverged(record)
    # Each float16 step whose gradient overflows is left out, and halves the scale: from 65,536 on, 27 in a row.
    if (scale := scaler.get_scale()) < 2**-10:
        raise Diverged(record | {"scale": scale})


def stuck(run, record: dict) -> bool:
    """Whether an evaluation finds that the model knows no more than how often each token comes: its validation loss is
    not 0.1 nats below the entropy of single tokens. Warns of it once. None is judged in the first half of the steps, or
    earlier than 100 steps after the warm-up. A training loss 0.5 nats below the entropy is overfitting instead."""
    step, loss, config = record["step"], record["val_loss"], run.config
    if step < max(config.steps / 2, config.warmup_steps + 100):
        return False
    with courtesy("judge whether the run is stuck", warn=run.progress.warn):
        entropy, unit = run.data.entropy, run.tokenizer.unit
        if loss > entropy - MARGIN and record["loss"] > entropy - 0.5:
            numbers = f"validation loss {loss:.4f} at step {step}, entropy {entropy:.4f} nats, {run.run}"
            if run.world.first and not run.state.get("stuck"):
                reason = f"the run has learnt little more than how often each {unit} comes ({numbers})"
                run.progress.warn(f"warning: {reason}. Lower --lr or lengthen --warmup-steps.")
            return True
    return False


def require_tensorboard(config: TrainConfig):
    """Raise Mistake if the run is to be written for TensorBoard, and that cannot be imported."""
    if config.tensorboard:
        try:
            importlib.import_module("torch.utils.tensorboard")
        except Exception as error:  # a package that does not fit another one raises errors of many kinds
            reason = str(error).partition("\n")[0]
            raise Mistake(
                f"no TensorBoard (--tensorboard: {reason}). pip install tensorboard, or leave it out."
            ) from None


def opening(run) -> str:
    """What is about to happen, in five lines."""
    config, m, world, data, unit = run.config, run.config.model, run.world, run.data, run.tokenizer.unit
    size = f"{m.n_layers} blocks, {m.n_heads} heads, width {m.d_model}, context {m.context_length}"
    count, in_norms = run.model.count_parameters(), run.model.count_parameters("norm")
    batch = f"{config.batch_size * m.context_length:,} tokens each, {config.optimizer} at {config.peak_lr:g}"
    bound = f", at most {config.eval_tokens:,} at a time" if len(data.val) > config.eval_tokens + 1 else ""
    name = " ".join([config.data, *(f"({text})" for text in run.source)])
    processes = f"{world.size} processes, {'shards' if config.shard else 'replicas'}; " if world.size > 1 else ""
    return (
        f"model   {m.norm}: {size}; {count:,} parameters, {in_norms:,} of them in norms\n"
        f"corpus  {name}: {len(data.train):,} {unit}s to train on, {len(data.val):,} to validate on{bound}\n"
        f"steps   {run.step:,} of {config.steps:,} done, {batch}\n"
        f"device  {processes}{run.compute.device}, {run.compute.dtype}, compile {run.compute.compile}\n"
        f"run     {run.run}"
    )


def warnings(run) -> list[str]:
    """Settings that are legal but probably a mistake."""
    config, step, texts = run.config, run.step, assumed(run.config)
    if step == config.steps:
        texts.append(f"all is done already ({step} steps). Give more: --steps {2 * step}.")
    if config.warmup_steps >= config.steps:
        steps = f"{config.warmup_steps} of {config.steps} steps"
        texts.append(f"the run ends within its warm-up ({steps}). Lower --warmup-steps.")
    if config.warmup_steps == 0 and any(block.wants_warmup for block in run.model.blocks):
        placement = config.model.norm
        texts.append(
            f"{placement} may learn nothing without a warm-up (warmup_steps 0). Give --warmup-steps 100 or more."
        )
    if run.model.embedding_scale is not None and any(block.norm_on_stream for block in run.model.blocks):
        layer = f"norm_layer {config.model.norm_layer}"
        texts.append(f"{config.model.norm} may learn little with norms that undo no scale ({layer}). Give another.")
    if config.eval_every > config.steps and len(run.data.val):
        steps = f"every {config.eval_every} of {config.steps} steps"
        texts.append(f"the validation loss is computed at the end only ({steps}). Lower --eval-every.")
    if config.shard and run.world.size == 1:
        texts.append("nothing is sharded (1 process). Start several: torchrun --nproc_per_node N train.py ...")
    return [f"warning: {text}" for text in texts]


def line(record: dict, steps: int) -> str:
    """A step's record of metrics.jsonl, for the terminal."""
    val = f"  val {record['val_loss']:.4f}" if "val_loss" in record else ""
    loss, rate, speed = record["loss"], record["lr"], record["tokens_per_s"]
    return f"step {record['step']:>{len(str(steps))}}  loss {loss:.4f}{val}  rate {rate:.1e}  {speed:,} tokens/s"


def closing(end: dict) -> str:
    """How a run ended."""
    run, lines = end["run"], []
    if end["val_loss"] is not None:
        best = f"best {end['best_val_loss']:.4f} at step {end['best_step']}"
        lines.append(f"validation loss {end['val_loss']:.4f} nats per {end['unit']} at step {end['step']}; {best}")
        if end["best_step"] < end["step"]:
            lines.append(
                f"the validation loss has been rising since step {end['best_step']}; sample.py takes that checkpoint"
            )
    return "\n".join([*lines, f"run {run}; more of this: python sample.py {shlex.quote(str(run))}"])


def stopped(end: dict) -> str:
    """How to go on with a run that was stopped."""
    launcher = "python" if end["processes"] == 1 else f"torchrun --nproc_per_node {end['processes']}"
    command = f"{launcher} train.py --resume --out {shlex.quote(str(end['run']))}"
    return f"stopped at step {end['step']}; continue with: {command}"


class StepLines:
    """The loss and the gradient norm of every step, in steps.jsonl. Both stay on the device until `read`, so that
    training does not wait for them. All processes have one, and the first writes."""

    def __init__(self, run: Path, world: World):
        self.path, self.world = run / "steps.jsonl", world
        self.waiting: list[tuple] = []

    def add(self, loss, grad_norm):
        """Take the numbers of the next step, tensors of no dimension: the mean loss of this process's rows, and the
        gradient norm, which may be a DTensor."""
        self.waiting.append((loss, grad_norm))

    def read(self, step: int) -> tuple[float, float]:
        """Write the lines of all steps up to this one, the last that was added; returns its loss, the mean over the
        processes, and its gradient norm."""
        import torch

        scalars = [scalar for loss, norm in self.waiting for scalar in (loss, whole(norm))]
        numbers = torch.stack(scalars).tolist()  # one transfer for all
        losses = [total / self.world.size for total in self.world.total(numbers[::2])]
        pairs, self.waiting = [*zip(losses, numbers[1::2])], []
        if self.world.first:
            numbered = enumerate(pairs, start=step + 1 - len(pairs))
            lines = ({"step": at, "loss": finite(loss), "grad_norm": finite(norm)} for at, (loss, norm) in numbered)
            append(self.path, *lines)
        return pairs[-1]


class Lines:
    """A run's numbers by step: metrics.jsonl and, if asked and as a courtesy, TensorBoard's events, from the steps
    after `step` on. `warn` tells of their errors."""

    def __init__(self, run: Path, tensorboard: bool, step: int, warn):
        self.path = run / "metrics.jsonl"
        self.writer = None
        self.events = lambda: courtesy("write events for TensorBoard", warn=warn)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.events():
                self.writer = SummaryWriter(run, purge_step=step + 1)

    def add(self, record: dict):
        """A step's record."""
        append(self.path, record)
        if self.writer:
            with self.events():
                for name in record.keys() - {"step"}:
                    if record[name] is not None:
                        self.writer.add_scalar(name, record[name], record["step"])
                self.writer.flush()

    def close(self):
        if self.writer:
            with self.events():
                self.writer.close()
