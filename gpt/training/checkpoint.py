"""The checkpoints of a run folder: safetensors and JSON, no pickle, nothing half-written.

    config.json  *.jsonl  best  last  step-000500/{model.safetensors, optimizer.safetensors, state.json}

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so it exists whole or not at all.
`state.json` has the checksums of the two others. `best` and `last` are text files with the step of one checkpoint each.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from gpt.config import Failure, Mistake, ModelConfig, require_same
from gpt.files import FORMAT, courtesy, new_folder, read_json, read_lines, sha256, write
from gpt.model import GPT, with_weights
from gpt.training.run import checkpoints, delete_checkpoint, no_checkpoint, other_steps, path_of, step_of
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


def try_folder(run: Path):
    """Delete what a kill has left of saving or deleting a checkpoint, and save a small one. Raises Mistake if the
    folder does not take it: some network drives rename no folder."""
    try:
        for path in run.iterdir():
            if path.name.startswith(".step-"):
                delete_checkpoint(path)
        with new_folder(trial := run / ".step-trial") as new:
            save_file({"x": torch.zeros(1)}, new / "model.safetensors")
        delete_checkpoint(trial)
    except (OSError, SafetensorError) as error:
        raise Mistake(f"cannot save into the run's folder ({run.absolute()}: {error}). Name another: --out.") from None


def save(run: Path, weights: dict, moments: dict, state: dict):
    """Write the checkpoint of `state["step"]` and point `last` at it. `weights` are tensors by name; `moments` are the
    optimizer's tensors for each of these names, by their own. The earlier checkpoints stay until `tidy`.
    Raises Failure if the disk does not take it."""
    folder = path_of(run, state["step"])
    flat_moments = {f"{name}/{key}": value for name, own in moments.items() for key, value in own.items()}
    try:
        with new_folder(folder) as new:
            for name, tensors in (("model", weights), ("optimizer", flat_moments)):
                # safetensors takes no transposed tensor, and none that shares its memory with another.
                apart = {key: value.clone(memory_format=torch.contiguous_format) for key, value in _views(tensors)}
                save_file(tensors | apart, new / f"{name}.safetensors", metadata={"format": "pt"})
            checksums = {path.name: sha256(path) for path in new.iterdir()}
            (new / "state.json").write_text(json.dumps(state | {"sha256": checksums}, indent=1), encoding="utf-8")
        write(run / "last", str(state["step"]))
    except (OSError, SafetensorError) as error:  # a full disk is either
        remedy = "Make room, or mend that; earlier checkpoints are intact"
        raise Failure(f"cannot save step {state['step']} ({error}). {remedy}") from None


def _views(tensors: dict):
    """The tensors, by name, that are not contiguous or share their memory with one before."""
    seen = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen or not tensor.is_contiguous():
            yield name, tensor
        seen.add(memory)


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
    with courtesy("delete old checkpoints", OSError):
        for other in checkpoints(run)[:-keep]:
            if other not in needed:
                delete_checkpoint(other)


def leave_branch(run: Path, state: dict):
    """Delete the checkpoints of steps after `state["step"]`, where the run goes on: another branch made them. So was
    the outcome that a comparison has noted."""
    (run / "outcome.json").unlink(missing_ok=True)
    write(run / "last", str(state["step"]))
    if state["best_step"] is None:
        (run / "best").unlink(missing_ok=True)
    else:
        write(run / "best", str(state["best_step"]))
    for path in checkpoints(run):
        if step_of(path) > state["step"]:
            delete_checkpoint(path)


def find(folder: str | Path, which: str | None = None, hint: str = "") -> Path:
    """The checkpoint folder that `folder` is, or that `which` names in a run: "best", "last", a step, or None for the
    best if there is one, else the last. Raises Mistake if it is not there; `hint` is a further remedy where there is no
    such folder."""
    folder = Path(folder)
    if (folder / "state.json").exists():
        if which is not None:
            raise Mistake(f"that is a checkpoint ({folder}). Name its run to choose {which}.")
        return folder
    if not (saved := checkpoints(folder)):
        raise no_checkpoint(folder, hint)
    if which is None:
        which = "best" if (folder / "best").exists() else "last"
    step = which
    if which in ("best", "last") and (folder / which).exists():
        step = (folder / which).read_text(encoding="utf-8", errors="replace").strip()
    elif which == "last":  # a kill came before it was written
        step = str(step_of(saved[-1]))
    checkpoint = path_of(folder, int(step)) if step.isdecimal() and len(step) < 20 else None
    if checkpoint is None or not checkpoint.is_dir():
        place = which if step == which else f"{which}, step {step},"
        raise Mistake(f"no such checkpoint ({place} in {folder}). {other_steps(folder)}")
    return checkpoint


def _damaged(path: Path, error) -> Mistake:
    folder = path if path.is_dir() else path.parent
    state = "cannot be read" if isinstance(error, OSError) else "is damaged"
    return Mistake(f"the checkpoint {state} ({path}: {error}). {other_steps(folder.parent, but=folder)}")


def read_state(checkpoint: Path) -> tuple[dict, TrainConfig]:
    """state.json and the configuration in it. Raises Mistake if it is damaged."""
    path = checkpoint / "state.json"
    try:
        state = read_json(path)
        config, step, checksums = state.get("config", {}), state.get("step"), state.get("sha256", {})
        state = {"best_step": None, "best_val_loss": None, "val_loss": None, "record": None} | state
        losses = (type(state[name]) in (float, type(None)) for name in ("val_loss", "best_val_loss"))
        steps = (type(each) is int and each >= 0 for each in (step, state["best_step"] or 0))
        objects = (isinstance(each, dict) for each in (config, checksums, state["record"] or {}))
        if not all([*losses, *steps, *objects]):
            raise Mistake("it lacks its parts")
    except Mistake as error:
        raise _damaged(path, error) from None
    return state, config_from_json(config)


def load_model(folder: str | Path, config: ModelConfig | None = None) -> GPT:
    """The model of a run folder (its best checkpoint) or of a checkpoint folder, on the CPU, in evaluation mode. A
    `config` may differ from the stored one as in gpt.pretrained.load."""
    checkpoint = find(folder)
    state, stored = read_state(checkpoint)
    require_same(stored.model, config or stored.model, str(folder), shorter=True)
    weights = _tensors(checkpoint, "model.safetensors", state)
    try:
        return with_weights(stored.model, weights, config, "cpu")
    except Mistake as error:  # names and shapes are those of the code that saved it
        raise Mistake(f"the checkpoint's model cannot be made ({checkpoint}: {error}). Put its code back.") from None


def look_up(read: Callable, folder: str | Path, which: str | None = None, hint: str = ""):
    """What `read` makes of the checkpoint folder that `find` has for these. A run that goes on meanwhile deletes old
    checkpoints, so one that is gone is looked up again."""
    checkpoint = None
    for last_try in (False, False, True):
        try:
            checkpoint = find(folder, which, hint)
            return read(checkpoint)
        except Mistake:
            if last_try or (checkpoint and checkpoint.is_dir()):
                raise
    raise AssertionError


def load_run(folder: str | Path, which: str | None = None, hint: str = "") -> tuple[Path, TrainConfig, GPT]:
    """The checkpoint folder that `look_up` has for these, its configuration and its model."""
    return look_up(lambda each: (each, read_state(each)[1], load_model(each)), folder, which, hint)


def read(checkpoint: Path, config: TrainConfig) -> tuple[dict, dict, dict]:
    """The state, the weights and the moments that `save` wrote. Raises Mistake if they are damaged, or of another
    architecture or optimizer than `config`'s."""
    state, stored = read_state(checkpoint)
    require_same(stored.model, config.model, "the checkpoint")
    for name in ("optimizer", "tokenizer", "init"):
        before, now = getattr(stored, name), getattr(config, name)
        same_folder = name == "init" and Path(before).absolute() == Path(now).absolute()
        if before != now and not same_folder:
            raise Mistake(f"the checkpoint has another {name} ({before}, not {now}). Leave it as it was.")
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
    elsewhere = any(before.get(name) != now[name] for name in ("data", "val_fraction"))
    if not elsewhere and state.get("corpus", digest) != digest:
        raise Mistake(f"the corpus has changed since the checkpoint ({config.data}). Put it back, or rename this one.")
    if elsewhere or any(line["step"] == state["step"] for line in read_lines(run / "metrics.jsonl")):
        state["record"] = None  # logged
    other_windows = before.get("eval_tokens", now["eval_tokens"]) != now["eval_tokens"]
    if elsewhere or other_windows or (state["best_step"] and not path_of(run, state["best_step"]).exists()):
        state |= {"val_loss": None, "best_step": None, "best_val_loss": None}  # losses of another text, or lost
    changed = {name: before.get(name, "absent") for name in now if before.get(name, "absent") != now[name]}
    return state, weights, moments, [f"changed {name}: {old} -> {now[name]}" for name, old in changed.items()]


def _tensors(checkpoint: Path, name: str, state: dict) -> dict[str, torch.Tensor]:
    path = checkpoint / name
    try:
        actual = sha256(path)
        if state.get("sha256", {}).get(name, actual) != actual:
            raise ValueError("its checksum differs from state.json's")
        if not str(path).isprintable():  # a byte that is not UTF-8: safe_open refuses it
            return load(path.read_bytes())
        with safe_open(path, framework="pt") as file:  # copied: Windows deletes no file that is mapped
            return {key: file.get_tensor(key).clone() for key in file.keys()}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # torch's, for a file that does not open
        raise _damaged(path, error) from None
