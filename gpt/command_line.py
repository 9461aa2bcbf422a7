"""A script's command line: settings as flags, each error as one line. Imports no torch, so that --help is quick."""

import argparse
import ast
import contextlib
import dataclasses
import errno
import io
import os
import re
import signal
import sys
import traceback
import typing
from pathlib import Path

from gpt.config import TYPES, Failure, Mistake, one_of, type_of, unknown
from gpt.screen import discard_output, say

PACKAGES = {"torch", "numpy", "safetensors", "tiktoken", "tqdm", "matplotlib"}  # in requirements.txt
SPOKEN = ("true", "false", "none", "yes", "no", "on", "off", "0", "1", "")  # what is meant as a switch's value
SIZES = ("--batch-size", "--micro-batch-size", "--context-length", "--d-model")  # what memory grows with


class CommandLine(argparse.ArgumentParser):
    """argparse, with underscores for dashes, the nearest flag for a misspelt one and every error in one line. `hints`
    are remedies, by flag, for flags that a script does not take, and under "" for a word that is no flag."""

    def __init__(self, hints: dict[str, str] | None = None, **arguments):
        super().__init__(allow_abbrev=False, **arguments)
        self.hints = {"": "See --help."} | (hints or {})
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # the shell closed it: else the next file opened would get its number
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
                os.set_inheritable(getattr(sys, name).fileno(), True)

    def add_settings(self, settings: dict[str, dataclasses.Field], without=(), **defaults) -> dict:
        """One flag for each of the `settings` but those `without`, by name; returns their groups by title. A flag that
        the user leaves out is absent from the parsed namespace; `defaults` are the script's own, for --help."""
        groups: dict = {}
        for name, setting in settings.items():
            if title := setting.metadata["group"]:
                group = groups[title] = self.add_argument_group(title)
            if name in without:
                continue
            flag, wanted, default = name.replace("_", "-"), type_of(setting), defaults.get(name, setting.default)
            text = re.sub(r"(\w+) in gpt/(\w+\.py)", _with_names, setting.metadata["help"])
            text += "" if default is None else f" (default: {str(default).lower()})"
            kind: dict = {"metavar": {int: "N", float: "X", str: "NAME", bool: "true|false"}[wanted]}
            if wanted is bool:
                kind |= {"nargs": "?", "const": True}
            group.add_argument(f"--{flag}", type=reader(setting), default=argparse.SUPPRESS, help=text, **kind)
            if wanted is bool:
                off: dict = {"action": "store_const", "const": False, "dest": name, "default": argparse.SUPPRESS}
                group.add_argument(f"--no-{flag}", help=f"the same as --{flag} false", **off)
        return groups

    def _joined(self, argv: list[str]) -> typing.Iterator[str]:
        """The words, with dashes for underscores in flags, and each flag joined to its value, which may begin with a
        dash. The value of a switch, as --bias, is one of SPOKEN, of which only true, false and none are accepted."""
        flags, words = self._option_string_actions, list(argv)
        while words:
            word, equals, value = words.pop(0).partition("=")
            flag = word.replace("_", "-")
            if flag in flags and not equals:
                after = words[0] if words else None
                if flags[flag].const is True and flags[flag].nargs == "?":
                    spoken = after is not None and after.lower() in SPOKEN
                    equals, value = "=", words.pop(0) if spoken else "true"
                elif flags[flag].nargs is None and after and after.partition("=")[0].replace("_", "-") not in flags:
                    equals, value = "=", words.pop(0)
            yield (flag if flag in flags else word) + equals + value

    def parse_args(self, argv):
        known, extra = self.parse_known_args([*self._joined(argv)])
        if extra:
            name = extra[0].partition("=")[0].replace("_", "-")
            if name.startswith("-") and name not in self.hints:
                self.fail(unknown("flag", extra[0].partition("=")[0], self._option_string_actions), 2)
            self.fail(f"unexpected argument ({extra[0]}). {self.hints[name if name in self.hints else '']}", 2)
        if getattr(known, "out", None) == "":  # a variable of the shell that is not set
            self.fail("the name of the output is missing (none). Give --out NAME, or leave it out.", 2)
        return known

    def error(self, message):
        self.fail(f"{message}. See --help.", 2)  # argparse's own messages name no remedy

    def run(self, body: typing.Callable[[], int | None]):
        """Leave the program with the status that `body` returns; a Mistake, or a file that this user may not use, is
        one line and 2; a Failure or another system call that fails is one line and 1. It is no failure if nobody reads
        the output any more."""
        with contextlib.suppress(AttributeError):  # a notebook's stream is no TextIOWrapper
            typing.cast(io.TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8", errors="replace")
        try:
            with installed():
                sys.exit(body())
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end in a traceback
            sys.exit(130)
        except Mistake as error:
            self.fail(str(error), 2)
        except Failure as error:
            self.fail(str(error))
        except OSError as error:
            if error.errno is None or in_model(error):  # not raised by a call to the system, or not by ours
                raise
            if isinstance(error, BrokenPipeError):
                discard_output()
                sys.exit(0)
            if error.errno == errno.ENAMETOOLONG:
                self.fail(f"no file can have this name ({error.filename}: {error.strerror}). Give a shorter one.", 2)
            place = f"{error.filename}: " if error.filename else ""
            if isinstance(error, PermissionError):
                self.fail(f"no permission ({place}{error.strerror}). Change the mode, or name another.", 2)
            if "temporary directory" in str(error):  # tempfile's words; torch, too, writes some files
                self.fail(f"no folder for temporary files ({error.strerror}). Set TMPDIR to one to write to.", 2)
            self.fail(f"cannot read or write ({place}{error.strerror}). Mend that or make room, and start again.")
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            sizes = [flag for flag in SIZES if flag in self._option_string_actions]
            self.fail(f"out of memory ({reason}). {f'Lower {one_of(sizes)}' if sizes else 'End other programs'}.")

    def fail(self, message: str, status: int = 1):
        """Leave the program with one line on stderr, without control characters: an untrusted file may have some."""
        short = " ".join(word[:400] for word in message.split())[:2000]
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
        self.exit(status, f"error: {line}\n")


@contextlib.contextmanager
def installed():
    """In the `with` block, a package that is not installed ends the program with one line and status 2."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        say(f"error: {error.name} is not installed. pip install -r requirements.txt")
        sys.exit(2)


def reader(setting: dataclasses.Field) -> typing.Callable[[str], object]:
    """Reads the value of a setting from a word, for argparse."""
    wanted = type_of(setting)

    def read(word: str):
        if word.lower() == "none" and setting.default is None:
            return None
        try:
            return {"true": True, "false": False}[word.lower()] if wanted is bool else wanted(word)
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"it must be {TYPES[wanted]}, not {word!r}") from None

    return read


def _with_names(match: re.Match) -> str:
    """ "BLOCKS in gpt/blocks.py", with the keys of that dict: read and not imported, because the file imports torch."""
    path = Path(__file__).with_name(match[2])
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == match[1]:
            keys = [key for each in ast.walk(node.value) if isinstance(each, ast.Dict) for key in each.keys]
            return f"{match[0]}: {', '.join(str(key.value) for key in keys if isinstance(key, ast.Constant))}"
    return match[0]


def out_of_memory(error: Exception) -> bool:
    """Whether an exception means that memory ran out. torch has a class for this on GPUs, and only words on CPUs (Linux
    and macOS, Windows) and on Apple's GPUs."""
    words = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "MPS backend out of memory",
    )
    own = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch")
    return isinstance(error, MemoryError) or own or any(each in str(error) for each in words)


def in_model(error: Exception) -> bool:
    """Whether the error comes from making or calling a model: our layers open no files, so a placement has a bug."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return str(Path(__file__).with_name("model.py")) in files
