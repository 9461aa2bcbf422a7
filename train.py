"""Train a GPT: python train.py --norm pre. Settings: defaults < a TOML file < flags; `--help` lists them."""

import contextlib
import dataclasses
import hashlib
import json
import math
import signal
import sys
import time
from pathlib import Path

from gpt.command_line import CommandLine
from gpt.config import TrainConfig, configure, lookup, read_toml
from gpt.report import closing

# torch, and what imports it, is imported in the functions: `--help` should not wait for it.


class StopRequest:
    """Remembers, within a `with` block, that SIGINT or SIGTERM asked for a stop after this step; a second signal ends
    the program at once."""

    signum = None

    def __enter__(self):
        self._before = {signum: signal.signal(signum, self._asked) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _asked(self, signum, frame):
        self.signum = signum
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

    def __exit__(self, *exception):
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def train(config: TrainConfig, out: str | None = None, resume: str | None = None, overwrite=False, stop=None) -> dict:
    """Train as `config` says; returns the run folder under "run" and the last "step", "val_loss", "best_step" and
    "best_val_loss" (None without a validation split).

    `out` is the run folder, by default a fresh one in runs/; `resume`, "last", "best" or a step, continues it from that
    checkpoint; `stop`, a StopRequest, ends the run early. Raises ValueError, before anything is written, for a setting
    that does not work here; FloatingPointError, with all checkpoints intact, if the loss is not finite.
    """
    with contextlib.ExitStack() as stack:
        return _train(config, out, resume, overwrite, stop, stack)


def _train(config, out, resume, overwrite, stop, stack):
    import numpy as np
    import torch
    from tqdm import tqdm

    from gpt import checkpoint, corpus, distributed, optim, pretrained, report
    from gpt.data import Data
    from gpt.depth import depth_profile
    from gpt.model import GPT, mean_loss, next_token_loss
    from gpt.run import append, forget_later_lines, held, new_run, write
    from gpt.tokenizer import TOKENIZERS

    compute = distributed.choose(config.device, config.dtype, config.compile, distributed.look(config.device))
    tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
    if config.init == "scratch":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size))
    elif config.tokenizer != (theirs := pretrained.tokenizer_name(config.model)):
        raise ValueError(
            f"the weights are for another tokenizer ({theirs}, not {config.tokenizer}). Leave it as it was."
        )
    config = dataclasses.replace(config, data=corpus.resolve(config.data))
    ids = corpus.load(config.data, tokenizer)
    digest = hashlib.sha256(ids).hexdigest()
    data = Data(ids, config.model.context_length, config.batch_size, config.val_fraction, config.seed)
    torch.manual_seed(config.seed)
    scratch = resume or config.init == "scratch"
    model = (GPT(config.model) if scratch else pretrained.load(config.init, config.model)).to(compute.device)
    optimizer, scaler = optim.make_optimizer(model, config), compute.scaler()
    # `model` is what is evaluated, saved and sampled. Only `update` calls `net`, which may be compiled.
    net, warning = distributed.compiled(model, data.batch(0)[: config.micro_size].to(compute.device)[:, :-1], compute)
    if warning:
        print(warning, file=sys.stderr)
    if resume:
        run = Path(out)
        stack.enter_context(held(run))
        state = checkpoint.restore(checkpoint.find(run, resume), model, optimizer, config)
        if state["step"] > config.steps:
            raise ValueError(f"the run is past that (steps {config.steps}, done {state['step']}). Give more steps.")
        if scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        elsewhere = any(state["config"][name] != getattr(config, name) for name in ("data", "val_fraction"))
        if not elsewhere and state.get("corpus", digest) != digest:
            raise ValueError(f"the corpus has changed since ({config.data}). Put it back, or rename the new one.")
        if elsewhere or (state["best_step"] and not checkpoint.path_of(run, state["best_step"]).exists()):
            state |= {"val_loss": None, "best_step": None, "best_val_loss": None}  # losses of another text, or lost
        forget_later_lines(run, state["step"])
    else:
        run = new_run(out, f"{corpus.name(config.data)}-{config.model.norm}", overwrite)
        stack.enter_context(held(run))
        state = {"step": 0, "val_loss": None, "best_step": None, "best_val_loss": None}
    before = state.get("config", {})
    state |= {"config": checkpoint.config_to_json(config), "corpus": digest}
    write(run / "config.json", json.dumps(state["config"], indent=1))
    print(report.opening(config, model, data, tokenizer, compute, run, state["step"]), flush=True)
    for name, value in state["config"].items() if resume else ():
        if before.get(name, "absent") != value:
            print(f"changed {name}: {before.get(name, 'absent')} -> {value}")
    for text in report.warnings(config, model, data):
        print(text, file=sys.stderr)

    def update(step):
        """One optimizer step; returns the batch's mean loss and its gradient norm, on the device."""
        # Dropout is a function of (seed, step), so that a resumed run repeats it.
        torch.manual_seed(int(np.random.default_rng([config.seed, step, 1]).integers(2**63)))
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * optim.lr_at(step, config)
        micro_batches = data.batch(step).split(config.micro_size)
        batch_loss = 0.0
        for tokens in micro_batches:
            tokens = tokens.to(compute.device)
            with compute.autocast():
                loss = next_token_loss(net(tokens[:, :-1]), tokens[:, 1:]) / len(micro_batches)
            scaler.scale(loss).backward()
            batch_loss += loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return batch_loss, grad_norm

    probed = data.few_rows().to(compute.device)
    timed_from, clock = state["step"], time.perf_counter()
    terminal = sys.stderr.isatty()
    with tqdm(total=config.steps, initial=timed_from, unit="step", disable=not terminal, leave=False) as bar:
        for step in range(state["step"] + 1, config.steps + 1):
            loss, grad_norm = update(step - 1)
            if config.probe_every and step % config.probe_every == 0:
                append(run / "probe.jsonl", {"step": step, **depth_profile(model, probed)})
            bar.update()
            end = step == config.steps or (stop is not None and stop.signum is not None)
            evaluating = len(data.val) > 0 and (step % config.eval_every == 0 or step == config.steps)
            logging = evaluating or step % config.log_every == 0 or step in (1, config.steps)
            saving = end or step % (config.save_every or config.eval_every) == 0
            if not (logging or saving):
                continue  # without reading anything back from the device
            tokens = (step - timed_from) * config.batch_size * config.model.context_length
            record = {"step": step, "loss": loss.item(), "lr": optim.lr_at(step - 1, config)}
            record |= {"grad_norm": grad_norm.item(), "tokens_per_s": round(tokens / (time.perf_counter() - clock))}
            if evaluating:
                with compute.autocast():
                    record["val_loss"] = state["val_loss"] = mean_loss(model, data.windows(config.micro_size))
            check_finite(record, scaler, model)
            if evaluating and (state["best_step"] is None or state["val_loss"] < state["best_val_loss"]):
                state |= {"best_step": step, "best_val_loss": state["val_loss"]}
                saving = True
            if not math.isfinite(record["grad_norm"]):
                record["grad_norm"] = None  # JSON knows no infinity
            if logging:
                append(run / "metrics.jsonl", record)
                text = report.line(record, config.steps)
                bar.set_postfix_str(text.partition("  ")[2])
                if evaluating or not terminal:
                    bar.write(text)
            if saving:
                state |= {"step": step, "scaler": scaler.state_dict()}
                checkpoint.save(run, model, optimizer, state, config.keep)
            if end:
                break
            timed_from, clock = step, time.perf_counter()
    return state | {"run": run, "unit": tokenizer.unit}


def check_finite(record: dict, scaler, model):
    """Stop a run whose losses or weights are not finite. In float16 the scaler mends a gradient that is not."""
    watched = ("loss", "val_loss") if scaler.is_enabled() else ("loss", "val_loss", "grad_norm")
    finite = all(math.isfinite(record[key]) for key in watched if key in record)
    if not (finite and all(parameter.isfinite().all() for parameter in model.parameters())):
        raise FloatingPointError(
            f"the run diverged (step {record['step']}: loss {record['loss']}, rate {record['lr']:.2e}, gradient norm "
            f"{record['grad_norm']}). Lower --lr or lengthen --warmup-steps; what was saved before is intact."
        )


def closing_sample(run: Path, config: TrainConfig, characters: int = 200) -> str:
    """That many characters from the run's best checkpoint, without a prompt."""
    from gpt import checkpoint, generate
    from gpt.tokenizer import TOKENIZERS

    text = ""
    settings = {"max_new_tokens": characters, "temperature": 0.8, "seed": config.seed}
    for piece in generate.stream_text(checkpoint.load_model(run), TOKENIZERS[config.tokenizer](), "", **settings):
        text += piece
        if len(text) >= characters:
            break
    return text[:characters]


def main(argv: list[str]):
    command = CommandLine(prog="train.py", description=__doc__)
    command.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings from a file, as configs/tiny.toml")
    command.add_settings()
    command.add_argument("--out", metavar="RUN", help="run folder (default: a fresh one, runs/CORPUS-NORM)")
    command.add_argument("--resume", action="store_true", help="continue the run in --out, with its own settings")
    command.add_argument("--checkpoint", metavar="best|last|STEP", help="with --resume: where from (default: last)")
    command.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    given = vars(command.parse_args(argv))
    options = ("config", "out", "resume", "checkpoint", "overwrite")
    path, out, resume, which, overwrite = (given.pop(name) for name in options)

    def body():
        if (resume or overwrite) and out is None:
            raise ValueError("--resume and --overwrite are about the run that --out names (none). Give --out RUN.")
        if resume and overwrite:
            raise ValueError("--resume keeps the run and --overwrite deletes it (both given). Give one of them.")
        if which and not resume:
            raise ValueError(f"--checkpoint is where to resume from ({which}). Give --resume too.")
        settings = (read_toml(path) if path else {}) | given
        base = TrainConfig()
        if resume:
            from gpt.checkpoint import find, read_state

            base = read_state(find(out, which or "last"))[1]
        elif settings.get("init", "scratch") != "scratch":
            from gpt.pretrained import base_config

            base = base_config(configure({"init": settings["init"]}).init)
        config = configure(settings, base)
        with StopRequest() as stop:
            end = train(config, out, (which or "last") if resume else None, overwrite, stop)
        if stop.signum and end["step"] < config.steps:
            print(f"stopped at step {end['step']}; continue with: python train.py --resume --out {end['run']}")
            return 128 + stop.signum
        print(closing(end) + "\n")
        print(closing_sample(end["run"], config))

    command.run(body, "nobody reads the output any more (broken pipe). Continue with --resume; checkpoints are intact.")


if __name__ == "__main__":
    main(sys.argv[1:])
