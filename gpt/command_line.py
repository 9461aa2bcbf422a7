"""A script on the terminal: settings as flags, each error as one line, and how far it is. Imports no torch, so that
--help is quick."""

import argparse
import dataclasses
import io
import os
import shutil
import sys
import textwrap
import typing

from gpt.config import Failure, Mistake, type_of, unknown


class CommandLine(argparse.ArgumentParser):
    """argparse, with underscores for dashes, the nearest flag for a misspelt one and every error in one line. `hints`
    are remedies, by flag, for flags that a script does not take, and under "" for a word that is no flag."""

    def __init__(self, hints: dict[str, str] | None = None, **arguments):
        super().__init__(allow_abbrev=False, **arguments)
        self.hints = {"": "See --help."} | (hints or {})

    def add_settings(self, settings: dict[str, dataclasses.Field], **defaults):
        """One flag for each of the `settings`, by name. A flag that the user leaves out is absent from the parsed
        namespace; `defaults` are the script's own, for --help."""
        for name, setting in settings.items():
            wanted, default = type_of(setting), defaults.get(name, setting.default)
            metavar = {int: "N", float: "X", str: "NAME"}.get(wanted)
            kind = {"type": wanted, "metavar": metavar} if metavar else {"action": argparse.BooleanOptionalAction}
            text = setting.metadata["help"] + ("" if default is None else f" (default: {default})")
            self.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **kind)

    def parse_args(self, argv):
        dashed = []
        for word in argv:
            flag, equals, value = word.partition("=")
            option = flag.replace("_", "-")
            dashed.append((option if option in self._option_string_actions else flag) + equals + value)
        known, extra = self.parse_known_args(dashed)
        if extra:
            flags = [option for action in self._actions for option in action.option_strings]
            name = extra[0].partition("=")[0]
            if name.startswith("-") and name not in self.hints:
                self.fail(unknown("flag", name, flags), 2)
            self.fail(f"unexpected argument ({extra[0]}). {self.hints[name if name in self.hints else '']}", 2)
        return known

    def error(self, message):
        self.fail(f"{message}. See --help.", 2)  # argparse's own messages name no remedy

    def run(self, body: typing.Callable[[], int | None], unread: str | None = None):
        """Leave the program with the status that `body` returns; a Mistake is one line and 2, a Failure or a system
        call that fails one line and 1. It is no failure if nobody reads the output any more, unless `unread` says what
        that loses."""
        if sys.stdout is not None:
            typing.cast(io.TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8", errors="replace")
        try:
            sys.exit(body())
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.fail(unread) if unread else sys.exit(0)
        except KeyboardInterrupt:
            sys.exit(130)
        except Mistake as error:
            self.fail(str(error), 2)
        except Failure as error:
            self.fail(str(error))
        except OSError as error:
            if error.errno is None:  # not raised by a call to the system
                raise
            place = error.filename or "the output"
            self.fail(f"cannot read or write ({place}: {error.strerror}). Mend that or make room, and start again.")
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            self.fail(f"out of memory ({reason}). Lower --micro-batch-size, --context-length or --d-model.")

    def fail(self, message: str, status: int = 1):
        """Leave the program with one line on stderr, without control characters: an untrusted file may have some."""
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split())[:2000])
        self.exit(status, f"error: {line}\n")


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


class Progress:
    """The progress of one run or several: a bar with the time left where stderr is a terminal, and lines on stdout that
    stay. `label` names one of several runs; those print less."""

    def __init__(self, total: int, done: int = 0, shown: bool = True):
        from tqdm import tqdm

        self.label = ""
        self._warned: set[str] = set()
        self._bar = tqdm(
            total=total,
            initial=done,
            disable=not (shown and sys.stderr is not None and sys.stderr.isatty()),
            leave=False,
            dynamic_ncols=True,
            # What matters most comes first, since a narrow terminal shows no more.
            bar_format="{desc}{percentage:3.0f}%  {remaining} left{postfix}  {bar}",
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._bar.close()

    def write(self, text: str):
        """Print lines above the bar, broken where the terminal ends."""
        if sys.stdout is None:
            return
        if sys.stdout.isatty():
            wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent=8 * " ")
            wrapper.break_long_words = wrapper.break_on_hyphens = False  # a path should stay one word
            text = "\n".join(map(wrapper.fill, text.splitlines()))
        self._bar.write(text)
        sys.stdout.flush()

    def begin(self, text: str, warnings: list[str]):
        """Print what a run is about to do, and each warning once."""
        if not self.label:
            self.write(text)
        self._bar.set_description_str(self.label)
        for warning in warnings:
            if warning not in self._warned and sys.stderr is not None:
                self._bar.write(warning, file=sys.stderr)
        self._warned |= {*warnings}

    def step(self, count: int = 1):
        self._bar.update(count)

    def log(self, line: str, evaluated: bool):
        """Show a step's line. It stays if there is no bar, or if it has a validation loss and there is one run only."""
        self._bar.set_postfix_str(" ".join(line.split()))
        if self._bar.disable or (evaluated and not self.label):
            self.write(self.label + line)
