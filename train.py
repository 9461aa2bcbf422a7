"""Train a GPT: python train.py --norm pre. Settings: defaults < a TOML file < flags; `--help` lists them."""

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path

from gpt.command_line import CommandLine, Progress
from gpt.config import Mistake, lookup
from gpt.training.distributed import reported
from gpt.training.files import append, held, write
from gpt.training.report import closing, closing_sample, require_tensorboard, stopped
from gpt.training.run import StopRequest, forget_later_lines, new_run
from gpt.training.settings import SETTINGS, TrainConfig, configure, from_weights, read_toml, tokenizer_of

# torch, and what imports it, is imported in the functions: `--help` should not wait for it.


def train(
    config: TrainConfig, out: str | None = None, resume: str | None = None, overwrite=False, stop=None, progress=None
) -> dict:
    """Train as `config` says; returns the run folder under "run" and the last "step", "val_loss", "best_step" and
    "best_val_loss" (None without a validation split).

    `out` is the run folder, by default a fresh one in runs/; `resume`, "last", "best" or a step, continues it from that
    checkpoint; `stop`, a StopRequest, ends the run early; `progress` is that of several runs. Every process that
    torchrun started calls this alike.
    Raises Mistake, before anything is written, for a setting that does not work here; FloatingPointError, with all
    checkpoints intact, if the loss is not finite; ConnectionError if another process is lost.
    """
    from gpt.training import device, distributed

    world = distributed.world()
    config.micro_size(world.size)
    compute = device.choose(config.device, config.dtype, config.compile, device.look(config.device), world)
    if config.shard and compute.dtype == "float16" and world.size > 1:
        raise Mistake("--shard works in bfloat16 or float32 (float16). Give --dtype float32.")
    require_tensorboard(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed.joined(world, compute.device))
        return _train(config, out, resume, overwrite, stop, progress, world, compute, stack)


def _train(config, out, resume, overwrite, stop, progress, world, compute, stack):
    import numpy as np
    import torch

    from gpt import pretrained
    from gpt.model import GPT, mean_loss
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus, device, distributed, optim, report
    from gpt.training.data import Data

    first = world.rank == 0  # the one that prints, logs and saves
    tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
    if config.init == "scratch":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))
    elif config.tokenizer != (theirs := tokenizer_of(config.model)):
        raise Mistake(f"the weights are for another tokenizer ({theirs}, not {config.tokenizer}). Leave it as it was.")
    config = dataclasses.replace(config, data=corpus.resolve(config.data))
    scratch = resume or config.init == "scratch"

    def load():
        torch.manual_seed(config.seed)
        model = GPT(config.model) if scratch else pretrained.load(config.init, config.model)
        return corpus.load(config.data, tokenizer), model

    ids, model = world.in_turn(load)  # what is downloaded is downloaded once
    digest = corpus.digest(ids)
    data = Data(ids, config.model.context_length, config.batch_size, config.val_fraction, config.seed)
    micro_size = config.micro_size(world.size)
    settings = checkpoint.config_to_json(config)
    if world.from_first(lambda: [settings, digest, resume]) != [settings, digest, resume]:
        raise Mistake(f"the processes differ in settings or corpus ({config.data}). Start all by the same command.")
    model.to(compute.device)
    if config.shard and world.size > 1:
        distributed.shard(model)
    optimizer, scaler = optim.make_optimizer(model, config), compute.scaler()
    # `model` is what is evaluated, saved and sampled. Only `update` calls `net`, which may be compiled or replicated.
    net, warning = device.compiled(model, data.batch(0)[:micro_size].to(compute.device), compute)
    if world.size > 1 and not config.shard:
        net = distributed.replicated(net, compute.device)
    weights, moments = {}, {}

    def open_run():
        run = Path(out) if resume else new_run(out, f"{corpus.name(config.data)}-{config.model.norm}", overwrite)
        stack.enter_context(held(run))
        if not resume:
            return run, {"step": 0, "val_loss": None, "best_step": None, "best_val_loss": None}, []
        nonlocal weights, moments
        state, weights, moments, changes = checkpoint.resume(run, resume, config, digest)
        return run, state, changes

    run, state, changes = world.from_first(open_run)
    if resume:
        distributed.restore(model, optimizer, world, weights, moments)
        if first:
            forget_later_lines(run, state["step"])
        if scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
    progress = progress or stack.enter_context(Progress(config.steps, state["step"], first))
    if first:
        write(run / "config.json", json.dumps(settings, indent=1))
        log = report.Log(run, config.tensorboard, state["step"], tokenizer.unit)
        stack.callback(log.close)
        opening = report.opening(config, model, data, tokenizer, compute, world, run, state["step"])
        warnings = [*filter(None, [warning]), *report.warnings(config, model, data, world, state["step"])]
        progress.begin("\n".join([opening, *changes]), warnings)

    def update(step):
        """One optimizer step; returns the mean loss of this process's rows and the gradient norm, on the device."""
        # Dropout is a function of (seed, step, process), so that a resumed run repeats it.
        torch.manual_seed(int(np.random.default_rng([config.seed, step, 1 + world.rank]).integers(2**63)))
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * optim.lr_at(step, config)
        micro_batches = data.batch(step, world.rank, world.size).split(micro_size)
        batch_loss = 0.0
        for number, tokens in enumerate(micro_batches, start=1):
            tokens = compute.put(tokens)
            with distributed.exchanging(net, number == len(micro_batches)):
                with compute.autocast():
                    loss = net(tokens[:, :-1], tokens[:, 1:]) / len(micro_batches)
                scaler.scale(loss).backward()
            batch_loss += loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return batch_loss, grad_norm

    probed = data.few_rows().to(compute.device)

    def probe(step):
        profile = depth_profile(model, probed)
        if first:
            append(run / "probe.jsonl", {"step": step, **profile})

    if config.probe_every and state["step"] == 0:
        probe(0)
    timed_from, clock, asked = state["step"], time.perf_counter(), 0
    for step in range(state["step"] + 1, config.steps + 1):
        loss, grad_norm = update(step - 1)
        if config.probe_every and step % config.probe_every == 0:
            probe(step)
        progress.step()
        asked = world.largest(stop.signum or 0) if stop is not None else 0  # a signal since then waits for a step
        end = step == config.steps or asked > 0
        evaluating = len(data.val) > 0 and (step % config.eval_every == 0 or step == config.steps)
        logging = evaluating or step % config.log_every == 0 or step in (1, config.steps)
        saving = end or step % (config.save_every or config.eval_every) == 0
        if not (logging or saving):
            continue  # without reading anything back from the device
        tokens = (step - timed_from) * config.batch_size * config.model.context_length
        record = {"step": step, "loss": world.total([loss.item()])[0] / world.size}
        record |= {"lr": optim.lr_at(step - 1, config), "grad_norm": optim.whole(grad_norm).item()}
        record["tokens_per_s"] = round(tokens / (time.perf_counter() - clock))
        if evaluating:
            with compute.autocast():
                windows = data.windows(micro_size)
                record["val_loss"] = mean_loss(model, windows, world.rank, world.size, world.total)
            state["val_loss"] = record["val_loss"]
        optim.check_finite(record, scaler, model)
        if evaluating and (state["best_step"] is None or state["val_loss"] < state["best_val_loss"]):
            state |= {"best_step": step, "best_val_loss": state["val_loss"]}
            saving = True
        if not math.isfinite(record["grad_norm"]):
            record["grad_norm"] = None  # JSON knows no infinity
        if logging and first:
            log.add(record)
            progress.log(report.line(record, config.steps), evaluating)
        if saving:
            state |= {"step": step, "scaler": scaler.state_dict(), "config": settings, "corpus": digest}
            checkpoint_of = (run, *distributed.gathered(model, optimizer, world), state, config.keep)
            world.from_first(functools.partial(checkpoint.save, *checkpoint_of))
        if first and (evaluating or saving):
            log.draw(end)
        if end:
            break
        timed_from, clock = step, time.perf_counter()
    return state | {"run": run, "unit": tokenizer.unit, "first": first, "signum": asked, "processes": world.size}


def main(argv: list[str]):
    hints = {"": "A setting is a flag, as --norm post."}
    usage = "train.py [CONFIG.toml] [--SETTING VALUE]..."
    command = CommandLine(hints, prog="train.py", usage=usage, description=__doc__)
    command.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings from a file, as configs/tiny.toml")
    command.add_settings(SETTINGS)
    command.add_argument("--out", metavar="RUN", help="run folder (default: a fresh one, runs/CORPUS-NORM)")
    text = "continue the run in --out, with its own settings; with auto: if there is one, else start it"
    command.add_argument("--resume", nargs="?", const="yes", metavar="auto", help=text)
    command.add_argument("--checkpoint", metavar="best|last|STEP", help="with --resume: where from (default: last)")
    command.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    given = vars(command.parse_args(argv))
    options = ("config", "out", "resume", "checkpoint", "overwrite")
    path, out, resume, which, overwrite = (given.pop(name) for name in options)

    def body():
        if resume not in (None, "yes", "auto"):
            raise Mistake(f"--resume takes auto or nothing ({resume}). Name the run by --out.")
        if out == "" or ((resume or overwrite) and not out):
            raise Mistake("--out names no run (none). Give --out RUN; --resume and --overwrite are about that one.")
        if resume and overwrite:
            raise Mistake("--resume keeps the run and --overwrite deletes it (both given). Give one of them.")
        if which and resume != "yes":
            raise Mistake(f"--checkpoint is where to resume from ({which}). Give --resume too.")
        begun = resume == "yes" or (resume == "auto" and (Path(out) / "last").exists())
        settings = (read_toml(path) if path else {}) | given
        for name in settings.keys() & {*options[1:]}:
            raise Mistake(f"that is a flag and no setting ({name} in {path}). Give --{name}.")
        base = TrainConfig()
        if begun:
            from gpt.training.checkpoint import find, read_state

            base = read_state(find(out, which or "last"))[1]
        elif settings.get("init", "scratch") != "scratch":
            base = from_weights(configure({"init": settings["init"]}).init)
        config = configure(settings, base)
        with StopRequest() as stop:
            # A run that ended before it saved has nothing to lose.
            end = train(config, out, (which or "last") if begun else None, overwrite or resume == "auto", stop)
        if end["signum"] and end["step"] < config.steps:
            if end["first"]:
                print(stopped(end))
            return 128 + end["signum"]
        if not end["first"]:
            return
        print(closing(end) + "\n")
        print(closing_sample(end["run"], config))

    unread = "nobody reads the output any more (broken pipe). What was saved is intact: --resume auto --out RUN."
    command.run(reported(body), unread)


if __name__ == "__main__":
    main(sys.argv[1:])
