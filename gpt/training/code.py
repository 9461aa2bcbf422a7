"""Which code decides a run: a checksum, by which runs of other code are told apart."""

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import re

MODEL = ("layers", "norms", "loss", "tokenizer")
TRAINING = ("corpus", "data", "device", "optim", "report", "settings", "trainer")
FILES = [*(f"gpt.{name}" for name in MODEL), *(f"gpt.training.{name}" for name in TRAINING)]
unparse = functools.cache(ast.unparse)


def code_of(model, *functions) -> str:
    """A checksum of what decides a run: these functions; what BLOCKS has for the placement; the classes of the model's
    modules; what all these name at the top of their own files, so that another placement may be added beside them; and
    the files that all runs use. Other files are not seen, nor comments. A file is read once in a process, at the first
    call: what is edited later is not what this process runs."""
    from gpt import BLOCKS

    texts: set[str] = set()
    seen: set[int] = set()
    for each in (BLOCKS[model.config.norm], *functions, *{*map(type, model.modules())}):
        _add_code(each, texts, seen)
    sources = [*sorted(texts), *(unparse(_tree(name)) for name in FILES)]
    return hashlib.sha256("\n".join(sources).encode("utf-8")).hexdigest()


def _add_code(value, texts: set[str], seen: set[int]):
    """Add to `texts` what a value is made of: its source if it has one, and the values in it."""
    if id(value) in seen:
        return
    if inspect.isclass(value) or inspect.isfunction(value):
        # What those of torch enclose is its state, which changes while a process runs.
        if value.__module__.partition(".")[0] in ("torch", "builtins"):
            return
    seen.add(id(value))
    inside: list = []
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords, *value.keywords.values()]
    elif inspect.isclass(value):
        inside += value.__bases__
        inside += [content for function in vars(value).values() for content in _enclosed(function)]
        _add_source(value, [value, *vars(value).values()], texts)
    elif inspect.isfunction(value):
        inside = _enclosed(value)
        _add_source(value, [value], texts)
    elif hasattr(value, "__dict__") and callable(value):
        inside = [type(value), *vars(value), *vars(value).values()]
    else:
        texts.add(_stable(repr(value)))
    for each in inside:
        _add_code(each, texts, seen)


def _enclosed(function) -> list:
    """The values of a function's surroundings that it uses."""
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is still empty
            contents.append(cell.cell_contents)
    return contents


def _add_source(each, functions: list, texts: set[str]):
    """Add to `texts` the source of a class or function and of all that it names at the top of its file; of one that
    code has made, which has no source, the code of the `functions`."""
    statements: dict[str, ast.stmt] = {}
    with contextlib.suppress(OSError, TypeError, ImportError, ValueError):
        statements = _statements(each.__module__)
    names = [each.__qualname__.partition(".")[0]]
    if names[0] not in statements:
        codes = (function.__code__ for function in functions if hasattr(function, "__code__"))
        texts |= {_stable(f"{code.co_code.hex()} {code.co_names} {code.co_consts}") for code in codes}
    while names:
        name = names.pop()
        if name in statements and (text := unparse(statements[name])) not in texts:
            texts.add(text)
            inside = [*ast.walk(statements[name])]
            local = {part.arg for part in inside if isinstance(part, ast.arg)}
            names += [part.id for part in inside if isinstance(part, ast.Name) and part.id not in local]


def _stable(text: str) -> str:
    """The text without the addresses of objects, which are others in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


@functools.cache
def _tree(module: str) -> ast.Module:
    """The file of an imported module, parsed."""
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _statements(module: str) -> dict[str, ast.stmt]:
    """The classes, functions and values at the top of a file by name, but for BLOCKS, which names all placements."""
    statements = {}
    for node in _tree(module).body:
        for target in node.targets if isinstance(node, ast.Assign) else [node]:
            statements[getattr(target, "name", getattr(target, "id", ""))] = node
    statements.pop("BLOCKS", None)
    return statements
