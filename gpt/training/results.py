"""A comparison's folder: a folder for each run, and results.json: settings, outcomes, and which code made them."""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import sys
from pathlib import Path

from gpt.config import Mistake
from gpt.files import FORMAT, read_json, write
from gpt.screen import say
from gpt.training.run import checkpoints, delete_run, is_run
from gpt.training.settings import SETTINGS, configure, flat


def run_name(placement: str, seed: int) -> str:
    """The name of a run: its folder in the comparison's folder, and its key in results.json."""
    return f"{placement}-{seed}"


def code_of(model, *functions) -> str:
    """A checksum of what decides a run: these functions; what BLOCKS has for the placement; the classes of the model's
    modules; what all these name at the top of their own files, so that another placement may be added beside them; and
    the files that all runs use. Other files are not seen."""
    from gpt import BLOCKS, layers, loss, norms, tokenizer
    from gpt.training import corpus, data, optim, settings, trainer

    texts: set[str] = set()
    for each in (BLOCKS[model.config.norm], *functions, *{*map(type, model.modules())}):
        _add_code(each, texts)
    files = (layers, norms, loss, tokenizer, corpus, data, optim, settings, trainer)
    sources = "\n".join([*sorted(texts), *map(inspect.getsource, files)])
    return hashlib.sha256(sources.encode("utf-8")).hexdigest()


def _add_code(value, texts: set[str]):
    """Add to `texts` what a value is made of: its source if it has one, and the values in it."""
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords, *value.keywords.values()]
    elif inspect.isclass(value):
        inside = []
        for each in value.__mro__:
            _add_source(each, [each, *vars(each).values()], texts)
    elif inspect.isfunction(value):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        _add_source(value, [value], texts)
    elif hasattr(value, "__dict__") and callable(value):
        inside = [type(value), *vars(value), *vars(value).values()]
    else:
        inside = []
        texts.add(repr(value))
    for each in inside:
        _add_code(each, texts)


def _add_source(each, functions: list, texts: set[str]):
    """Add to `texts` the source of a class or function and of all that it names at the top of its file; of one that
    code has made, which has no source, the code of the `functions`."""
    if each.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    statements: dict[str, ast.stmt] = {}
    with contextlib.suppress(OSError, TypeError, KeyError):
        statements = _statements(inspect.getsource(sys.modules[each.__module__]))
    names = [each.__qualname__.partition(".")[0]]
    if names[0] not in statements:
        codes = (function.__code__ for function in functions if hasattr(function, "__code__"))
        texts |= {f"{code.co_code.hex()} {code.co_names} {[*map(str, code.co_consts)]}" for code in codes}
    while names:
        name = names.pop()
        if name in statements and (text := ast.unparse(statements[name])) not in texts:
            texts.add(text)
            inside = [*ast.walk(statements[name])]
            local = {part.arg for part in inside if isinstance(part, ast.arg)}
            names += [part.id for part in inside if isinstance(part, ast.Name) and part.id not in local]


@functools.cache
def _statements(source: str) -> dict[str, ast.stmt]:
    """The classes, functions and values at the top of a file by name, but for BLOCKS, which names all placements."""
    statements = {}
    for node in ast.parse(source).body:
        for target in node.targets if isinstance(node, ast.Assign) else [node]:
            statements[getattr(target, "name", getattr(target, "id", ""))] = node
    statements.pop("BLOCKS", None)
    return statements


def read_results(out: Path) -> dict | None:
    """The object in results.json; None if the folder is empty or missing. Raises Mistake if it is no comparison's."""
    if not out.is_dir() or all(path.name.startswith(".") for path in out.iterdir()):
        return None
    try:
        results = read_json(out / "results.json")
    except Mistake:
        results = {}
    parts = [results.get("settings"), results.get("runs"), results.get("code", {})]
    if results.get("format") != FORMAT or not all(isinstance(part, dict) for part in parts):
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
        for run in [out / Path(name).name for name in (*results["runs"], *results.get("code", {}))]:
            if is_run(run) and not run.is_symlink():
                delete_run(run)
                (run / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the user has put something there
                    run.rmdir()
        results = None
    results = {"format": FORMAT, "settings": settings, "runs": {}, "code": {}} | (results or {})
    if different := first_difference(results, settings):
        name, there, here = different
        values = f"{there}, not {here}, in {out}"
        raise Mistake(f"the comparison has another {name} ({values}). Leave it, or name another --out.")
    begun = [name for name in code if name in results["runs"] or checkpoints(out / name)]
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
