"""A comparison's folder: a folder for each run, and results.json: settings, outcomes, and which code made them."""

import hashlib
import inspect
import json
import shutil
import sys
from pathlib import Path

from gpt.config import Mistake
from gpt.training.files import FORMAT, read_json, write
from gpt.training.settings import SETTINGS


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
        for path in out.glob("*/config.json"):
            shutil.rmtree(path.parent)
        results = None
    results = {"format": FORMAT, "settings": settings, "runs": {}, "code": {}} | (results or {})
    stored = {name: setting.default for name, setting in SETTINGS.items()} | results["settings"]
    for name, value in settings.items():
        if stored.get(name) != value:
            values = f"{stored.get(name)}, not {value}, in {out}"
            raise Mistake(f"the comparison has another {name} ({values}). Leave it, or name another --out.")
    begun = [name for name in code if name in results["runs"] or (out / name / "last").exists()]
    if changed := [name for name in begun if results["code"].get(name, code[name]) != code[name]]:
        runs = f"{', '.join(changed)} in {out}"
        raise Mistake(
            f"the code has changed since these runs began ({runs}). Delete their folders, or name another --out."
        )
    if unknown := [name for name in begun if name not in results["code"]]:
        runs = f"{', '.join(unknown)} in {out}"
        print(
            f"warning: nothing tells which code made these runs ({runs}). Delete their folders to repeat them.",
            file=sys.stderr,
        )
    results["code"] |= {name: code[name] for name in code if name not in begun}
    save_results(out, results)
    return results
