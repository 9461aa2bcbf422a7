"""Which code decides a run: a checksum, by which runs of other code are told apart."""

import ast
import contextlib
import functools
import hashlib
import inspect
import re
import sys


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
        texts.add(_stable(repr(value)))
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
        texts |= {_stable(f"{code.co_code.hex()} {code.co_names} {code.co_consts}") for code in codes}
    while names:
        name = names.pop()
        if name in statements and (text := ast.unparse(statements[name])) not in texts:
            texts.add(text)
            inside = [*ast.walk(statements[name])]
            local = {part.arg for part in inside if isinstance(part, ast.arg)}
            names += [part.id for part in inside if isinstance(part, ast.Name) and part.id not in local]


def _stable(text: str) -> str:
    """The text without the addresses of objects, which are others in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


@functools.cache
def _statements(source: str) -> dict[str, ast.stmt]:
    """The classes, functions and values at the top of a file by name, but for BLOCKS, which names all placements."""
    statements = {}
    for node in ast.parse(source).body:
        for target in node.targets if isinstance(node, ast.Assign) else [node]:
            statements[getattr(target, "name", getattr(target, "id", ""))] = node
    statements.pop("BLOCKS", None)
    return statements
