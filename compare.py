"""The same training for several placements and seeds: python compare.py pre post peri --seeds 3 --steps 500.

An ENTRY is a placement, with settings of its own behind a colon: post:lr=0.003,warmup_steps=300. The same command again
goes on where it stopped; started elsewhere meanwhile, it helps."""

import argparse
import collections
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from gpt.command_line import CommandLine
from gpt.config import Mistake, lookup
from gpt.files import read_lines
from gpt.screen import is_terminal, tell
from gpt.training import jobs
from gpt.training.entries import FLAGS
from gpt.training.lock import Held
from gpt.training.outcomes import Folder, default_folder
from gpt.training.overall import Overall
from gpt.training.plan import MOST_SEEDS, Plan, Run, read_plan
from gpt.training.run import StopRequest
from gpt.training.settings import SETTINGS
from train import train, update

RAMP = 16.0  # --max-rate: times an entry's rate
OPTIONS = ("entries", "helper", *FLAGS)


class Rehearsed(NamedTuple):
    """What a rehearsal of all runs has told."""

    plan: Plan  # with the corpus and the vocabulary settled
    code: dict[tuple[str, int | None], str]  # by entry and depth: a checksum
    counts: dict[tuple[str, int | None], dict]  # the same: numbers of parameters
    corpus: str
    level: float  # of the loss: above it a model knows little more than how often each token comes
    unit: str


def rehearse(plan: Plan) -> Rehearsed:
    """Check what the runs need, and rehearse a step of each entry, so that no mistake is met after hours. Raises
    Mistake; an error in a placement's code keeps its traceback."""
    import torch

    from gpt import GPT
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus, data, device
    from gpt.training.code import code_of
    from gpt.training.report import MARGIN, require_tensorboard

    first = [*[*plan.entries.values()][0].values()][0]
    tokenizer = lookup(TOKENIZERS, first.tokenizer, "tokenizer")()
    path = corpus.resolve(first.data)
    ids = corpus.load(path, tokenizer)
    sizes = first.model.context_length, first.batch_size, first.val_fraction
    split = data.Data(ids, *sizes, first.seed)
    code, counts, made = {}, {}, collections.defaultdict(dict)
    for name, depth, config in plan.configurations():
        compute = device.choose(config.device, config.dtype, config.compile, device.look(config.device))
        require_tensorboard(config)
        shape = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
        probe_every = config.probe_every or config.steps
        config = dataclasses.replace(config, model=shape, probe_every=probe_every, data=path)
        # Settled here, so that no other machine goes on with another device or number format.
        config = dataclasses.replace(config, device=compute.device, dtype=compute.dtype, compile=compute.compile)
        torch.manual_seed(config.seed)
        model = GPT(shape)
        depth_profile(model, split.few_rows())
        with tempfile.TemporaryDirectory() as folder:
            state = {"step": 0, "config": checkpoint.config_to_json(config)}
            checkpoint.save(Path(folder), model.state_dict(), {}, state)
            checkpoint.load_model(folder)
        counts[name, depth] = {"parameters": model.count_parameters(), "in_norms": model.count_parameters("norm")}
        code[name, depth] = code_of(model, update)
        made[name][depth] = config
    plan = dataclasses.replace(plan, entries=dict(made))
    return Rehearsed(plan, code, counts, corpus.digest(ids), split.entropy - MARGIN, tokenizer.unit)


def train_all(plan: Plan, folder: Folder, stop: StopRequest, progress: Overall) -> bool:
    """Do the runs that have no outcome and that no other process does, until all have one. False if `stop` came."""
    while not stop.signum:
        waiting = [run for run in plan.runs(folder.loss_of) if folder.outcome(run) is None]
        if not waiting:
            progress.look()
            return True
        for run in waiting:
            with contextlib.suppress(Held), folder.claim(run.name):
                if folder.outcome(run) is None:  # nobody else has ended it meanwhile
                    progress.begin_run(run)
                    train_one(run, folder, stop, progress)
                    progress.look()
                break
        else:
            time.sleep(0.3)
            progress.look()
    return False


def train_one(run: Run, folder: Folder, stop: StopRequest, progress: Overall):
    """Do a run, or go on with it, and write its outcome, unless `stop` came before its end."""
    from gpt.training.report import Diverged

    path, config = folder.path / run.name, run.config
    results = {"val_loss": None, "best_val_loss": None, "best_step": None, "diverged": None, "stuck": False}
    begun = folder.begun(run)
    try:
        end = train(config, str(path), "last" if begun else None, overwrite=not begun, stop=stop, progress=progress)
        if end["step"] < config.steps:
            return
        results |= {name: end[name] for name in ("val_loss", "best_val_loss", "best_step", "stuck")}
    except Diverged as error:
        results["diverged"] = error.step
    except Held as error:  # and not by a comparison, which would have claimed the run
        raise Mistake(str(error)) from None
    except Mistake as error:
        raise (Mistake(f"{error} Or delete {path}, and it is done again.") if begun else error) from None
    speeds = [record["tokens_per_s"] for record in read_lines(path / "metrics.jsonl") if "tokens_per_s" in record]
    folder.add(run, results | {"tokens_per_s": round(statistics.median(speeds)) if speeds else None})


def report(rehearsed: Rehearsed, folder: Folder, title: str, latex: bool):
    """Write the tables and pictures of all runs, and print the tables."""
    from gpt.study.formats import markdown
    from gpt.study.results import write_results
    from gpt.study.tables import SHORT

    plan = rehearsed.plan
    runs = plan.runs(folder.loss_of)
    rows = [folder.outcome(run) | {"entry": run.entry} | rehearsed.counts[run.entry, run.depth] for run in runs]
    with folder.turn():
        tables, files = write_results(folder.path, rows, rehearsed.unit, rehearsed.level, title, latex)
    columns = SHORT if is_terminal(sys.stdout) else None
    for cells in tables:
        tell("\n" + markdown([row[:columns] for row in cells]))
    tell(f"\n{folder.path}: {', '.join(files)}")
    names = {run.name for run in runs}
    others = [path.parent.name for path in sorted(folder.path.glob("*/outcome.json")) if path.parent.name not in names]
    if others:
        names = f"{', '.join(others[:9])}{', ...' if len(others) > 9 else ''}"
        tell(f"in the folder, and not in these tables: {names}. Name their entries and seeds too, to have all.")


def opening(plan: Plan, folder: Folder, left: int, done: int, title: str) -> str:
    """What is about to happen, in three lines."""
    seeds = f"seeds {plan.seeds[0]} to {plan.seeds[-1]}" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    choice = f"; rates are chosen on seed {plan.seeds[0] + MOST_SEEDS}" if plan.rates else ""
    about = "about " if plan.rates == "auto" else ""
    runs = f"{about}{left}, each {title}{f'; {done} more are done' if done else ''}"
    return (
        f"compare {', '.join(plan.entries)}; {seeds}{choice}\n"
        f"runs    {runs if left else f'all {done} are done, each {title}'}\n"
        f"folder  {folder.path}"
    )


def compare(flags: dict, argv: list[str]) -> int | None:
    """Do what the command line asks for; returns the exit status."""
    from gpt.training import corpus

    options = {name: flags.pop(name) for name in OPTIONS}
    if options["overwrite"] and not options["out"]:
        raise Mistake("--overwrite needs the comparison's name (none). Give --out FOLDER.")
    asked = (options[name] for name in ("seeds", "depths", "rates", "max_rate"))
    rehearsed = rehearse(read_plan(options["entries"], flags, *asked))
    plan, of_runs = rehearsed.plan, (rehearsed.code, rehearsed.corpus)
    folder = Folder(Path(options["out"]), *of_runs) if options["out"] else default_folder(plan, *of_runs)
    if options["overwrite"]:
        folder.clear()
    folder.check(plan)
    runs = plan.runs(folder.loss_of)
    config = runs[0].config  # its device, corpus and steps are those of all
    done = sum(folder.outcome(run) is not None for run in runs)
    left = plan.expected(runs) - done if done < len(runs) else 0
    count, threads = jobs.share(options["jobs"], left + done, config.device)  # always the same threads
    title = f"{config.steps:,} steps on {corpus.name(config.data)}"
    folder.make()
    with folder.turn() as locked:
        count = min(count, left or 1) if locked else 1
    tell(opening(plan, folder, left, done, title))
    tell(f"jobs    {count} at a time, each with {threads} thread{'s' * (threads > 1)}")
    if options["helper"]:
        jobs.end_with_parent()
    command = [sys.executable, __file__, *(word for word in argv if word != "--overwrite")]
    command += ["--out", str(folder.path), "--jobs", "1", "--helper"]
    with StopRequest() as stop, Overall(plan, folder, rehearsed.counts, count) as progress:
        with jobs.started(command, count - 1, threads, config.device):
            all_done = train_all(plan, folder, stop, progress)
    if not all_done:
        tell(f"stopped; the same command goes on with {folder.path}")
        return 128 + stop.signum
    if not options["helper"]:
        report(rehearsed, folder, title, options["latex"])


def main(argv: list[str]):
    usage = "compare.py [CONFIG.toml] ENTRY... [--seeds N] [--rates auto] [--depths N...] [--SETTING VALUE]..."
    hints = {"": "Entries stand side by side, before the flags.", "--resume": "The same command goes on."}
    hints |= {"--norm": "Name placements without a flag.", "--init": "A comparison starts from scratch."}
    hints |= {"--config": "Name the file without a flag."}
    command = CommandLine(hints, prog="compare.py", usage=usage, description=__doc__)
    text = "settings from a file, and the entries; the first is what the others are compared to"
    command.add_argument("entries", nargs="*", metavar="[CONFIG.toml] ENTRY", help=text)
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="from --seed on (default: %(default)s)")
    text = "choose a rate for each entry: the best of these, or auto, from --lr on by factors of 2"
    command.add_argument("--rates", nargs="+", metavar="auto|RATE", help=text)
    text = "compare at each of these numbers of blocks"
    command.add_argument("--depths", nargs="+", type=int, metavar="N", help=text)
    text = "find the largest rate that each entry holds, in runs whose rate rises to TIMES its --lr (%(const)g)"
    command.add_argument("--max-rate", nargs="?", type=float, const=RAMP, metavar="TIMES", help=text)
    text = "runs at a time (default: as many as keep the machine busy)"
    command.add_argument("--jobs", type=int, metavar="N", help=text)
    command.add_settings(SETTINGS, without=["norm", "init", "shard"])
    text = "(default: runs/compare-ENTRIES, with a number where another comparison has that name)"
    command.add_argument("--out", metavar="FOLDER", help=text)
    command.add_argument("--overwrite", action="store_true", help="delete the comparison in --out first")
    command.add_argument("--latex", action="store_true", help="also write the tables to results.tex")
    command.add_argument("--helper", action="store_true", help=argparse.SUPPRESS)
    flags = vars(command.parse_args(argv))
    command.run(lambda: compare(flags, argv))


if __name__ == "__main__":
    main(sys.argv[1:])
