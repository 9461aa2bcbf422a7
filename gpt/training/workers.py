"""Worker processes that encode text."""

import collections
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures.process import ProcessPoolExecutor

import numpy as np

from gpt.config import Mistake, lookup
from gpt.tokenizer import TOKENIZERS


@functools.cache
def make_tokenizer(name: str):
    """The tokenizer of this name, made once in each process."""
    return lookup(TOKENIZERS, name, "tokenizer")()


def _start():
    """Let a worker process leave Ctrl-C to its parent, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def _no_interrupt():
    """Let Ctrl-C wait until the `with` block ends; a worker process that starts in it never meets one."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def encode(batch: list[tuple[bool, str]], name: str, first: bool) -> np.ndarray:
    """The ids of a batch, with a separator before each document, except before the `first` batch."""
    tokenizer = make_tokenizer(name)
    separator = np.array(tokenizer.separator, dtype=tokenizer.dtype)
    parts = []
    for begins, text in batch:
        parts += [separator, tokenizer.encode(text)] if begins else [tokenizer.encode(text)]
    return np.concatenate(parts[1:] if first else parts)


def delayed(items, count: int):
    """The same items, each one only after `count` more have been taken: workers encode those in the meantime."""
    waiting: collections.deque = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


@contextlib.contextmanager
def open_pool(count: int):
    """`count` worker processes; None for one, which is this process. An error in the `with` block, be it Ctrl-C, ends
    them at once. Raises Mistake if the system has none of what they need to talk to each other."""
    if count == 1:
        yield None
        return
    try:
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)
    except (OSError, ImportError, NotImplementedError) as error:  # their semaphores are files in /dev/shm, on Linux
        reason = f"--workers {count}: no semaphores, {error}"
        raise Mistake(f"cannot start workers ({reason}). Make /dev/shm usable, or give --workers 1.") from None
    try:
        yield pool
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would keep this process waiting for ever
        for worker in multiprocessing.active_children():
            worker.kill()
        # One may have been killed half-way through a result. The pool waits for the rest, while this end is open.
        pool._result_queue._writer.close()  # type: ignore[attr-defined]
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def begin(pool, *job) -> Callable[[], np.ndarray]:
    """Let a worker encode a job, the arguments of `encode`; returns a function that waits for the ids."""
    if pool is None:
        return functools.partial(encode, *job)
    with _no_interrupt():
        return pool.submit(encode, *job).result
