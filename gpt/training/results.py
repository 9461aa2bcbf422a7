"""A comparison's folder: a folder for each run, and results.json: settings, outcomes, and which code made them."""

import hashlib
import inspect
import json
from pathlib import Path

from gpt.config import Mistake
from gpt.files import FORMAT, read_json, write
from gpt.screen import say
from gpt.training.run import delete_run, has_checkpoint, is_run
from gpt.training.settings import SETTINGS, configure, flat


def run_name(placement: str, seed: int) -> str:
    """The name of a run: its folder in the comparison's folder, and its key in results.json."""
    return f"{placement}-{seed}"


def code_of(model, *functions) -> str:
    """A checksum of the sources that decide a run: these functions; the classes of the model's modules, and the
    functions of gpt/blocks.py that they name, so that another placement may be added; and the files that all runs use.
    Not seen are constants of gpt/blocks.py, and files that are not named here."""
    from gpt import BLOCKS, blocks, layers, loss, norms, tokenizer
    from gpt.training import corpus, data, optim, settings, trainer

    classes = {each for module in model.modules() for each in type(module).__mro__}
    ours: list = [each for each in classes if each.__module__.split(".")[0] not in ("torch", "builtins")]
    functions += tuple(filter(inspect.isfunction, [BLOCKS[model.config.norm]]))
    wiring = "".join(inspect.getsource(each) for each in (*sorted(ours, key=str), *functions))
    helpers = [each for name, each in vars(blocks).items() if inspect.isfunction(each) and name in wiring]
    files: list = [layers, norms, loss, tokenizer, corpus, data, optim, settings, trainer]
    sources = wiring + "".join(inspect.getsource(each) for each in (*helpers, *files))
    return hashlib.sha256(sources.encode("utf-8")).hexdigest()


def read_results(out: Path) -> dict | None:
    """The object in results.json; None if the folder is empty or missing. Raises Mistake if it is no comparison's."""
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return None
    try:
        results = read_json(out / "results.json")
    except Mistake:
        results = {}
    if results.get("format") != FORMAT or not {"settings", "runs"} <= results.keys():
        raise Mistake(f"the output folder is not a comparison ({out.absolute()}). Name another with --out.")
    for name in [name for name in results["runs"] if not (out / name).is_dir()]:
        del results["runs"][name]  # the user deleted the run to have it done again
    return results


def resolved(settings: dict) -> dict:
    """The settings of a comparison with what None stands for, so that a default that is typed is the same."""
    config = configure({name: value for name, value in settings.items() if name in SETTINGS})
    settings = flat(config) | settings | {"lr": config.peak_lr, "min_lr": config.last_lr}
    return settings | {"micro_batch_size": config.micro_size(), "save_every": config.save_every or config.eval_every}


def first_difference(results: dict, settings: dict) -> tuple | None:
    """The name of the first setting that is another in these results, its value there, and here; None if all agree."""
    stored, settings = resolved(results["settings"]), resolved(settings)
    values = ((name, stored.get(name), value) for name, value in settings.items())
    return next((each for each in values if each[1] != each[2]), None)


def default_folder(placements: list[str], settings: dict) -> Path:
    """runs/compare-PLACEMENTS, with a number: the first that is free or has a comparison of the same settings."""
    name, number = "-".join(["compare", *placements])[:100], 1
    while _taken(out := Path("runs", name if number == 1 else f"{name}-{number}"), settings):
        number += 1
    return out


def _taken(out: Path, settings: dict) -> bool:
    try:
        results = read_results(out)
    except Mistake:  # it is no comparison
        return True
    return (out.exists() and not out.is_dir()) or (
        results is not None and first_difference(results, settings) is not None
    )


def make_folder(out: Path):
    """Make the comparison's folder, if need be. Raises Mistake if there is something else of that name."""
    read_results(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"cannot make the folder ({out.absolute()}: {error.strerror}). Name another.") from None


def save_results(out: Path, results: dict):
    """Write results.json."""
    write(out / "results.json", json.dumps(results, indent=1))


def open_results(out: Path, settings: dict, code: dict[str, str], overwrite: bool) -> dict:
    """The results to which runs of these settings are added; `code` has a checksum for the name of each. Raises Mistake
    if the folder has results of other settings, or if other code made one of these runs."""
    results = read_results(out)
    if results and overwrite:
        save_results(out, results | {"runs": {}})  # first, so that a kill leaves no outcome without its run
        for run in filter(is_run, out.glob("*/")):
            delete_run(run)
        results = None
    results = {"format": FORMAT, "settings": settings, "runs": {}, "code": {}} | (results or {})
    if different := first_difference(results, settings):
        name, there, here = different
        values = f"{there}, not {here}, in {out}"
        raise Mistake(f"the comparison has another {name} ({values}). Leave it, or name another --out.")
    begun = [name for name in code if name in results["runs"] or has_checkpoint(out / name)]
    if changed := [name for name in begun if results["code"].get(name, code[name]) != code[name]]:
        runs = f"{', '.join(changed)} in {out}"
        raise Mistake(
            f"the code has changed since these runs began ({runs}). Delete their folders, or name another --out."
        )
    if unknown := [name for name in begun if name not in results["code"]]:
        runs = f"{', '.join(unknown)} in {out}"
        say(f"warning: nothing tells which code made these runs ({runs}). Delete their folders to repeat them.")
    results["code"] |= {name: code[name] for name in code if name not in begun}
    save_results(out, results)
    return results
