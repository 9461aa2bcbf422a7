"""A run folder: its settings, its metrics and its checkpoints. Safetensors and JSON, no pickle, nothing half-written.

    config.json  *.jsonl  best  last  step-000500/{model.safetensors, optimizer.safetensors, state.json}

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so it exists whole or not at all.
`best` and `last` are text files with the step of one each.
"""

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from gpt.config import FORMAT, TrainConfig, configure, flat, require_same
from gpt.model import GPT


def config_to_json(config: TrainConfig) -> dict:
    """Every setting, the vocabulary's size and the format's version."""
    return {"format": FORMAT, "vocab_size": config.model.vocab_size, **flat(config)}


def config_from_json(stored: dict) -> TrainConfig:
    """The opposite; a setting that is absent has its default. Raises ValueError for another format."""
    settings = dict(stored)
    found = settings.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"the run has another format ({found}, not {FORMAT}). Use the version that wrote it.")
    vocab_size = settings.pop("vocab_size")
    config = configure(settings)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def new_run(out: str | None, name: str, overwrite: bool) -> Path:
    """Make a run folder: `out`, or runs/NAME with a number where that is taken. Raises ValueError rather than touch a
    folder with something in it, unless it is a run and `overwrite` is set: then the old run is deleted."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    run = Path(out) if out else next(run for run in (Path("runs") / name for name in names) if not run.exists())
    if run.is_file() or (run.is_dir() and any(run.iterdir())):
        try:  # other programs write a config.json too
            is_run = "format" in json.loads((run / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            is_run = False
        if not is_run:
            raise ValueError(f"the output folder is not a run ({run.absolute()}). Name another with --out.")
        if not overwrite:
            raise ValueError(f"there is a run already ({run.absolute()}). Use --resume, --overwrite or another --out.")
        shutil.rmtree(run)
    try:
        run.mkdir(parents=True, exist_ok=out is not None)
    except OSError as error:
        raise ValueError(f"cannot make the run folder ({run.absolute()}: {error.strerror}). Name another.") from None
    return run


def save(run: Path, model, optimizer, state: dict, keep: int):
    """Write the checkpoint of `state["step"]`, point `last` at it, and `best` at `state["best_step"]` unless None;
    then delete all checkpoints but the newest `keep` and the best. Optimizer tensors are named after parameters.
    Raises OSError, with the earlier checkpoints intact, if the disk does not take it."""
    for leftover in run.glob(".step-*"):
        shutil.rmtree(leftover)
    folder = run / f"step-{state['step']:06d}"
    new = run / f".{folder.name}"
    new.mkdir()
    moments = {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    try:
        save_file(model.state_dict(), new / "model.safetensors", metadata={"format": "pt"})
        save_file(moments, new / "optimizer.safetensors", metadata={"format": "pt"})
        (new / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in new.iterdir():
            shutil.copymode(new / "state.json", path)  # safetensors lets nobody else read, whatever the umask
            _flush(path)
        _flush(new)
    except (OSError, SafetensorError) as error:  # a full disk is either
        shutil.rmtree(new)
        raise OSError(
            f"cannot save step {state['step']} ({error}). Make room; earlier checkpoints are intact."
        ) from None
    if folder.exists():  # left by a kill before `last` was moved: nothing points at it
        _delete(folder)
    new.rename(folder)
    write(run / "last", str(state["step"]))
    best = None
    if state["best_step"] is not None:
        best = f"step-{state['best_step']:06d}"
        write(run / "best", str(state["best_step"]))
    for other in _checkpoints(run)[:-keep]:
        if other.name not in (best, folder.name):
            _delete(other)


def _checkpoints(run: Path) -> list[Path]:
    """Its checkpoint folders, by step."""
    return sorted(
        (path for path in run.glob("step-*") if path.name[5:].isdecimal()), key=lambda path: int(path.name[5:])
    )


def _delete(folder: Path):
    # Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}-old")))


def write(path: Path, text: str):
    """Replace a text file, whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="\n")
    _flush(new)
    os.replace(new, path)
    _flush(path.parent)


def _flush(path: Path):
    if os.name == "nt" and path.is_dir():  # Windows has no such thing for folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run that saved last. Raises ValueError if there is none."""
    saved = sorted(runs.glob("*/last"), key=lambda path: path.stat().st_mtime)
    if not saved:
        raise ValueError(f"no run yet ({runs.absolute()}). Train one first: python train.py --norm pre")
    return saved[-1].parent


def find(folder: str | Path, which: str | None = None) -> Path:
    """The checkpoint folder that `folder` is, or that `which` names in a run: "best", "last", a step, or None for the
    best if there is one, else the last. Raises ValueError if it is not there."""
    folder = Path(folder)
    if (folder / "state.json").exists():
        if which is not None:
            raise ValueError(f"that is a checkpoint ({folder}). Name its run to choose {which}.")
        return folder
    if not (folder / "last").exists():
        again = " --overwrite" if (folder / "config.json").exists() else ""  # a run that was ended before it saved
        raise ValueError(f"no checkpoint there ({folder.absolute()}). Train one: python train.py --out {folder}{again}")
    if which is None:
        which = "best" if (folder / "best").exists() else "last"
    step = which
    if which in ("best", "last") and (folder / which).exists():
        step = (folder / which).read_text(encoding="utf-8").strip()
    found = folder / f"step-{int(step):06d}" if step.isdecimal() else None
    if found is None or not found.is_dir():
        there = [name for name in ("best", "last") if (folder / name).exists()]
        there += [str(int(path.name[5:])) for path in _checkpoints(folder)]
        raise ValueError(f"no such checkpoint ({which} in {folder}). There are {', '.join(there)}.")
    return found


def read_state(checkpoint: Path) -> tuple[dict, TrainConfig]:
    """state.json and the configuration in it."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        stored = state["config"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the checkpoint is damaged ({path}: {error}). Use another one.") from None
    return state, config_from_json(stored)


def load_model(folder: str | Path) -> GPT:
    """The model of a run folder (its best checkpoint) or of a checkpoint folder, on the CPU."""
    checkpoint = find(folder)
    with torch.device("meta"):
        model = GPT(read_state(checkpoint)[1].model)
    model.load_state_dict(_tensors(checkpoint / "model.safetensors"), assign=True)
    return model


def restore(run: Path, model, optimizer, config: TrainConfig) -> dict:
    """Load the last checkpoint of a run into a model and its optimizer, made as `config` says; returns the state.
    Raises ValueError if the architecture or the optimizer differs."""
    checkpoint = find(run, "last")
    state, stored = read_state(checkpoint)
    require_same(stored.model, config.model, "the checkpoint has")
    for name in ("optimizer", "init"):
        theirs, ours = getattr(stored, name), getattr(config, name)
        if theirs != ours:
            raise ValueError(f"the checkpoint has another {name} ({theirs}, not {ours}). Leave it as it was.")
    model.load_state_dict(_tensors(checkpoint / "model.safetensors"))
    moments = {name: {} for name, _ in model.named_parameters()}
    for path, value in _tensors(checkpoint / "optimizer.safetensors").items():
        name, _, key = path.rpartition("/")
        moments[name][key] = value
    # torch numbers the parameters in the order of the groups, and knows which value belongs on which device.
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {i: moments[name] for i, name in enumerate(order)}, "param_groups": groups})
    return state


def append(path: Path, record: dict):
    """Add a line to metrics.jsonl or probe.jsonl."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def forget_later_lines(run: Path, step: int):
    """Drop what a killed process wrote of steps after its last checkpoint, which will be done again."""
    for path in run.glob("*.jsonl"):
        # A line without its end was cut short by the kill.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        write(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        # Not load_file, which maps the file into memory: Windows deletes no file that is mapped.
        return load(path.read_bytes())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the checkpoint is damaged ({path}: {error}). Use another one.") from None
