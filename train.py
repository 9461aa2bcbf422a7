"""Train a GPT: python train.py --norm pre. Settings: defaults < a TOML file < flags; `--help` lists them."""

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from gpt.command_line import CommandLine
from gpt.config import Mistake
from gpt.files import courtesy, read_lines
from gpt.screen import tell
from gpt.training.distributed import reported
from gpt.training.report import closing, stopped
from gpt.training.run import StopRequest, checkpoints, newest_run
from gpt.training.settings import SETTINGS, TrainConfig, configure, from_weights, read_toml

# torch, and what imports it, is imported in the functions: `--help` should not wait for it.


def train(
    config: TrainConfig, out: str | None = None, resume: str | None = None, overwrite=False, stop=None, progress=None
) -> dict:
    """Train as `config` says; returns the run folder under "run" and the last "step", "val_loss", "best_step" and
    "best_val_loss" (None without a validation split); "stuck": whether the last evaluation was that of a stuck run, as
    gpt.training.report.stuck has it (False without a validation split); the checksums of the "code" and the "corpus".

    `out` is the run folder, by default a fresh one in runs/; `resume`, "last", "best" or a step, continues it from that
    checkpoint; `stop`, a StopRequest, ends the run early; `progress` is a bar that several runs share. Every process
    that torchrun started calls this alike.
    Raises Mistake, before anything is written, for a setting that does not work here; Failure, with all checkpoints
    intact, if the loss is not finite (Diverged), the disk is full or another process is lost.
    """
    from gpt.training.trainer import Trainer

    with Trainer(config, out, resume, overwrite, progress, update) as run:
        config, signum = run.config, 0
        if run.unfinished:
            finish(run, run.unfinished, last=run.step == config.steps)
        elif run.probes(0) and run.step == 0:
            run.probe(0)
        for step in range(run.step + 1, config.steps + 1):
            run.step_lines.add(*update(run, step - 1))  # the loss and the gradient norm stay on the device
            run.progress.step()
            signum = run.stopping(stop)  # a signal that comes later waits for the next step
            last = signum > 0 or step == config.steps
            if last or run.saves(step) or run.logs(step) or run.probes(step):
                record = run.record(step)  # the first look at the device
                if last or run.saves(step):
                    run.save(record)
                finish(run, record, last)
            if last:
                break
        return run.outcome(signum)


def update(run, step: int):
    """One optimizer step, counted from 0; returns the mean loss of this process's rows and the gradient norm."""
    from torch.nn.utils import clip_grad_norm_

    from gpt.training.distributed import exchanging
    from gpt.training.optim import lr_at

    for group in run.optimizer.param_groups:
        group["lr"] = group["scale"] * lr_at(step, run.config)
    micro_batches, batch_loss = run.batch(step), 0.0
    for number, tokens in enumerate(micro_batches, start=1):
        with exchanging(run.model, run.net, last=number == len(micro_batches)):
            with run.compute.autocast():
                loss = run.net(run.compute.put(tokens)) / len(micro_batches)
            run.scaler.scale(loss).backward()
        batch_loss += loss.detach()
    run.scaler.unscale_(run.optimizer)
    grad_norm = clip_grad_norm_(run.model.parameters(), run.config.grad_clip or math.inf)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return batch_loss, grad_norm


def finish(run, record: dict, last: bool):
    """Do what is due after a step: evaluate, probe, log, draw. Saving came first, so no failure here loses the step."""
    step = record["step"]
    if run.evaluates(step):
        run.evaluate(record)
    if run.step == step:
        run.tidy()
    if run.probes(step):
        run.probe(step)
    if run.logs(step):
        run.log(record)
    if run.world.first and (run.evaluates(step) or run.step == step):
        draw(run, last)
    run.clock = step, time.perf_counter()


def draw(run, last: bool):
    """Draw curve.png again, at most once a second before the last step. It is a courtesy."""
    if last or time.monotonic() - run.drawn >= 1:
        with courtesy("draw curve.png", warn=run.progress.warn):
            from gpt.study import plots

            plots.training_curve(read_lines(run.run / "metrics.jsonl"), run.tokenizer.unit, run.run / "curve.png")
        run.drawn = time.monotonic()


def closing_sample(run: Path, config: TrainConfig, characters: int = 200) -> str:
    """That many characters from the run's best checkpoint, without a prompt."""
    from gpt.generate import Sampling, stream_text
    from gpt.tokenizer import TOKENIZERS
    from gpt.training.checkpoint import load_model

    text, tokenizer = "", TOKENIZERS[config.tokenizer]()
    sampling = Sampling(characters, temperature=0.8, seed=config.seed, vocab_size=tokenizer.vocab_size)
    for piece in stream_text(load_model(run), tokenizer, "", sampling):
        text += piece
        if len(text) >= characters:
            break
    return text[:characters]


OPTIONS = ("config", "out", "resume", "checkpoint", "overwrite")  # the flags that are no settings


def run(flags: dict) -> int:
    """Train as the flags say; returns the exit status."""
    path, out, resume, which, overwrite = (flags.pop(name) for name in OPTIONS)
    if resume not in (None, "yes", "auto"):
        raise Mistake(f"--resume takes auto or nothing ({resume}). Name the run by --out.")
    if out is None and (overwrite or resume == "auto"):
        raise Mistake("--resume auto and --overwrite need the run's name (none). Give --out RUN.")
    if resume and overwrite:
        raise Mistake("--resume keeps the run and --overwrite deletes it (both given). Give one of them.")
    if which is not None and resume != "yes":
        raise Mistake(f"--checkpoint is where to resume from ({which}). Give --resume too.")
    if resume and out is None:
        out = str(newest_run())
    which = "last" if which is None else which
    begun = resume == "yes" or (resume == "auto" and checkpoints(Path(out)))
    settings = ({} if path is None else read_toml(path)) | flags
    for name in settings.keys() & {*OPTIONS[1:]}:
        raise Mistake(f"that is a flag and no setting ({name} in {path}). Give --{name}.")
    base = TrainConfig()
    if begun:
        from gpt.training.checkpoint import find, read_state

        base = read_state(find(out, which))[1]
    elif settings.get("init", "scratch") != "scratch":
        base = from_weights(configure({"init": settings["init"]}).init)
    config = configure(settings, base)
    with StopRequest() as stop:
        # With auto, a run that ended before its first checkpoint has nothing to lose.
        end = train(config, out, which if begun else None, overwrite or resume == "auto", stop)
    if end["signum"] and end["step"] < config.steps:
        if end["first"]:
            tell(stopped(end))
        return 128 + end["signum"]
    if end["first"]:
        tell(closing(end) + "\n")
        tell(closing_sample(end["run"], config))
    return 0


def main(argv: list[str]):
    hints = {"": "A setting is a flag, as --norm post.", "--config": "Name the file without a flag."}
    usage = "train.py [CONFIG.toml] [--SETTING VALUE]..."
    command = CommandLine(hints, prog="train.py", usage=usage, description=__doc__)
    command.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings from a file, as configs/tiny.toml")
    of_run = command.add_settings(SETTINGS)["run"]
    of_run.add_argument("--out", metavar="RUN", help="run folder (default: a fresh one, runs/CORPUS-NORM)")
    text = "continue the run in --out, or the newest, with its own settings; auto: the run in --out, or else start it"
    of_run.add_argument("--resume", nargs="?", const="yes", metavar="auto", help=text)
    of_run.add_argument("--checkpoint", metavar="best|last|STEP", help="with --resume: where from (default: last)")
    of_run.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    flags = vars(command.parse_args(argv))
    command.run(reported(lambda: run(flags)))


if __name__ == "__main__":
    main(sys.argv[1:])
