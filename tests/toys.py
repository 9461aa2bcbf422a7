"""Toy models, texts and settings, and ways to start a script."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt import BLOCKS, GPT, NORMS, ModelConfig
from gpt.files import read_lines
from gpt.training.checkpoint import config_to_json
from gpt.training.settings import TrainConfig, configure

ROOT = Path(__file__).parents[1]
# Toy matrices are too small to share out, and the threads of several processes get in each other's way.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Most of the time of a process goes to imports, so this one imports once and forks for each that a test wants. It reads
# orders, a line of JSON each, and answers each with a line: a process to start with its number; a number with the
# status of that process, null while it runs; imports with null.
SERVER = """
import contextlib, gc, json, os, signal, sys, traceback
import torch
torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports the compiler
import encodings.unicode_escape, encodings.utf_8_sig
import gpt.generate, gpt.pretrained, gpt.study.plots, gpt.training.trainer, tqdm
import compare, prepare, sample, train
gpt.tokenizer.GPT2BPE()  # imports what a user without rights may not read
gpt.training.code.code_of(gpt.GPT(gpt.ModelConfig()))  # reads the code

def child(order):
    os.environ |= order["environment"]
    os.chdir(order["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[stream], os.O_CREAT | os.O_WRONLY | os.O_NOCTTY), number)
    sys.stdout = open(1, "w", buffering=1, encoding=order["encoding"])
    sys.stderr = open(2, "w", buffering=1, encoding=order["encoding"], errors="backslashreplace")
    if order["quick"]:
        train.draw = train.closing_sample = lambda *arguments: ""
    try:
        exec(order["prelude"], globals())
        sys.modules[order["script"]].main(order["arguments"])
        return 0
    except SystemExit as exit:
        return exit.code or 0
    except BaseException:
        traceback.print_exc()
        return 1

running = set()
for line in sys.stdin:
    order = json.loads(line)
    if type(order) is str:
        answer = exec(order)
    elif type(order) is int:
        pid, status = os.waitpid(order, os.WNOHANG)
        running.discard(pid)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
        gc.freeze()  # or a child's collector would visit all of this
        answer = os.fork()
        if answer == 0:
            status = child(order)
            with contextlib.suppress(OSError):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        running.add(answer)
    print(json.dumps(answer), flush=True)
for pid in running:
    os.kill(pid, signal.SIGKILL)
os._exit(0)
"""


class Forks:
    """Starts scripts as processes; `folder` gets what they say. `environment` is that of all of them."""

    def __init__(self, folder: Path, **environment):
        self.folder, self.count = folder, 0
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "data")])} | environment
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)
        self.ask("None")  # it has imported everything

    def start(
        self, script, *arguments, cwd, out=None, err=None, encoding="utf-8", prelude="", quick=True, **environment
    ) -> "Fork":
        """`python script.py arguments` in the folder `cwd`, after the code `prelude`. stdout and stderr go to the files
        `out` and `err`, new ones by default; `quick` leaves out train.py's picture and closing sample, most of a short
        run's time."""
        self.count += 1
        new = [self.folder / f"{self.count}.{stream}" for stream in ("out", "err")]
        for path in new:
            path.touch()
        out, err = out or new[0], err or new[1]
        order = {"script": script, "arguments": [*map(str, arguments)], "prelude": prelude, "quick": quick}
        order |= {"cwd": str(cwd), "out": str(out), "err": str(err), "encoding": encoding}
        order |= {"environment": {name: str(value) for name, value in environment.items()}}
        return Fork(self, self.ask(order), Path(out), Path(err))

    def ask(self, order):
        print(json.dumps(order), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())


class Fork:
    """A process that Forks started: its number, and the files of its stdout and stderr."""

    def __init__(self, forks: Forks, pid: int, out: Path, err: Path):
        self.forks, self.pid, self._files, self.status = forks, pid, (out, err), None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        if self.status is None:
            self.status = self.forks.ask(self.pid)
        return self.status

    def wait(self, until=lambda: False, seconds=180) -> int | None:
        """The exit status once the process has ended; None if `until` came true before."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and not until():
            if time.monotonic() > deadline:
                self.kill(signal.SIGKILL)
                pytest.fail(f"nothing happened for {seconds} s: {self.out}{self.err}")
            time.sleep(0.005)
        return self.status

    def kill(self, signum) -> int:
        """Send a signal and wait for the end."""
        os.kill(self.pid, signum)
        return self.wait()

    @property
    def out(self) -> str:
        return self._files[0].read_text("utf-8")

    @property
    def err(self) -> str:
        return self._files[1].read_text("utf-8")


# Placements for tests in which a placement is only a set of weights and modules: without and with a norm at the end of
# a block, blocks of two classes, a number that is learned, norms within the branches, a stream of several lanes whose
# weights are made of others.
KINDS = ["pre", "post", "keel", "rezero", "hybrid", "mhc"]
# Placements with norm layers: every one of both, and not every pair.
PAIRS = [(placement, "layernorm") for placement in BLOCKS]
PAIRS += [(placement, norm) for placement in ("pre", "post", "hybrid") for norm in NORMS if norm != "layernorm"]

TOY = {"n_layers": 2, "n_heads": 2, "d_model": 32, "context_length": 16}
TOY_RUN = TOY | {"batch_size": 4, "eval_every": 4, "log_every": 1, "warmup_steps": 2, "val_fraction": 0.05}


def toy_model(seed=0, **settings) -> GPT:
    """A small GPT whose weights, unlike the usual ones, are large enough for every part to matter."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**TOY | {"vocab_size": 61, "start": "fan_in"} | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() == 1:
                parameter.fill_(0.5)
    return model


def toy_tokens(rows=2, length=16, vocab_size=61, seed=1) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def toy_config(**settings) -> TrainConfig:
    return configure(TOY_RUN | settings)


def write_config(run: Path, **settings):
    """The config.json of a run, in its folder."""
    text = json.dumps(config_to_json(toy_config(**settings)))
    (run / "config.json").write_text(text, encoding="utf-8")


def as_flags(settings: dict) -> list[str]:
    """The settings as words of a command line; a boolean is its flag or nothing."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return words


def records(run: Path, file="metrics.jsonl") -> list[dict]:
    """The lines of a run's file but for the speed, which differs from time to time."""
    return [{key: record[key] for key in record if key != "tokens_per_s"} for record in read_lines(run / file)]


def call(module, *arguments, capsys):
    """A script's main in this process: (status, stdout, stderr)."""
    with pytest.raises(SystemExit) as exit:
        module.main(list(map(str, arguments)))
    return exit.value.code or 0, *capsys.readouterr()


def python(*arguments, cwd, **settings):
    """A process of its own, finished."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120, **settings)
