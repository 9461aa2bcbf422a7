"""The same training for several placements and seeds: python compare.py pre post peri --seeds 3 --steps 500.

The same command again goes on where it stopped; with more placements or seeds it adds those."""

import dataclasses
import json
import math
import shutil
import statistics
import sys
from pathlib import Path

from gpt.command_line import CommandLine, Progress
from gpt.config import Mistake, lookup
from gpt.study import comparison
from gpt.study.comparison import run_name
from gpt.training.files import FORMAT, held, read_json, read_lines, write
from gpt.training.report import require_tensorboard
from gpt.training.run import StopRequest
from gpt.training.settings import SETTINGS, TrainConfig, configure, flat, read_toml
from train import train


def read_results(out: Path) -> dict | None:
    """What results.json holds; None if there is nothing in the folder. Raises Mistake if it is no comparison's."""
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return None
    try:
        results = read_json(out / "results.json")
    except ValueError:
        results = {}
    if results.get("format") != FORMAT or not {"settings", "runs"} <= results.keys():
        raise Mistake(f"the output folder is not a comparison ({out.absolute()}). Name another with --out.")
    for name in [name for name in results["runs"] if not (out / name).is_dir()]:
        del results["runs"][name]  # somebody wants it done again
    return results


def save(out: Path, results: dict):
    write(out / "results.json", json.dumps(results, indent=1))


def train_all(names, seeds, config: TrainConfig, out: Path, results: dict, stop) -> bool:
    """Train each placement with each seed, one seed after the other, and write what comes out to results.json. What
    that has already is not done again, and a run that was interrupted goes on. False if `stop` came in between."""
    from gpt.training.trainer import Diverged

    runs = results["runs"]
    planned = [(norm, seed) for seed in seeds for norm in names]
    left = [(norm, seed) for norm, seed in planned if run_name(norm, seed) not in runs]
    begun = {run for run in left if (out / run_name(*run) / "last").exists()}
    done = sum(int((out / run_name(*run) / "last").read_text(encoding="utf-8") or 0) for run in begun)
    done += (len(planned) - len(left)) * config.steps
    wide = max(len(f"{norm} {seed}") for norm, seed in planned) + 2
    with Progress(len(planned) * config.steps, done) as progress:
        for norm, seed in left:
            run = out / run_name(norm, seed)
            progress.label = f"{norm} {seed}".ljust(wide) + f"{planned.index((norm, seed)) + 1}/{len(planned)}  "
            own = dataclasses.replace(config, seed=seed, model=dataclasses.replace(config.model, norm=norm))
            outcome = {"norm": norm, "seed": seed, "diverged": None}
            resume = "last" if (norm, seed) in begun else None
            try:
                end = train(own, str(run), resume, overwrite=not resume, stop=stop, progress=progress)
                if end["step"] < config.steps:
                    return False
                outcome |= {name: end[name] for name in ("val_loss", "best_val_loss", "best_step")}
                said = f"validation loss {end['val_loss']:.4f}; best {end['best_val_loss']:.4f} at {end['best_step']}"
            except Diverged as error:
                outcome["diverged"] = error.step
                progress.step(config.steps - error.step)
                said = f"diverged at step {error.step}"
            except ValueError as error:
                raise Mistake(f"{error} Or delete {run}, and it is done again." if resume else error) from None
            speeds = [record["tokens_per_s"] for record in read_lines(run / "metrics.jsonl")]
            outcome["tokens_per_s"] = round(statistics.median(speeds)) if speeds else None
            runs[run.name] = outcome
            save(out, results)
            progress.write(progress.label + said)
    return True


def draw(names, seeds, out: Path, runs: dict, title: str, unit: str):
    """curves.png and depth.png."""
    from gpt.study import plots

    losses = {f"training loss, nats per {unit}": {}, f"validation loss, nats per {unit}": {}}
    profiles = {}
    for norm in names:
        ended = [seed for seed in seeds if runs[run_name(norm, seed)]["diverged"] is None]
        probes = read_lines(out / run_name(norm, (ended or seeds)[0]) / "probe.jsonl")
        records = [read_lines(out / run_name(norm, seed) / "metrics.jsonl") for seed in ended or seeds]
        for key, panel in zip(("loss", "val_loss"), losses.values()):
            panel[norm] = [{record["step"]: record[key] for record in lines if key in record} for lines in records]
        profiles[norm] = {"at the start": probes[0]} | ({f"at step {probes[-1]['step']}": probes[-1]} if ended else {})
    plots.bands(losses, f"{title}: mean and range over the seeds", out / "curves.png")
    panels = {
        f"{text} {when}": {norm: profile[when][key] for norm, profile in profiles.items() if when in profile}
        for key, text in plots.SHOWN.items()
        for when in dict.fromkeys(when for profile in profiles.values() for when in profile)
    }
    plots.depth_lines(panels, f"{title}: one seed", out / "depth.png")


def plan(words: list[str], count: int, given: dict):
    """By placement that the words name, its numbers of parameters and its depth profile at the start; the seeds; the
    configuration; what the runs have in common. Raises Mistake for whatever would end a run, so that no mistake is
    met after hours."""
    import torch

    from gpt import model
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import corpus, data, device, distributed

    files = [word for word in words if word.endswith(".toml")]
    names = [name for word in words if word not in files for name in word.replace(",", " ").split()]
    if len(files) > 1:
        raise Mistake(f"two configurations ({', '.join(files)}). Name one.")
    config = configure((read_toml(files[0]) if files else {}) | given)
    if not names or count < 1:
        raise Mistake(f"nothing to compare ({len(names)} placements, {count} seeds). Give at least one of both.")
    if len({*names}) < len(names):
        raise Mistake(f"a placement is named twice ({', '.join(names)}). Name each once.")
    if config.init != "scratch" or config.val_fraction == 0:
        found = f"init {config.init}, val_fraction {config.val_fraction:g}"
        raise Mistake(f"a comparison starts from scratch and needs a validation split ({found}). Leave them out.")
    if (size := distributed.world().size) > 1:
        raise Mistake(f"a comparison is one process ({size}). Start it with python, several with an --out for each.")
    seeds = list(range(config.seed, config.seed + count))
    dataclasses.replace(config, seed=seeds[-1])
    device.choose(config.device, config.dtype, config.compile, device.look(config.device))
    require_tensorboard(config)
    tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
    shape = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    probe_every = config.probe_every or config.steps
    config = dataclasses.replace(config, model=shape, data=corpus.resolve(config.data), probe_every=probe_every)
    ids = corpus.load(config.data, tokenizer)
    splits = data.Data(ids, shape.context_length, config.batch_size, config.val_fraction, config.seed)
    starts = {}
    for norm in names:
        torch.manual_seed(config.seed)
        fresh = model.GPT(dataclasses.replace(shape, norm=norm))
        counts = {"parameters": fresh.count_parameters(), "in_norms": fresh.count_parameters("norm")}
        starts[norm] = counts, depth_profile(fresh, splits.few_rows())
    common = {name: value for name, value in flat(config).items() if name not in ("norm", "seed")}
    return starts, seeds, config, common | {"corpus": corpus.digest(ids), "unit": tokenizer.unit}


def same_start(one: dict, other: dict) -> bool:
    """Whether two depth profiles are of the same weights and code: equal, up to what devices round differently."""
    return all(
        math.isclose(a, b, rel_tol=1e-2) or not math.isfinite(a + b)
        for name in other
        for a, b in zip(one[name], other[name])
    )


def compare(given: dict, stop) -> int | None:
    """Train, write, draw and print what the command line asks for."""
    from gpt.training import corpus

    words, count, out, overwrite = (given.pop(name) for name in ("what", "seeds", "out", "overwrite"))
    starts, seeds, config, common = plan(words, count, given)
    names, out = [*starts], Path(out)
    read_results(out)  # first, since to hold a folder writes into it
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"cannot make the folder ({out.absolute()}: {error.strerror}). Name another.") from None
    with held(out):
        old = read_results(out)
        if old and overwrite:
            save(out, old | {"runs": {}})  # first, so that a kill leaves no outcome without its run
            for path in out.glob("*/config.json"):
                shutil.rmtree(path.parent)
            old = None
        results = old or {"format": FORMAT, "settings": common, "runs": {}}
        before = {name: setting.default for name, setting in SETTINGS.items()} | results["settings"]
        for name, value in common.items():
            if before.get(name) != value:
                found = f"{before.get(name)}, not {value}, in {out}"
                raise Mistake(f"the comparison has another {name} ({found}). Leave it, or name another --out.")
        for norm, (_, profile) in starts.items():
            probes = read_lines(out / run_name(norm, config.seed) / "probe.jsonl")
            if probes and not same_start(probes[0], profile):
                found = f"{norm}, whose runs are in {out}"
                raise Mistake(f"the placement has changed since ({found}). Delete those runs, or name another --out.")
        save(out, results)
        shape = f"{config.model.n_layers} blocks of width {config.model.d_model}"
        size = f"{shape}, {config.steps:,} steps on {corpus.name(config.data)}"
        many = f"seeds {seeds[0]} to {seeds[-1]}" if count > 1 else f"seed {seeds[0]}"
        print(f"compare {', '.join(names)}; {many}\neach    {size}\nfolder  {out}", flush=True)
        if not train_all(names, seeds, config, out, results, stop):
            print(f"stopped; the same command goes on with {out}")
            return 128 + stop.signum
        table = comparison.summarize(names, seeds, results["runs"])
        results["table"] = [starts[entry["norm"]][0] | entry for entry in table]
        save(out, results)
        text = comparison.markdown(results["table"], seeds, common["unit"])
        write(out / "results.md", text + "\n")
        draw(names, seeds, out, results["runs"], size, common["unit"])
    print("\n" + (comparison.overview(results["table"], seeds) if sys.stdout.isatty() else text))
    print(f"\n{out}: results.md, results.json, curves.png, depth.png")
    if others := {run["norm"] for run in results["runs"].values()} - {*names}:
        print(f"there, and not in these: {', '.join(sorted(others))}")


def main(argv: list[str]):
    usage = "compare.py [CONFIG.toml] BLOCK... [--seeds N] [--SETTING VALUE]..."
    hints = {"": "Placements stand side by side, before the flags.", "--resume": "The same command goes on."}
    hints |= {"--norm": "Name placements without a flag.", "--init": "A comparison starts from scratch."}
    command = CommandLine(hints, prog="compare.py", usage=usage, description=__doc__)
    text = "settings from a file, and the placements; the first is what the others are compared to"
    command.add_argument("what", nargs="+", metavar="[CONFIG.toml] BLOCK", help=text)
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="from --seed on (default: %(default)s)")
    command.add_settings({name: f for name, f in SETTINGS.items() if name not in ("norm", "init", "shard")})
    command.add_argument("--out", default="runs/compare", metavar="FOLDER", help="(default: %(default)s)")
    command.add_argument("--overwrite", action="store_true", help="delete the comparison in --out first")
    given = vars(command.parse_args(argv))

    def body():
        with StopRequest() as stop:
            return compare(given, stop)

    command.run(body, "nobody reads the output any more (broken pipe). The same command goes on.")


if __name__ == "__main__":
    main(sys.argv[1:])
