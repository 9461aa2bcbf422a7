"""The same training for several placements and seeds: python compare.py pre post peri --seeds 3 --steps 500.

The same command again goes on where it stopped; more seeds are added, and more placements where --out names it."""

import collections
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from gpt.command_line import CommandLine
from gpt.config import Mistake, lookup
from gpt.files import courtesy, held, read_lines, write
from gpt.screen import Progress, is_terminal, tell
from gpt.study import comparison
from gpt.training.report import require_tensorboard
from gpt.training.results import code_of, default_folder, make_folder, open_results, run_name, save_results
from gpt.training.run import StopRequest, checkpoints
from gpt.training.settings import SETTINGS, TrainConfig, configure, flat, read_toml
from train import train, update

MOST_SEEDS = 1000


class Plan(NamedTuple):
    """A comparison, checked and rehearsed."""

    config: TrainConfig  # of all runs, but for placement and seed
    seeds: list[int]
    counts: dict[str, dict]  # by placement: numbers of parameters
    runs: dict[str, tuple[str, int]]  # by name: placement and seed, one seed after the other
    code: dict[str, str]  # by name: a checksum
    settings: dict  # what all runs have in common


def read_entries(entries: list[str], count: int, flags: dict) -> tuple[list[str], TrainConfig]:
    """The placements and the configuration. Raises Mistake if they cannot be compared over so many seeds."""
    from gpt.training import distributed

    files = [entry for entry in entries if entry.endswith(".toml")]
    placements = [name for entry in entries if entry not in files for name in entry.replace(",", " ").split()]
    if len(files) > 1:
        raise Mistake(f"two configurations ({', '.join(files)}). Name one.")
    config = configure((read_toml(files[0]) if files else {}) | flags)
    if not placements or not 1 <= count <= MOST_SEEDS:
        counts = f"{len(placements)} placements, --seeds {count}"
        raise Mistake(f"nothing to compare ({counts}). Give at least one of both, and at most {MOST_SEEDS} seeds.")
    if len({*placements}) < len(placements):
        raise Mistake(f"a placement is named twice ({', '.join(placements)}). Name each once.")
    if config.init != "scratch" or config.val_fraction == 0:
        values = f"init {config.init}, val_fraction {config.val_fraction:g}"
        raise Mistake(f"a comparison starts from scratch and needs a validation split ({values}). Leave them out.")
    if (size := distributed.world().size) > 1:
        raise Mistake(f"a comparison is one process ({size}). Start it with python, several with an --out for each.")
    return placements, config


def make_plan(placements: list[str], count: int, config: TrainConfig) -> Plan:
    """Check what a run needs, and rehearse a step of each placement, so that no mistake is met after hours. Raises
    Mistake; an error in a placement's code keeps its traceback."""
    import torch

    from gpt import GPT
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus, data, device

    seeds = [dataclasses.replace(config, seed=config.seed + number).seed for number in range(count)]
    device.choose(config.device, config.dtype, config.compile, device.look(config.device))
    require_tensorboard(config)
    tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
    shape = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    probe_every = config.probe_every or config.steps
    config = dataclasses.replace(config, model=shape, data=corpus.resolve(config.data), probe_every=probe_every)
    ids = corpus.load(config.data, tokenizer)
    rows = data.Data(ids, shape.context_length, config.batch_size, config.val_fraction, config.seed).few_rows()
    counts, code = {}, {}
    for placement in placements:
        torch.manual_seed(config.seed)
        model = GPT(dataclasses.replace(shape, norm=placement))
        depth_profile(model, rows)
        with tempfile.TemporaryDirectory() as folder:
            state = {"step": 0, "config": checkpoint.config_to_json(dataclasses.replace(config, model=model.config))}
            checkpoint.save(Path(folder), model.state_dict(), {}, state)
            checkpoint.load_model(folder)
        counts[placement] = {"parameters": model.count_parameters(), "in_norms": model.count_parameters("norm")}
        code |= dict.fromkeys((run_name(placement, seed) for seed in seeds), code_of(model, update))
    runs = {run_name(placement, seed): (placement, seed) for seed in seeds for placement in placements}
    settings = {name: value for name, value in flat(config).items() if name not in ("norm", "seed")}
    settings |= {"corpus": corpus.digest(ids), "unit": tokenizer.unit}
    return Plan(config, seeds, counts, runs, code, settings)


def train_all(plan: Plan, out: Path, results: dict, stop) -> bool:
    """Do the runs without an outcome, and go on with interrupted ones. False if `stop` came before the end."""
    from gpt.training.checkpoint import find, read_state

    runs, config = results["runs"], plan.config
    begun = [name for name in plan.runs if name not in runs and checkpoints(out / name)]
    done = sum(read_state(find(out / name, "last"))[0]["step"] for name in begun)
    done += len(plan.runs.keys() & runs.keys()) * config.steps
    width = max(map(len, plan.runs)) + 2
    with Progress(len(plan.runs) * config.steps, done) as progress:
        for number, (name, (placement, seed)) in enumerate(plan.runs.items(), start=1):
            if name not in runs:
                progress.label = f"{name.ljust(width)}{number}/{len(plan.runs)}  "
                model = dataclasses.replace(config.model, norm=placement)
                one = dataclasses.replace(config, seed=seed, model=model)
                outcome = train_one(one, out / name, name in begun, stop, progress)
                if outcome is None:
                    return False
                runs[name] = outcome
                save_results(out, results)
                losses = "validation loss {val_loss:.4f}; best {best_val_loss:.4f} at {best_step}"
                line = "diverged at step {diverged}" if outcome["diverged"] else losses
                progress.write(progress.label + line.format(**outcome))
    return True


def train_one(config: TrainConfig, run: Path, resume: bool, stop, progress: Progress) -> dict | None:
    """The outcome of a run, for results.json; None if it was stopped."""
    from gpt.training.report import Diverged

    outcome = {"norm": config.model.norm, "seed": config.seed, "diverged": None}
    try:
        end = train(config, str(run), "last" if resume else None, overwrite=not resume, stop=stop, progress=progress)
        if end["step"] < config.steps:
            return None
        outcome |= {name: end[name] for name in ("val_loss", "best_val_loss", "best_step")}
    except Diverged as error:
        outcome["diverged"] = error.step
        progress.step(config.steps - error.step)
    except Mistake as error:
        raise (Mistake(f"{error} Or delete {run}, and it is done again.") if resume else error) from None
    speeds = [record["tokens_per_s"] for record in read_lines(run / "metrics.jsonl") if "tokens_per_s" in record]
    return outcome | {"tokens_per_s": round(statistics.median(speeds)) if speeds else None}


def draw(plan: Plan, out: Path, runs: dict, title: str):
    """Draw curves.png, from all seeds, and depth.png, from one."""
    from gpt.study import plots

    losses = {f"{split} loss, nats per {plan.settings['unit']}": {} for split in ("training", "validation")}
    profiles = collections.defaultdict(dict)  # by time and placement
    for placement in plan.counts:
        ended = [seed for seed in plan.seeds if runs[run_name(placement, seed)]["diverged"] is None]
        folders = [out / run_name(placement, seed) for seed in ended or plan.seeds]
        records = [read_lines(folder / "metrics.jsonl") for folder in folders]
        for key, panel in zip(("loss", "val_loss"), losses.values()):
            panel[placement] = [{line["step"]: line[key] for line in lines if key in line} for lines in records]
        first, *_, last = 2 * read_lines(folders[0] / "probe.jsonl")
        profiles["at the start"][placement] = first
        if ended:
            profiles[f"at step {last['step']}"][placement] = last
    plots.bands(losses, f"{title}: mean and range over the seeds", out / "curves.png")
    plots.depth_lines(plots.panels_of(profiles), f"{title}: one seed", out / "depth.png")


def compare(flags: dict) -> int | None:
    """Train, write, draw and print what the command line asks for; returns the exit status."""
    from gpt.training import corpus

    entries, count, out, overwrite = (flags.pop(name) for name in ("entries", "seeds", "out", "overwrite"))
    placements, config = read_entries(entries, count, flags)
    plan = make_plan(placements, count, config)
    out = Path(out or default_folder(placements, plan.settings))
    make_folder(out)
    with held(out), StopRequest() as stop:
        results = open_results(out, plan.settings, plan.code, overwrite)
        size = f"{config.model.n_layers} blocks of width {config.model.d_model}"
        title = f"{size}, {config.steps:,} steps on {corpus.name(config.data)}"
        seeds = f"seeds {plan.seeds[0]} to {plan.seeds[-1]}" if count > 1 else f"seed {plan.seeds[0]}"
        tell(f"compare {', '.join(placements)}; {seeds}\neach    {title}\nfolder  {out}")
        if not train_all(plan, out, results, stop):
            tell(f"stopped; the same command goes on with {out}")
            return 128 + stop.signum
        table = comparison.summarize(placements, plan.seeds, results["runs"].values())
        results["table"] = [plan.counts[entry["norm"]] | entry for entry in table]
        save_results(out, results)
        rows = comparison.rows(results["table"], plan.seeds, plan.settings["unit"])
        write(out / "results.md", f"{comparison.markdown(rows)}\n\n{comparison.LEGEND}\n")
        files = ["results.md", "results.json"]
        with courtesy("draw the pictures"):
            draw(plan, out, results["runs"], title)
            files += ["curves.png", "depth.png"]
    columns = comparison.SHORT if is_terminal(sys.stdout) else None
    tell("\n" + comparison.markdown([row[:columns] for row in rows]))
    tell(f"\n{out}: {', '.join(files)}")
    if others := {run["norm"] for run in results["runs"].values()} - {*placements}:
        tell(f"in the folder, and not in the table: {', '.join(sorted(others))}")


def main(argv: list[str]):
    usage = "compare.py [CONFIG.toml] BLOCK... [--seeds N] [--SETTING VALUE]..."
    hints = {"": "Placements stand side by side, before the flags.", "--resume": "The same command goes on."}
    hints |= {"--norm": "Name placements without a flag.", "--init": "A comparison starts from scratch."}
    hints |= {"--config": "Name the file without a flag."}
    command = CommandLine(hints, prog="compare.py", usage=usage, description=__doc__)
    text = "settings from a file, and the placements; the first is what the others are compared to"
    command.add_argument("entries", nargs="+", metavar="[CONFIG.toml] BLOCK", help=text)
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="from --seed on (default: %(default)s)")
    command.add_settings(SETTINGS, without=["norm", "init", "shard"])
    text = "(default: runs/compare-BLOCK-..., with a number where other settings have that name)"
    command.add_argument("--out", metavar="FOLDER", help=text)
    command.add_argument("--overwrite", action="store_true", help="delete the comparison in --out first")
    flags = vars(command.parse_args(argv))
    command.run(lambda: compare(flags))


if __name__ == "__main__":
    main(sys.argv[1:])
