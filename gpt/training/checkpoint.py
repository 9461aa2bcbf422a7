"""The checkpoints of a run folder: safetensors and JSON, no pickle, nothing half-written.

    config.json  *.jsonl  best  last  step-000500/{model.safetensors, optimizer.safetensors, state.json}

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so it exists whole or not at all.
`state.json` has the checksums of the two others. `best` and `last` are text files with the step of one checkpoint each.
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from gpt.config import Failure, Mistake, one_of, require_same
from gpt.model import GPT
from gpt.training.files import FORMAT, flush, read_json, read_lines, write
from gpt.training.run import saved_runs
from gpt.training.settings import TrainConfig, configure, flat


def config_to_json(config: TrainConfig) -> dict:
    """Every setting, the vocabulary's size and the format's version."""
    rates = {"lr": config.peak_lr, "min_lr": config.last_lr}
    return {"format": FORMAT, "vocab_size": config.model.vocab_size, **flat(config), **rates}


def config_from_json(stored: dict) -> TrainConfig:
    """The opposite; a setting that is absent has its default. Raises Mistake for another format."""
    settings = dict(stored)
    version = settings.pop("format", None)
    if version != FORMAT:
        raise Mistake(f"the run has another format ({version}, not {FORMAT}). Use the version that wrote it.")
    vocab_size = settings.pop("vocab_size", None)
    config = configure(settings)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def save(run: Path, weights: dict, moments: dict, state: dict):
    """Write the checkpoint of `state["step"]` and point `last` at it. `weights` are tensors by name; `moments` are the
    optimizer's tensors for each of these names, by their own. The earlier checkpoints stay until `tidy`.
    Raises Failure if the disk does not take it."""
    _sweep(run)
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
        raise Failure(
            f"cannot save step {state['step']} ({error}). Make room; earlier checkpoints are intact."
        ) from None
    if folder.exists():  # a kill came before `last` was moved: nothing points at it
        _delete(folder)
    new.rename(folder)
    write(run / "last", str(state["step"]))


def tidy(run: Path, state: dict, keep: int):
    """Note in the checkpoint of `state["step"]` what an evaluation has added to `state`, and point `best` at
    `state["best_step"]` unless None; then delete all checkpoints but the newest `keep`, this one and the best."""
    path = path_of(run, state["step"]) / "state.json"
    stored = read_json(path)
    if stored | state != stored:
        write(path, json.dumps(stored | state, indent=1))
    needed = {path.parent}
    if state["best_step"] is not None:
        needed.add(path_of(run, state["best_step"]))
        write(run / "best", str(state["best_step"]))
    for other in _checkpoints(run)[:-keep]:
        if other not in needed:
            _delete(other)


def _sweep(run: Path):
    """Delete what a kill has left of saving or deleting a checkpoint."""
    for leftover in run.glob(".step-*"):
        shutil.rmtree(leftover)


def path_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return run / f"step-{step:06d}"


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, by step."""
    folders = (path for path in run.glob("step-*") if path.name[5:].isdecimal())
    return sorted(folders, key=lambda path: int(path.name[5:]))


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
        runs = saved_runs(folder) or saved_runs()
        remedy = f"Runs that have one: {', '.join(map(str, runs[-4:]))}." if runs else "Train one: python train.py"
        raise Mistake(f"no checkpoint there ({folder.absolute()}). {remedy}")
    if which is None:
        which = "best" if (folder / "best").exists() else "last"
    step = which
    if which in ("best", "last") and (folder / which).exists():
        step = (folder / which).read_text(encoding="utf-8", errors="replace").strip()
    checkpoint = path_of(folder, int(step)) if step.isdecimal() else None
    if checkpoint is None or not checkpoint.is_dir():
        place = which if step == which else f"{which}, step {step},"
        raise Mistake(f"no such checkpoint ({place} in {folder}). {_others(folder)}")
    return checkpoint


def _others(run: Path, but: Path | None = None) -> str:
    """The remedy where a checkpoint is not there, or is damaged."""
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
    except Mistake as error:
        raise _damaged(path, error) from None
    return state, config_from_json(config)


def load_model(folder: str | Path) -> GPT:
    """The model of a run folder (its best checkpoint) or of a checkpoint folder, on the CPU, in evaluation mode."""
    checkpoint = find(folder)
    state, config = read_state(checkpoint)
    weights = _tensors(checkpoint, "model.safetensors", state)
    if config.model.n_layers > len(weights):  # before anything is made as large as an untrusted file says
        raise _damaged(checkpoint, f"{len(weights)} tensors, {config.model.n_layers} blocks")
    try:
        with torch.device("meta"):  # shapes alone: the weights come from the file
            model = GPT(config.model)
    except Mistake as error:
        raise Mistake(f"the checkpoint's model cannot be made ({checkpoint}: {error}). Put its code back.") from None
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # names or shapes that are not the configuration's
        raise _damaged(checkpoint, error) from None
    return model.eval()


def read(checkpoint: Path, config: TrainConfig) -> tuple[dict, dict, dict]:
    """The state, the weights and the moments that `save` wrote. Raises Mistake if they are damaged, or of another
    architecture or optimizer than `config`'s."""
    state, stored = read_state(checkpoint)
    require_same(stored.model, config.model, "the checkpoint")
    for name in ("optimizer", "init"):
        if getattr(stored, name) != getattr(config, name):
            values = f"{getattr(stored, name)}, not {getattr(config, name)}"
            raise Mistake(f"the checkpoint has another {name} ({values}). Leave it as it was.")
    weights = _tensors(checkpoint, "model.safetensors", state)
    moments: dict = {name: {} for name in weights}
    for path, value in _tensors(checkpoint, "optimizer.safetensors", state).items():
        name, _, key = path.rpartition("/")
        if name not in moments:
            raise _damaged(checkpoint, f"moments of {name}")
        moments[name][key] = value
    state.pop("sha256", None)  # of these files, and not of the next checkpoint's
    return state, weights, moments


def resume(run: Path, which: str, config: TrainConfig, digest: str) -> tuple[dict, dict, dict, list[str]]:
    """The contents of a checkpoint of the run, ready to go on with `config` and a corpus of that `digest`, and a line
    on each setting that differs. Raises Mistake if it cannot go on."""
    state, weights, moments = read(find(run, which), config)
    before, now = state["config"], config_to_json(config)
    if state["step"] > config.steps:
        raise Mistake(f"the run has done more steps (--steps {config.steps}, done {state['step']}). Give more.")
    elsewhere = any(before[name] != now[name] for name in ("data", "val_fraction"))
    if not elsewhere and state.get("corpus", digest) != digest:
        raise Mistake(f"the corpus has changed since the checkpoint ({config.data}). Put it back, or rename this one.")
    _sweep(run)
    if elsewhere or any(line["step"] == state["step"] for line in read_lines(run / "metrics.jsonl")):
        state["record"] = None  # logged
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
            raise ValueError("its checksum differs from state.json's")
        return load(content)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None
