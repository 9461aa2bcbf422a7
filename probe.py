"""Signal and gradient by depth: python probe.py pre post peri keel --start fan_in, or a run folder, or stack."""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from gpt.command_line import CommandLine
from gpt.config import Mistake, ModelConfig, unknown
from gpt.files import courtesy, read_lines
from gpt.screen import say
from gpt.training.run import checkpoints
from gpt.training.settings import MODEL_SETTINGS, TrainConfig, assumed, from_weights, hint

DEPTH = 24  # blocks by default: enough to see where placements differ
STACKS = {  # the lesson's twelve random layers; a number is the factor of each layer, 0.7 or 1.3
    "plain 0.7": {"gain": 0.7},
    "plain 1.3": {"gain": 1.3},
    "norm": {"gain": 1.3, "norm": True},
    "residual": {"gain": 0.7, "residual": True},
    "both": {"gain": 0.7, "norm": True, "residual": True},
}


def probe_blocks(placements: list[str], config: ModelConfig, seed: int) -> dict:
    """By placement, the profile of a freshly started model on random tokens. Raises Mistake for an unknown name."""
    import torch

    from gpt import BLOCKS, GPT
    from gpt.study.depth import depth_profile
    from gpt.training.checkpoint import find
    from gpt.training.run import saved_runs

    for name in placements:
        if os.path.isdir(name) or "/" in name:
            find(name, hint=hint(name))  # says what is wrong with a run without a checkpoint
        if name not in BLOCKS:
            raise Mistake(unknown("placement or run", name, [*BLOCKS, *map(str, saved_runs())]))
    profiles = {}
    tokens = torch.randint(config.vocab_size, (4, 65), generator=torch.Generator().manual_seed(seed))
    for name in placements:
        torch.manual_seed(seed)
        model = GPT(dataclasses.replace(config, norm=name))
        profiles[name] = depth_profile(model, tokens[:, : config.context_length + 1])
    return profiles


def probe_weights(source: str) -> tuple[dict, str]:
    """By placement, the one profile of a run's best checkpoint or of published weights; and the text it is measured on:
    the run's own validation text, or that of the default corpus."""
    from gpt import pretrained
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus
    from gpt.training.data import Data

    if pretrained.recognizes(source):
        config, model = from_weights(source), pretrained.load(source)
        text = "the default corpus"
        for warning in assumed(config):
            say(f"warning: {warning}")
    else:
        (_, config, model), text = checkpoint.load_run(source), "its own validation text"
    ids = corpus.load(config.data, TOKENIZERS[config.tokenizer]())
    sizes = config.model.context_length, config.batch_size, config.val_fraction
    rows = Data(ids, *sizes, config.seed, config.eval_tokens).few_rows()
    return {config.model.norm: depth_profile(model, rows)}, text


def print_profiles(profiles: dict, start: int):
    """Print every measure of every profile by depth; the first row is depth `start`."""
    for name, profile in profiles.items():
        print(f"\n{name}\ndepth" + "".join(f"{measure:>13}" for measure in profile))
        for row, values in enumerate(zip(*profile.values())):
            print(f"{start + row:5}" + "".join(f"{value:13.4g}" for value in values))


def _is_run(folder: Path) -> bool:
    """Whether there is a checkpoint in the folder, or the folder is one."""
    return bool(checkpoints(folder)) or (folder / "state.json").exists()


def probe(flags: dict):
    """Measure what the command line names, print it and draw it."""
    from gpt import pretrained
    from gpt.study.depth import random_stack

    names, out, seed = flags.pop("names"), Path(flags.pop("out")), flags.pop("seed")
    TrainConfig(seed=seed)  # checks it
    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Mistake(f"no such kind of picture ({out}). Name a .png, .svg or .pdf.")
    run = next((name for name in names if _is_run(Path(name)) or pretrained.recognizes(name)), None)
    if (alone := run or ("stack" if "stack" in names else None)) and (len(names) > 1 or flags):
        raise Mistake(f"nothing can be added to {alone} ({', '.join([*names, *flags])}). Leave the rest out.")
    records, start, counted = [], 1, "block"
    if run:
        profiles, text = probe_weights(run)
        title = f"{run}: signal and gradient by depth on {text}"
        records = read_lines(Path(run, "probe.jsonl"))
    elif alone:
        profiles, title = {name: random_stack(**settings) for name, settings in STACKS.items()}, "Twelve random layers"
        start, counted = 0, "layer"
    else:
        config = ModelConfig(**{"n_layers": DEPTH} | flags)
        profiles = probe_blocks(names, config, seed)
        size = f"{config.n_layers} blocks of width {config.d_model}"
        title = f"Signal and gradient by depth at the start of training, {size}: {', '.join(names)}"
    print_profiles(profiles, start)
    with courtesy(f"draw {out}"):
        draw(profiles, records, title, out, start, counted)
        print(f"\npicture {out}")


def draw(profiles: dict, records: list[dict], title: str, out: Path, start: int, counted: str):
    """Draw the profiles or, of a run that was probed along training, its records."""
    from gpt.study import plots
    from gpt.study.depth import SHOWN, STACK_SHOWN, panels_of

    if records:
        steps = [record["step"] for record in records]
        shown = {key: text for key, text in SHOWN.items() if all(key in record for record in records)}
        by_step = {text: (steps, [record[key] for record in records]) for key, text in shown.items()}
        plots.depth_by_step(by_step, f"{title}, along training", out)
    else:
        panels = panels_of({"": profiles}, STACK_SHOWN if counted == "layer" else SHOWN)
        plots.depth_lines(panels, title, out, start, counted, linear=[STACK_SHOWN["cosine"]])


def main(argv: list[str]):
    hints = {"": "Placements stand side by side, before the flags."}
    usage = "probe.py BLOCK...|RUN|gpt2|stack [--SETTING VALUE]..."
    command = CommandLine(hints, prog="probe.py", usage=usage, description=__doc__)
    text = "placements, or a run, weights or stack"
    command.add_argument("names", nargs="+", metavar="BLOCK|RUN|gpt2|stack", help=text)
    command.add_settings(MODEL_SETTINGS, without=["norm"], n_layers=DEPTH)
    command.add_argument("--seed", type=int, default=1337, metavar="N", help="of the weights (default: %(default)s)")
    command.add_argument("--out", default="probe.png", metavar="FILE", help="picture (default: %(default)s)")
    flags = vars(command.parse_args(argv))
    command.run(lambda: probe(flags))


if __name__ == "__main__":
    main(sys.argv[1:])
