"""Signal and gradient by depth: python probe.py pre post peri none --n-layers 24, or a run folder, or stack."""

import dataclasses
import json
import sys
from pathlib import Path

from gpt.config import MODEL_SETTINGS, CommandLine, ModelConfig

SHOWN = {"stream": "root mean square of the stream", "stream_grad": "norm of the gradient at the stream"}
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
    from gpt.depth import depth_profile

    profiles = {}
    tokens = torch.randint(config.vocab_size, (4, 65), generator=torch.Generator().manual_seed(seed))
    for name in names:
        torch.manual_seed(seed)
        model = GPT(dataclasses.replace(config, norm=name))
        profiles[name] = depth_profile(model, tokens[:, : config.context_length + 1])
    return profiles


def probe_run(run: str) -> dict:
    """The profile of a run's checkpoint on the start of its own validation text."""
    from gpt import checkpoint, corpus
    from gpt.data import Data
    from gpt.depth import depth_profile
    from gpt.tokenizer import TOKENIZERS

    folder = checkpoint.find(run)
    config = checkpoint.read_state(folder)[1]
    ids = corpus.load(config.data, TOKENIZERS[config.tokenizer]())
    data = Data(ids, config.model.context_length, config.batch_size, config.val_fraction, config.seed)
    return {config.model.norm: depth_profile(checkpoint.load_model(folder), data.probe_batch())}


def table(profiles: dict):
    """Print every measure of every profile by depth."""
    for name, profile in profiles.items():
        print(f"\n{name}\ndepth" + "".join(f"{measure:>13}" for measure in profile))
        for row, values in enumerate(zip(*profile.values())):
            print(f"{row + (len(profile) == 7):5}" + "".join(f"{value:13.4g}" for value in values))


def probe(given: dict):
    """Measure what the command line names, print it and draw it."""
    from gpt import plots

    names, out, seed = given.pop("what"), given.pop("out"), given.pop("seed")
    runs = [name for name in names if (Path(name) / "config.json").exists()]
    if names == ["stack"]:
        from gpt.depth import random_stack

        profiles = {name: random_stack(**settings) for name, settings in STACKS.items()}
        panels = {"root mean square": {name: profile["stream"] for name, profile in profiles.items()}}
        plots.depth_lines(panels, "Twelve random layers", out, start=0)
    elif runs:
        if len(names) > 1 or given:
            raise ValueError(f"a run is probed alone and as it is ({', '.join(names)}). Leave the rest out.")
        profiles = probe_run(names[0])
        lines = Path(names[0], "probe.jsonl")
        if lines.exists():
            records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
            steps = [record["step"] for record in records]
            panels = {text: (steps, [record[key] for record in records]) for key, text in SHOWN.items()}
            plots.depth_by_step(panels, f"{names[0]}: depth along training", out)
        else:
            draw(profiles, f"{names[0]}, its best checkpoint", out)
    else:
        config = ModelConfig(**{"n_layers": 24} | given)
        profiles = probe_blocks(names, config, seed)
        draw(profiles, f"{config.n_layers} blocks of width {config.d_model} at the start of training", out)
    table(profiles)
    print(f"\npicture {out}")


def draw(profiles: dict, title: str, out: str):
    from gpt import plots

    panels = {text: {name: profile[key] for name, profile in profiles.items()} for key, text in SHOWN.items()}
    plots.depth_lines(panels, title, out)


def main(argv: list[str]):
    command = CommandLine(prog="probe.py", description=__doc__)
    command.add_argument("what", nargs="+", metavar="BLOCK|RUN|stack", help="placements, or a run folder, or stack")
    command.add_settings([name for name in MODEL_SETTINGS if name != "norm"])
    command.add_argument("--seed", type=int, default=1337, metavar="N", help="of the weights (default: %(default)s)")
    command.add_argument("--out", default="probe.png", metavar="FILE", help="picture (default: %(default)s)")
    given = vars(command.parse_args(argv))
    command.run(lambda: probe(given))


if __name__ == "__main__":
    main(sys.argv[1:])
