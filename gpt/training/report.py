"""What a training run says: the lines before it starts, each step's, the warnings; its numbers in its folder."""

import contextlib
import importlib.util
import time
from pathlib import Path

from gpt.config import Mistake
from gpt.training.files import append, read_lines
from gpt.training.settings import TrainConfig


def require_tensorboard(config: TrainConfig):
    """Raise Mistake if the run is to be written for TensorBoard, and that is not installed."""
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise Mistake("TensorBoard is not installed (--tensorboard). pip install tensorboard, or leave it out.")


def opening(config: TrainConfig, model, data, tokenizer, compute, world, run, step: int) -> str:
    """What is about to happen, in five lines."""
    m = config.model
    size = f"{m.n_layers} blocks, {m.n_heads} heads, width {m.d_model}, context {m.context_length}"
    count, in_norms = model.count_parameters(), model.count_parameters("norm")
    how = f"{config.batch_size * m.context_length:,} tokens each, {config.optimizer} at {config.peak_lr:g}"
    where = f"{world.size} processes, {'shards' if config.shard else 'replicas'}; " if world.size > 1 else ""
    return (
        f"model   {m.norm}: {size}; {count:,} parameters, {in_norms:,} of them in norms\n"
        f"corpus  {config.data}: {len(data.train):,} {tokenizer.unit}s to train on, {len(data.val):,} to validate on\n"
        f"steps   {step:,} of {config.steps:,} done, {how}\n"
        f"device  {where}{compute.device}, {compute.dtype}, compile {compute.compile}\n"
        f"run     {run}"
    )


def warnings(config: TrainConfig, model, data, world, step: int = 0) -> list[str]:
    """What is allowed and seldom meant."""
    found = []
    if step == config.steps:
        found.append(f"all is done already ({step} steps). Give more: --steps {2 * step}.")
    if config.warmup_steps >= config.steps:
        steps = f"{config.warmup_steps} of {config.steps} steps"
        found.append(f"the run ends within its warm-up ({steps}). Lower --warmup-steps.")
    if config.warmup_steps == 0 and any(block.wants_warmup for block in model.blocks):
        norm = config.model.norm
        found.append(f"{norm} may learn nothing without a warm-up (warmup_steps 0). Give --warmup-steps 100 or more.")
    if config.eval_every > config.steps and len(data.val):
        steps = f"every {config.eval_every} of {config.steps} steps"
        found.append(f"the validation loss is computed at the end only ({steps}). Lower --eval-every.")
    if config.shard and world.size == 1:
        found.append("nothing is sharded (1 process). Start several: torchrun --nproc_per_node N train.py ...")
    return [f"warning: {text}" for text in found]


def line(record: dict, steps: int) -> str:
    """A step's record of metrics.jsonl, for the terminal."""
    val = f"  val {record['val_loss']:.4f}" if "val_loss" in record else ""
    loss, rate, speed = record["loss"], record["lr"], record["tokens_per_s"]
    return f"step {record['step']:>{len(str(steps))}}  loss {loss:.4f}{val}  rate {rate:.1e}  {speed:,} tokens/s"


def closing(end: dict) -> str:
    """How a run ended, from what `train` returns."""
    run, lines = end["run"], []
    if end["val_loss"] is not None:
        best = f"best {end['best_val_loss']:.4f} at step {end['best_step']}"
        lines.append(f"validation loss {end['val_loss']:.4f} nats per {end['unit']} at step {end['step']}; {best}")
        if end["best_step"] < end["step"]:
            lines.append(
                f"the validation loss rises since step {end['best_step']}; sample.py takes the checkpoint there"
            )
    return "\n".join([*lines, f"run {run}; more of this: python sample.py {run}"])


def stopped(end: dict) -> str:
    """How to go on with a run that was stopped, from what `train` returns."""
    launcher = "python" if end["processes"] == 1 else f"torchrun --nproc_per_node {end['processes']}"
    return f"stopped at step {end['step']}; continue with: {launcher} train.py --resume --out {end['run']}"


class Log:
    """A run's numbers from `step` on, in its folder: metrics.jsonl, curve.png and, if asked, TensorBoard's events."""

    def __init__(self, run: Path, tensorboard: bool, step: int, unit: str):
        self.run, self.unit, self.drawn = run, unit, time.monotonic()
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(run, purge_step=step + 1)

    def add(self, record: dict):
        """A step's record."""
        append(self.run / "metrics.jsonl", record)
        if self.writer:
            for name in record.keys() - {"step"}:
                if record[name] is not None:
                    self.writer.add_scalar(name, record[name], record["step"])
            self.writer.flush()

    def draw(self, end: bool):
        """Draw curve.png again, at most once a second before the `end`."""
        if end or time.monotonic() - self.drawn >= 1:
            from gpt.study import plots

            with contextlib.suppress(OSError):  # Windows replaces no picture that is looked at: the next time will do
                plots.training_curve(read_lines(self.run / "metrics.jsonl"), self.unit, self.run / "curve.png")
            self.drawn = time.monotonic()

    def close(self):
        if self.writer:
            self.writer.close()


def closing_sample(run: Path, config: TrainConfig, characters: int = 200) -> str:
    """That many characters from the run's best checkpoint, without a prompt."""
    from gpt import generate
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint

    text = ""
    settings = {"max_new_tokens": characters, "temperature": 0.8, "seed": config.seed}
    for piece in generate.stream_text(checkpoint.load_model(run), TOKENIZERS[config.tokenizer](), "", **settings):
        text += piece
        if len(text) >= characters:
            break
    return text[:characters]
