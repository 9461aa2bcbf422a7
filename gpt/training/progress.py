"""The bar of a run, and its lines."""

import os
import shutil
import sys
import textwrap

from gpt.screen import is_terminal, say, tell


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
            disable=not (shown and is_terminal(sys.stderr) and os.get_terminal_size(sys.stderr.fileno()).columns),
            leave=False,
            dynamic_ncols=True,
            # What matters most comes first: a narrow terminal shows no more.
            bar_format="{desc}{percentage:3.0f}%  {remaining} left{postfix}  {bar}",
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._bar.close()

    def write(self, text: str):
        """Print lines above the bar, broken where the terminal ends."""
        if is_terminal(sys.stdout):
            wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent=8 * " ")
            wrapper.break_long_words = wrapper.break_on_hyphens = False  # a path should stay one word
            text = "\n".join(map(wrapper.fill, text.splitlines()))
        tell(text)

    def warn(self, text: str):
        """Print a warning on stderr, once."""
        if text not in self._warned:
            self._warned.add(text)
            with self._bar.external_write_mode(sys.stderr):
                say(text)

    def begin(self, text: str, warnings: list[str]):
        """Print what a run is about to do."""
        if not self.label:
            self.write(text)
        self._bar.set_description_str(self.label)
        for warning in warnings:
            self.warn(warning)

    def step(self, count: int = 1):
        self._bar.update(count)

    def at(self, done: int, total: int):
        """Set how much is done, and of how much. What was done at the first time tells nothing of the speed."""
        if not self._bar.n:
            self._bar.initial = self._bar.last_print_n = done
        self._bar.n, self._bar.total = done, total
        self._bar.refresh()

    def log(self, line: str, evaluated: bool):
        """Show a step's line. It stays if there is no bar, or if it has a validation loss and there is one run only."""
        self._bar.set_postfix_str(" ".join(line.split()))
        if self._bar.disable or (evaluated and not self.label):
            self.write(self.label + line)
