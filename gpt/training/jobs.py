"""Several processes for one comparison: how many, how they start, and that none is left behind."""

import contextlib
import os
import signal
import subprocess
import threading

from gpt.config import Mistake
from gpt.files import courtesy
from gpt.screen import say
from gpt.training.distributed import cores

MOST = 8  # processes, unless the user asks for more: each has a model, and torch takes half a gigabyte


def share(asked: int | None, runs: int, device: str) -> tuple[int, int]:
    """How many processes do a comparison of so many runs on a device, "cpu", "cuda", "cuda:1" or "mps", and the threads
    of each, which are set here for this process: as many processes as are `asked` for, or else as many as keep the
    machine busy, up to MOST. Two runs of one thread ended in 0.86 of the time of two runs of two threads, one after
    the other (models of 4 blocks, an AMD EPYC). Raises Mistake for less than one."""
    import torch

    if asked is not None and asked < 1:
        raise Mistake(f"--jobs is a number of processes ({asked}). Give 1 or more.")
    threads = torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 0
    busy = 1
    if device == "cpu":
        busy = cores() // max(1, threads)
    elif device == "cuda":
        busy = torch.cuda.device_count()
    count = min(asked or min(busy, MOST), runs) or 1
    if count > 1:
        torch.set_num_threads(threads or max(1, cores() // count))
    return count, torch.get_num_threads()


@contextlib.contextmanager
def started(command: list[str], count: int, threads: int, device: str):
    """Start `count` processes with this command, silently, on CUDA each on a GPU of its own. After the `with` block
    they are asked to end, and waited for. They end by themselves if this process is killed (`end_with_parent`)."""
    processes: list[subprocess.Popen] = []
    try:
        for number in range(1, count + 1):
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            if device == "cuda":
                environment["CUDA_VISIBLE_DEVICES"] = gpu(number)
            pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with courtesy("start one more process", OSError):
                # Silent: what they meet, this process will meet too, since it does the runs that nobody has done. In a
                # session of their own, so that Ctrl-C asks this process alone, which passes it on once.
                processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        yield
    finally:
        ended = [process.poll() for process in processes]
        if any(ended):
            say(f"warning: other processes of this comparison failed (status {ended}). --jobs 1 shows why.")
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
            if process.stdin:
                process.stdin.close()  # not before: to it this is the end of its parent, and a second request to stop


def gpu(number: int) -> str:
    """A GPU for a process by its number, in turn, as CUDA_VISIBLE_DEVICES names it."""
    import torch

    number %= torch.cuda.device_count()
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return visible[number] if visible else str(number)


def end_with_parent():
    """Ask this process to stop, as SIGTERM does, when the process that started it is gone."""

    def watch():
        os.read(0, 1)  # stdin, to which nothing is ever written: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
