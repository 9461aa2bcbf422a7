"""Signal and gradient by depth: python probe.py pre post peri none --n-layers 24, or a run folder, or stack."""

import dataclasses
import json
import sys
from pathlib import Path

from gpt.command_line import CommandLine
from gpt.config import Mistake, ModelConfig, unknown
from gpt.training.settings import MODEL_SETTINGS, TrainConfig, from_weights

DEPTH = 24  # by default, that the differences show
STACKS = {  # the lesson's twelve random layers
    "plain 0.7": {"gain": 0.7},
    "plain 1.3": {"gain": 1.3},
    "norm": {"gain": 1.3, "norm": True},
    "residual": {"gain": 0.7, "residual": True},
    "both": {"gain": 0.7, "norm": True, "residual": True},
}


def probe_blocks(names: list[str], config: ModelConfig, seed: int) -> dict:
    """Profiles of freshly started models of these placements, on random tokens."""
    import torch

    from gpt import GPT
    from gpt.study.depth import depth_profile

    profiles = {}
    tokens = torch.randint(config.vocab_size, (4, 65), generator=torch.Generator().manual_seed(seed))
    for name in names:
        torch.manual_seed(seed)
        model = GPT(dataclasses.replace(config, norm=name))
        profiles[name] = depth_profile(model, tokens[:, : config.context_length + 1])
    return profiles


def probe_weights(source: str) -> dict:
    """The profile of a run's checkpoint on the start of its own validation text, or of published weights on that of
    the default corpus."""
    from gpt import pretrained
    from gpt.study.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus
    from gpt.training.data import Data

    if pretrained.recognizes(source):
        config, model = from_weights(source), pretrained.load(source)
    else:
        folder = checkpoint.find(source)
        config, model = checkpoint.read_state(folder)[1], checkpoint.load_model(folder)
    ids = corpus.load(config.data, TOKENIZERS[config.tokenizer]())
    # A profile of four rows; longer ones than this show the same, and take long in a large model.
    data = Data(ids, min(256, config.model.context_length), config.batch_size, config.val_fraction, config.seed)
    return {config.model.norm: depth_profile(model, data.few_rows())}


def table(profiles: dict, start: int = 1):
    """Print every measure of every profile by depth; the first row is depth `start`."""
    for name, profile in profiles.items():
        print(f"\n{name}\ndepth" + "".join(f"{measure:>13}" for measure in profile))
        for row, values in enumerate(zip(*profile.values())):
            print(f"{start + row:5}" + "".join(f"{value:13.4g}" for value in values))


def probe(given: dict):
    """Measure what the command line names, print it and draw it."""
    from gpt import BLOCKS, pretrained
    from gpt.study import plots
    from gpt.study.depth import random_stack
    from gpt.training import checkpoint
    from gpt.training.run import saved_runs

    names, out, seed = given.pop("what"), given.pop("out"), given.pop("seed")
    TrainConfig(seed=seed)  # checks it
    if Path(out).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise Mistake(f"no such kind of picture ({out}). Name a .png, .svg or .pdf.")
    start, along_training = 1, None
    run = next((name for name in names if Path(name, "last").exists() or pretrained.recognizes(name)), None)
    if (run or "stack" in names) and (len(names) > 1 or given):
        alone = run or "stack"
        raise Mistake(f"nothing can be added to {alone} ({', '.join([*names, *given])}). Leave the rest out.")
    if names == ["stack"]:
        start, title = 0, "Twelve random layers"
        profiles = {name: random_stack(**settings) for name, settings in STACKS.items()}
    elif run:
        whose = "the default corpus" if pretrained.recognizes(run) else "its own validation text"
        profiles, title = probe_weights(run), f"{run}: signal and gradient by depth on {whose}"
        along_training = Path(run, "probe.jsonl") if Path(run, "probe.jsonl").exists() else None
    else:
        for name in names:
            if Path(name).is_dir():
                checkpoint.find(name)
            if name not in BLOCKS:
                raise Mistake(unknown("placement or run", name, [*BLOCKS, *map(str, saved_runs())]))
        config = ModelConfig(**{"n_layers": DEPTH} | given)
        profiles = probe_blocks(names, config, seed)
        size = f"{config.n_layers} blocks of width {config.d_model}"
        title = f"Signal and gradient by depth at the start of training, {size}: {', '.join(names)}"
    table(profiles, start)
    if along_training:
        records = [json.loads(line) for line in along_training.read_text(encoding="utf-8").splitlines()]
        steps = [record["step"] for record in records]
        panels = {text: (steps, [record[key] for record in records]) for key, text in plots.SHOWN.items()}
        plots.depth_by_step(panels, f"{run}: signal and gradient by depth along training", out)
    else:
        shown = {key: text for key, text in plots.SHOWN.items() if all(key in profile for profile in profiles.values())}
        panels = {text: {name: profile[key] for name, profile in profiles.items()} for key, text in shown.items()}
        plots.depth_lines(panels, title, out, start, "layer" if start == 0 else "block")
    print(f"\npicture {out}")


def main(argv: list[str]):
    hints = {"": "Placements stand side by side, before the flags."}
    usage = "probe.py BLOCK...|RUN|gpt2|stack [--SETTING VALUE]..."
    command = CommandLine(hints, prog="probe.py", usage=usage, description=__doc__)
    command.add_argument(
        "what", nargs="+", metavar="BLOCK|RUN|gpt2|stack", help="placements, or a run, weights or stack"
    )
    command.add_settings({name: f for name, f in MODEL_SETTINGS.items() if name != "norm"}, n_layers=DEPTH)
    command.add_argument("--seed", type=int, default=1337, metavar="N", help="of the weights (default: %(default)s)")
    command.add_argument("--out", default="probe.png", metavar="FILE", help="picture (default: %(default)s)")
    given = vars(command.parse_args(argv))
    command.run(lambda: probe(given))


if __name__ == "__main__":
    main(sys.argv[1:])
