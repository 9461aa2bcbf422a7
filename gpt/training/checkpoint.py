"""The checkpoints of a run folder: safetensors and JSON, no pickle, nothing half-written.

    config.json  *.jsonl  best  last  step-000500/{model.safetensors, optimizer.safetensors, state.json}

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so it exists whole or not at all.
`state.json` has the checksums of the two others. `best` and `last` are text files with the step of one checkpoint each.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from gpt.config import Mistake, one_of, require_same, unknown
from gpt.model import GPT, shape_only
from gpt.training.files import FORMAT, flush, read_json, write
from gpt.training.run import saved_runs
from gpt.training.settings import TrainConfig, configure, flat


def config_to_json(config: TrainConfig) -> dict:
    """Every setting, the vocabulary's size and the format's version."""
    rates = {"lr": config.peak_lr, "min_lr": config.last_lr}
    return {"format": FORMAT, "vocab_size": config.model.vocab_size, **flat(config), **rates}


def config_from_json(stored: dict) -> TrainConfig:
    """The opposite; a setting that is absent has its default. Raises Mistake for another format."""
    settings = {"optimizer": "adamw"} | stored  # the only one there was
    found = settings.pop("format", None)
    if found != FORMAT:
        raise Mistake(f"the run has another format ({found}, not {FORMAT}). Use the version that wrote it.")
    vocab_size = settings.pop("vocab_size", None)
    config = configure(settings)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def save(run: Path, weights: dict, moments: dict, state: dict, keep: int):
    """Write the checkpoint of `state["step"]`, point `last` at it, and `best` at `state["best_step"]` unless None;
    then delete all checkpoints but the newest `keep` and the best. `weights` are tensors by name; `moments` the
    optimizer's for each of these names, by their own.
    Raises OSError, with the earlier checkpoints intact, if the disk does not take it."""
    for leftover in run.glob(".step-*"):
        shutil.rmtree(leftover)
    folder = path_of(run, state["step"])
    new = run / f".{folder.name}"
    new.mkdir()
    flat_moments = {f"{name}/{key}": value for name, own in moments.items() for key, value in own.items()}
    try:
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        save_file(flat_moments, new / "optimizer.safetensors", metadata={"format": "pt"})
        checksums = {path.name: _sha256(path.read_bytes()) for path in new.iterdir()}
        (new / "state.json").write_text(json.dumps(state | {"sha256": checksums}, indent=1), encoding="utf-8")
        for path in new.iterdir():
            shutil.copymode(new / "state.json", path)  # safetensors lets nobody else read, whatever the umask
            flush(path)
        flush(new)
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
        best = path_of(run, state["best_step"]).name
        write(run / "best", str(state["best_step"]))
    for other in _checkpoints(run)[:-keep]:
        if other.name not in (best, folder.name):
            _delete(other)


def path_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return run / f"step-{step:06d}"


def _checkpoints(run: Path) -> list[Path]:
    """Its checkpoint folders, by step."""
    return sorted(
        (path for path in run.glob("step-*") if path.name[5:].isdecimal()), key=lambda path: int(path.name[5:])
    )


def _delete(folder: Path):
    # Renamed first, so that a kill half-way leaves nothing that looks like a checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}-old")))


def find(folder: str | Path, which: str | None = None) -> Path:
    """The checkpoint folder that `folder` is, or that `which` names in a run: "best", "last", a step, or None for the
    best if there is one, else the last. Raises Mistake if it is not there."""
    folder = Path(folder)
    if (folder / "state.json").exists():
        if which is not None:
            raise Mistake(f"that is a checkpoint ({folder}). Name its run to choose {which}.")
        return folder
    if not (folder / "last").exists():
        if not folder.exists() and (runs := saved_runs()):
            raise Mistake(unknown("run", str(folder), [str(run) for run in runs]))
        if inside := saved_runs(folder):
            raise Mistake(f"that is a folder of runs ({folder}). Name one of them, as {inside[-1]}.")
        again = " --overwrite" if (folder / "config.json").exists() else ""  # a run that was ended before it saved
        if not again and (folder.is_file() or (folder.exists() and any(folder.iterdir()))):
            raise Mistake(f"that is no run ({folder.absolute()}). Name a run's folder, as runs/python-docs-pre.")
        raise Mistake(f"no checkpoint there ({folder.absolute()}). Train one: python train.py --out {folder}{again}")
    if which is None:
        which = "best" if (folder / "best").exists() else "last"
    step = which
    if which in ("best", "last") and (folder / which).exists():
        step = (folder / which).read_text(encoding="utf-8").strip()
    found = path_of(folder, int(step)) if step.isdecimal() else None
    if found is None or not found.is_dir():
        what = which if step == which else f"{which}, step {step},"
        raise Mistake(f"no such checkpoint ({what} in {folder}). {_others(folder)}")
    return found


def _others(run: Path, but: Path | None = None) -> str:
    """The remedy where one checkpoint is not there, or will not do."""
    steps = [int(path.name[5:]) for path in _checkpoints(run) if path != but]
    return f"Use another one: --checkpoint {one_of(steps)}." if steps else "There is no other one: train again."


def _damaged(path: Path, error) -> Mistake:
    folder = path if path.is_dir() else path.parent
    return Mistake(f"the checkpoint is damaged ({path}: {error}). {_others(folder.parent, but=folder)}")


def read_state(checkpoint: Path) -> tuple[dict, TrainConfig]:
    """state.json and the configuration in it. Raises Mistake if it is damaged."""
    path = checkpoint / "state.json"
    try:
        state = read_json(path)
        config, step, checksums = state.get("config"), state.get("step"), state.get("sha256", {})
        if not (isinstance(config, dict) and type(step) is int and step >= 0 and isinstance(checksums, dict)):
            raise Mistake("it lacks its parts")
    except ValueError as error:
        raise _damaged(path, error) from None
    return state, config_from_json(config)


def load_model(folder: str | Path) -> GPT:
    """The model of a run folder (its best checkpoint) or of a checkpoint folder, on the CPU."""
    checkpoint = find(folder)
    state, config = read_state(checkpoint)
    weights = _tensors(checkpoint, "model.safetensors", state)
    if config.model.n_layers > len(weights):  # before anything is made as large as a stranger says
        raise _damaged(checkpoint, f"{len(weights)} tensors, {config.model.n_layers} blocks")
    try:
        model = shape_only(config.model)
        model.load_state_dict(weights, assign=True)
    except ValueError as error:
        raise Mistake(f"the checkpoint's model cannot be made ({checkpoint}: {error}). Put its code back.") from None
    except RuntimeError as error:  # other names or shapes than the configuration's, or absurd ones
        raise _damaged(checkpoint, error) from None
    return model


def read(checkpoint: Path, config: TrainConfig) -> tuple[dict, dict, dict]:
    """What `save` wrote: the state, the weights and the moments. Raises Mistake if it is damaged, or of another
    architecture or optimizer than `config`'s."""
    state, stored = read_state(checkpoint)
    require_same(stored.model, config.model, "the checkpoint has")
    for name in ("optimizer", "init"):
        theirs, ours = getattr(stored, name), getattr(config, name)
        if theirs != ours:
            raise Mistake(f"the checkpoint has another {name} ({theirs}, not {ours}). Leave it as it was.")
    weights = _tensors(checkpoint, "model.safetensors", state)
    moments = {name: {} for name in weights}
    for path, value in _tensors(checkpoint, "optimizer.safetensors", state).items():
        name, _, key = path.rpartition("/")
        if name not in moments:
            raise _damaged(checkpoint, f"moments of {name}")
        moments[name][key] = value
    return state, weights, moments


def resume(run: Path, which: str, config: TrainConfig, digest: str) -> tuple[dict, dict, dict, list[str]]:
    """What `read` finds in a checkpoint of the run, ready to go on with `config` and a corpus of that `digest`, and a
    line on each setting that differs. Raises Mistake where it cannot go on."""
    state, weights, moments = read(find(run, which), config)
    before, now = state["config"], config_to_json(config)
    if state["step"] > config.steps:
        raise Mistake(f"the run is past that (steps {config.steps}, done {state['step']}). Give more steps.")
    elsewhere = any(before[name] != now[name] for name in ("data", "val_fraction"))
    if not elsewhere and state.get("corpus", digest) != digest:
        raise Mistake(f"the corpus has changed since ({config.data}). Put it back, or rename the new one.")
    if elsewhere or (state["best_step"] and not path_of(run, state["best_step"]).exists()):
        state |= {"val_loss": None, "best_step": None, "best_val_loss": None}  # losses of another text, or lost
    changed = {name: before.get(name, "absent") for name in now if before.get(name, "absent") != now[name]}
    return state, weights, moments, [f"changed {name}: {old} -> {now[name]}" for name, old in changed.items()]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _tensors(checkpoint: Path, name: str, state: dict) -> dict[str, torch.Tensor]:
    path = checkpoint / name
    try:
        # Not load_file, which maps the file into memory: Windows deletes no file that is mapped.
        content = path.read_bytes()
        expected = state.get("sha256", {}).get(name)
        if expected is not None and expected != _sha256(content):
            raise Mistake("its checksum differs from state.json's")
        tensors = load(content)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None
    # What torch.compile and DDP put before the names, if somebody saved their module.
    return {re.sub(r"^((_orig_mod|module)\.)+", "", name): tensor for name, tensor in tensors.items()}
