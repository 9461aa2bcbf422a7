"""What a person sees of a running script: lines and warnings. Nothing here ends the work."""

import contextlib
import os
import sys


def say(text: str):
    """Print a line on stderr, or nothing if nobody can read it."""
    if sys.stderr:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            print(text, file=sys.stderr, flush=True)


def is_terminal(stream) -> bool:
    """Whether a stream is a terminal; it may be None, or an object of a notebook."""
    return hasattr(stream, "isatty") and stream.isatty()


def discard_output():
    """Let what is printed from here on go nowhere."""
    with contextlib.suppress(OSError):  # stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str):
    """Print lines on stdout, above the bar. It is a courtesy: where nobody can read them, the work goes on."""
    from tqdm import tqdm

    if sys.stdout is None:
        return
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError as error:
        say(f"warning: the output cannot be written ({error.strerror}). Going on without it.")
        discard_output()
