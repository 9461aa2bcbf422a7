"""What a run holds while it trains: corpus, model, optimizer, folder; how it evaluates, records and saves."""

import contextlib
import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from gpt.config import Mistake, lookup
from gpt.files import append, courtesy, write
from gpt.loss import NextToken
from gpt.model import GPT
from gpt.screen import say
from gpt.study.depth import depth_profile
from gpt.tokenizer import TOKENIZERS
from gpt.training import checkpoint, corpus, device, distributed, optim, report
from gpt.training.code import code_of
from gpt.training.data import Data
from gpt.training.lock import held
from gpt.training.progress import Progress
from gpt.training.run import StopRequest, forget_later_lines, new_run
from gpt.training.settings import TrainConfig, located, weights_of


class Trainer:
    """A run, from its set-up to its end, as a context manager: entering it meets every mistake before the first step.

    `model` is the plain module, which is evaluated, saved and sampled. Only a training step calls `net`, which may be
    compiled or replicated. `state` is what state.json of a checkpoint has. The arguments are those of train.train, and
    `update`, the function of one step: `code` is the checksum of what decides a run, and this is a part of it.
    """

    def __init__(self, config: TrainConfig, out: str | None, resume: str | None, overwrite: bool, progress, update):
        self.world = distributed.world()
        self.micro_size = config.micro_size(self.world.size)
        self.compute = device.choose(
            config.device, config.dtype, config.compile, device.look(config.device), self.world
        )
        if config.shard and self.compute.dtype == "float16" and self.world.size > 1:
            raise Mistake("--shard works in bfloat16 or float32 (float16). Give --dtype float32.")
        report.require_tensorboard(config)
        self.config, self.out, self.resume, self.overwrite, self.progress = config, out, resume, overwrite, progress
        self.update, self.code = update, None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(distributed.joined(self.world, self.compute.device))
            stack.callback(vars(self).clear)  # a reference to the process group that outlives it can hang the exit
            self._load()
            warning = self._build()
            self._begin(stack, warning, self._open(stack))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        return self._stack.__exit__(*exception)

    def _load(self):
        """Load the corpus and make the model, the same in all processes."""
        config = self.config
        self.tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
        if config.init == "scratch":
            shape = dataclasses.replace(config.model, vocab_size=self.tokenizer.vocab_size)
            config = dataclasses.replace(config, model=shape)
        elif not self.resume:
            load = weights_of(config)
        self.config = config = dataclasses.replace(config, data=corpus.resolve(config.data), init=located(config.init))
        self.source = []
        ids = self.world.in_turn(lambda: corpus.load(config.data, self.tokenizer, self.source.append))
        torch.manual_seed(config.seed)
        if self.resume or config.init == "scratch":
            self.model = GPT(config.model)
        else:
            self.model = self.world.in_turn(load)
        with courtesy("tell which code trains"):
            self.code = code_of(self.model, self.update)
        self.digest = corpus.digest(ids)
        sizes = config.model.context_length, config.batch_size, config.val_fraction
        self.data = Data(ids, *sizes, config.seed, config.eval_tokens)
        self.settings = checkpoint.config_to_json(config)
        mine = [self.settings, self.digest, self.resume]
        if self.world.from_first(lambda: mine) != mine:
            raise Mistake(f"the processes differ in settings or corpus ({config.data}). Start all by the same command.")

    def _build(self) -> str | None:
        """Put the model on its device, and what trains it around it; returns a warning of the compiler's."""
        compute, several = self.compute, self.world.size > 1
        self.model.to(compute.device).train()
        if several and self.config.shard:
            distributed.shard(self.model)
        self.optimizer, self.scaler = optim.make_optimizer(self.model, self.config), compute.scaler()
        self.loss = NextToken(self.model)
        if compute.compile != "off" and self.world.first:
            say("compiling the model, which takes about a minute (--compile off goes without)")
        tokens = self.data.batch(0)[: self.micro_size].to(compute.device)
        self.net, warning = device.compiled(self.loss, tokens, compute)
        if several and not self.config.shard:
            self.net = distributed.replicated(self.net, compute.device)
        self.probed = self.data.few_rows().to(compute.device)
        return warning

    def _open(self, stack) -> list[str]:
        """Make the run's folder, or go on from a checkpoint in it; returns a line on each setting that has changed."""
        self._tensors: list[dict] = [{}, {}]  # the first process reads them, and hands them to all
        self.run, self.state, changes = self.world.from_first(lambda: self._open_folder(stack))
        # The record of the checkpoint's step, unless that is logged: then what was due after it is done again.
        self.unfinished: dict | None = self.state.get("record")
        if self.resume:
            distributed.restore(self.model, self.optimizer, self.world, *self._tensors)
            self.world.from_first(self._leave_branch)
            if self.scaler.is_enabled() and self.state["scaler"]:
                self.scaler.load_state_dict(self.state["scaler"])
        del self._tensors
        return changes

    def _leave_branch(self):
        checkpoint.leave_branch(self.run, self.state)
        probes_again = self.unfinished is not None and self.probes(self.step)
        forget_later_lines(self.run, self.step, probes_again)

    def _open_folder(self, stack) -> tuple[Path, dict, list[str]]:
        """The part of `_open` that the first process does."""
        name = f"{corpus.name(self.config.data)}-{self.config.model.norm}"
        run = Path(self.out or "") if self.resume else new_run(self.out, name, self.overwrite)
        stack.enter_context(held(run))
        checkpoint.try_folder(run)
        if not self.resume:
            return run, {"step": 0, "val_loss": None, "best_step": None, "best_val_loss": None}, []
        state, *self._tensors, changes = checkpoint.resume(run, self.resume, self.config, self.digest)
        before, now = state.get("code") or self.code, self.code or state.get("code")
        if before != now:
            changes.append(f"changed code: {before!s:.8} -> {now:.8}, after step {state['step']}")
        return run, state, changes

    def _begin(self, stack, warning: str | None, changes: list[str]):
        """Say what is about to happen, and open what will be written."""
        self.progress = self.progress or stack.enter_context(Progress(self.config.steps, self.step, self.world.first))
        self.step_lines = report.StepLines(self.run, self.world)
        if self.world.first:
            write(self.run / "config.json", json.dumps(self.settings, indent=1))
            self.lines = report.Lines(self.run, self.config.tensorboard, self.step, self.progress.warn)
            stack.callback(self.lines.close)
            warnings = [*filter(None, [warning]), *report.warnings(self)]
            self.progress.begin("\n".join([report.opening(self), *changes]), warnings)
        self.drawn, self.clock = time.monotonic(), (self.step, time.perf_counter())

    @property
    def step(self) -> int:
        """The step of the last checkpoint, 0 before the first."""
        return self.state["step"]

    def evaluates(self, step: int) -> bool:
        """Whether the validation loss is due after this step."""
        return len(self.data.val) > 0 and (step % self.config.eval_every == 0 or step == self.config.steps)

    def logs(self, step: int) -> bool:
        """Whether a line of metrics.jsonl is due after this step."""
        return self.evaluates(step) or step % self.config.log_every == 0 or step in (1, self.config.steps)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, be it the last or not."""
        return step % (self.config.save_every or self.config.eval_every) == 0

    def probes(self, step: int) -> bool:
        """Whether a line of probe.jsonl is due after this step."""
        return self.config.probe_every is not None and step % self.config.probe_every == 0

    def stopping(self, stop: StopRequest | None) -> int:
        """The number of the signal by which any process was asked to stop, else 0."""
        return 0 if stop is None else self.world.largest(stop.signum or 0)

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        """This process's micro-batches of the step counted from 0, (micro_size, T + 1) each. Also seeds dropout, which
        is a function of (seed, step, process), so that a resumed run repeats it."""
        torch.manual_seed(int(np.random.default_rng([self.config.seed, step, 1 + self.world.rank]).integers(2**63)))
        return self.data.batch(step, self.world.rank, self.world.size).split(self.micro_size)

    def probe(self, step: int):
        """Add the depth profile of a few fixed rows to probe.jsonl."""
        profile = depth_profile(self.model, self.probed)
        if self.world.first:
            append(self.run / "probe.jsonl", {"step": step, **profile})

    def record(self, step: int) -> dict:
        """The numbers of a step, read back from the device. Raises Diverged if they or the weights are not finite."""
        tokens = (step - self.clock[0]) * self.config.batch_size * self.config.model.context_length
        loss, grad_norm = self.step_lines.read(step)
        record: dict = {"step": step, "loss": loss, "lr": optim.lr_at(step - 1, self.config), "grad_norm": grad_norm}
        record["tokens_per_s"] = round(tokens / (time.perf_counter() - self.clock[1]))
        report.require_finite(record, self.model, self.scaler)
        return record | {"grad_norm": report.finite(grad_norm)}

    def save(self, record: dict):
        """Write a checkpoint of the record's step."""
        self.state |= {"step": record["step"], "record": record, "config": self.settings, "corpus": self.digest}
        self.state |= {"scaler": self.scaler.state_dict(), "code": self.code}
        tensors = distributed.gathered(self.model, self.optimizer, self.world)
        self.world.from_first(lambda: checkpoint.save(self.run, *tensors, self.state))

    def evaluate(self, record: dict):
        """Add the validation loss to a step's record. If it is the least so far, the step becomes the best, and is
        saved if it was not."""
        with self.compute.autocast():
            windows = self.data.windows(self.micro_size, self.world.rank, self.world.size)
            record["val_loss"] = mean_loss(self.loss, windows, self.world)
        if not math.isfinite(record["val_loss"]):
            raise report.Diverged(record)
        self.state |= {"val_loss": record["val_loss"], "stuck": report.stuck(self, record)}
        if self.state["best_step"] is None or record["val_loss"] < self.state["best_val_loss"]:
            self.state |= {"best_step": record["step"], "best_val_loss": record["val_loss"]}
            if self.step != record["step"]:
                self.save(record)

    def tidy(self):
        """Note in the newest checkpoint what its evaluation has added, and delete the checkpoints that may go."""
        self.world.from_first(lambda: checkpoint.tidy(self.run, self.state, self.config.keep))

    def log(self, record: dict):
        """Write a step's record to metrics.jsonl and to the terminal."""
        if self.world.first:
            self.lines.add(record)
            self.progress.log(report.line(record, self.config.steps), "val_loss" in record)

    def outcome(self, signum: int) -> dict:
        """The result of train.train."""
        rest = {"unit": self.tokenizer.unit, "first": self.world.first, "processes": self.world.size}
        rest |= {"code": self.code, "corpus": self.digest, "run": self.run, "signum": signum}
        return {"stuck": False} | self.state | rest


@torch.no_grad()
def mean_loss(net: NextToken, windows, world=distributed.ALONE) -> float:
    """The loss per token over the (B, T + 1) `windows` of tokens, in evaluation mode. Of several processes each has its
    own windows, as many as the others; all get the result."""
    loss, count, training = 0.0, 0, net.training
    net.eval()
    for tokens in windows:
        targets = tokens[:, 1:].numel()
        # FSDP needs every process in each forward: one without rows computes two tokens, uncounted.
        some = tokens if targets else tokens.new_zeros(1, 2)
        mean = net(some.to(net.model.token_embedding.weight.device)).item()
        if targets:
            loss, count = loss + mean * targets, count + targets
    net.train(training)
    loss, count = world.total([loss, count])
    return loss / count
