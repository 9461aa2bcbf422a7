"""The scripts as a user runs them: real processes, real signals, every mistake one line and status 2."""

import contextlib
import os
import re
import runpy
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import ROOT, TOY_RUN, as_flags, call, python, records

import compare
import probe
import sample
import train
from gpt import BLOCKS
from gpt.blocks import PreLN
from gpt.command_line import CommandLine
from gpt.config import Mistake
from gpt.screen import say, tell
from gpt.training import checkpoint
from gpt.training.report import stopped

FLAGS = as_flags(TOY_RUN)
pytestmark = pytest.mark.usefixtures("quick")


def after(prelude, script):
    """Arguments for python: run the script once the prelude has taken something away."""
    start = f"import runpy, socket, sys; sys.argv[0] = {script!r}; sys.path.insert(0, {str(ROOT)!r})"
    return "-c", f"{start}; {prelude}; runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"


@pytest.mark.parametrize("script", ["train.py", "sample.py", "probe.py", "compare.py"])
def test_help_needs_no_torch(script):
    result = python(*after("sys.modules['torch'] = None", script), "--help", cwd=ROOT)
    assert result.returncode == 0 and "usage: " + script in result.stdout and "(default: " in result.stdout


@pytest.mark.parametrize("script", ["train.py", "sample.py", "probe.py", "compare.py", "data/prepare.py"])
def test_a_script_finds_its_modules_without_its_folder_on_the_path(tmp_path, script):
    result = python("-P", ROOT / script, "--help", cwd=tmp_path)
    assert result.returncode == 0 and "usage: " in result.stdout, result.stderr


@pytest.mark.parametrize(
    "script, package, arguments",
    [
        ("train.py", "torch", ["--norm", "pre"]),
        ("sample.py", "torch", ["gpt2"]),
        ("probe.py", "safetensors", ["pre"]),
        ("compare.py", "torch", ["pre"]),
        ("data/prepare.py", "numpy", ["text.txt", "--out", "p"]),
    ],
)
def test_a_package_that_is_not_installed_is_one_line(here, script, package, arguments):
    result = python(*after(f"sys.modules[{package!r}] = None", script), *arguments, cwd=here)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"error: {package} " in result.stderr and "requirements.txt" in result.stderr


def test_so_it_is_for_the_command_of_the_weights(tmp_path):
    """Whose --help needs no torch."""
    start = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['torch'] = None; "
    start += "runpy.run_module('gpt.pretrained', run_name='__main__', alter_sys=True)"
    for words, status in ((["--help"], 0), (["check", "gpt2"], 2), (["export", "r", "folder"], 2)):
        result = python("-c", start, *words, cwd=tmp_path)
        assert result.returncode == status and ("usage: " in result.stdout) == (status == 0), result.stderr
        assert status == 0 or ("error: torch " in result.stderr and result.stderr.count("\n") == 1), result.stderr


def test_a_torch_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    with pytest.raises(Mistake, match=r"\(2\.5\.1\+cu121.*requirements\.txt"):
        runpy.run_path(str(ROOT / "gpt" / "model.py"))


def test_a_python_without_the_default_corpus(here, capsys, monkeypatch):
    for name in ("pydoc_data", "pydoc_data.topics"):
        monkeypatch.setitem(sys.modules, name, None)
    for script, words in ((train, []), (compare, ["pre"])):
        refused(script, [*words, *FLAGS], ["python-docs", "pydoc_data", "--data"], capsys)
    assert not (here / "runs").exists()


# As the shell closes them, by >&- and the like. A file that is opened then would get the number of the stream.
STREAMS = [("stdin", 0), ("stdout", 1), ("stderr", 2)]


@pytest.mark.parametrize("closed", [STREAMS[1:2], STREAMS[2:], STREAMS[1:], STREAMS], ids=str)
def test_a_stream_that_the_shell_closed_is_a_null_device(here, forks, closed):
    prelude = "".join(f"os.close({number}); sys.{name} = None\n" for name, number in closed)
    prelude += "import gpt.study.results; gpt.study.results._draw = lambda *arguments: None\n"
    prelude += "import gpt.training.trainer as t; load = t.Trainer._load\n"
    prelude += (
        "passed = lambda: all(os.get_inheritable(number) for number in range(3))  # to processes that it starts\n"
    )
    prelude += "write = lambda: open('number', 'w').write(str(passed() and os.open('text.txt', 0)))\n"
    prelude += "t.Trainer._load = lambda run: (load(run), write())\n"
    flags = ["--data", "text.txt", "--steps", 4, *FLAGS]
    assert forks.start("train", *flags, "--out", "r", cwd=here, prelude=prelude).wait() == 0
    assert int((here / "number").read_text(encoding="utf-8")) > 2
    assert [record["step"] for record in records(here / "r")] == [1, 2, 3, 4]
    assert forks.start("compare", "pre", "--seeds", 1, *flags, "--out", "c", cwd=here, prelude=prelude).wait() == 0
    process = forks.start("sample", "r", "--prompt", "ab", "--out", "s", cwd=here, prelude=prelude)
    assert process.wait() == 0 and (here / "s").read_text(encoding="utf-8").startswith("ab")
    assert process.out == "" if ("stdout", 1) in closed else process.out.startswith("ab")
    assert process.err == "" or ("stderr", 2) not in closed


def test_without_streams_nothing_is_said(monkeypatch, capfd):
    """As in a program without a console, which uses the package."""
    monkeypatch.setattr(sys, "stderr", None)
    say("text")
    monkeypatch.setattr(sys, "stdout", None)
    tell("text")
    assert capfd.readouterr() == ("", "")


def test_train_then_sample_from_another_folder(here, forks):
    """Without a network, without a locale, and with an error for any text opened in the locale's encoding."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "NO_COLOR": "1"}
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    strict += ["-W", "ignore::EncodingWarning:matplotlib.font_manager"]
    train_it, sample_it = (
        [*strict, *after("socket.socket.connect = None", name)] for name in ("train.py", "sample.py")
    )
    result = python(*train_it, "--data", "text.txt", "--steps", 5, *FLAGS, cwd=here, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\r" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["model", "corpus", "steps", "device", "run"]
    assert sum(line.startswith("step ") for line in lines) == 5
    assert re.search(r"^validation loss \d\.\d+ nats per byte at step 5; best \d\.\d+ at step \d", result.stdout, re.M)
    assert len(result.stdout.rpartition("python sample.py runs/text-pre\n")[2]) > 100  # the closing sample
    assert (here / "runs" / "text-pre" / "curve.png").read_bytes().startswith(b"\x89PNG")
    again = python(*sample_it, "--prompt", "The é", "--seed", 3, cwd=here, env=environment)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("The é") and len(again.stdout) > 100
    assert "text-pre" in again.stderr and "seed 3" in again.stderr
    same = forks.start("sample", "runs/text-pre", "--prompt", "The é", "--seed", 3, cwd=here)
    assert same.wait() == 0 and same.out == again.stdout


@pytest.mark.parametrize("columns, encoding", [(40, "utf-8"), (80, "cp850")])
def test_a_terminal_shows_a_bar_that_fits_and_lines_that_stay(here, forks, columns, encoding):
    import fcntl
    import pty
    import struct
    import termios

    reading, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    flags = ["--data", "text.txt", "--steps", 100, "--out", "r", *FLAGS, "--eval-every", 50]
    screen = {"out": os.ttyname(terminal), "err": os.ttyname(terminal), "encoding": encoding}
    process = forks.start("train", *flags, cwd=here, **screen, TERM="xterm", NO_COLOR=1)
    seen = os.read(reading, 2**16)
    os.close(terminal)
    with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(reading, 2**16):
            seen += part
    os.close(reading)
    assert process.wait() == 0 and b"\x1b" not in seen, seen
    frames = [frame for frame in re.split(rb"[\r\n]+", seen) if b" left" in frame]
    assert any(re.search(rb"\d+%  \d\d:\d\d left, step \d+ loss \d", frame) for frame in frames)
    assert all(len(frame.decode(encoding)) < columns for frame in frames)
    assert encoding == "utf-8" or all(frame.isascii() for frame in frames)
    shown = seen.decode("utf-8", "replace").replace("\r", "\n").partition("validation loss")[0].splitlines()
    assert all(len(line) <= columns or len(line.split()) <= 2 for line in shown)  # a path stays whole
    # A pipe gets a line at each log step, a terminal at each evaluation.
    assert [line.split()[1] for line in shown if line.startswith("step ")] == ["50", "100"]


def test_a_terminal_without_a_size_shows_lines(here, forks):
    import pty

    reading, terminal = pty.openpty()  # 0 x 0
    flags = ["--data", "text.txt", "--steps", 3, "--out", "r", *FLAGS]
    screen = {"out": os.ttyname(terminal), "err": os.ttyname(terminal)}
    process = forks.start("train", *flags, cwd=here, **screen)
    seen = os.read(reading, 2**16)
    os.close(terminal)
    with contextlib.suppress(OSError):
        while part := os.read(reading, 2**16):
            seen += part
    os.close(reading)
    assert process.wait() == 0
    assert re.findall(rb"^step (\d)  loss", seen, re.M) == [b"1", b"2", b"3"], seen


def test_printed_commands_can_be_pasted(here, capsys):
    out = call(train, "--data", "text.txt", "--steps", 2, "--out", "my run", *FLAGS, capsys=capsys)[1]
    (command,) = (line.partition("more of this: ")[2] for line in out.splitlines() if "sample.py" in line)
    assert shlex.split(command) == ["python", "sample.py", "my run"]
    end = {"step": 2, "processes": 1, "run": here / "my run"}
    assert shlex.split(stopped(end).partition("with: ")[2])[-2:] == ["--out", str(here / "my run")]


def test_sampling_flags(here, capsys):
    assert call(train, "--data", "text.txt", "--steps", 4, "--out", "r", *FLAGS, capsys=capsys)[0] == 0
    (here / "prompt.txt").write_bytes("line\r\none é".encode())

    def sampled(*arguments):
        """(stdout, stderr) of sample.py with a few tokens."""
        status, out, err = call(sample, "r", "--max-new-tokens", 20, *arguments, capsys=capsys)
        assert status == 0, err
        return out, err

    out, err = sampled("--prompt-file", "prompt.txt", "--num-samples", 2)
    assert out.count("line\r\none é") == 2 and err.count("--- sample") == 2
    greedy = [sampled("--temperature", 0, "--prompt", "a", "--checkpoint", which)[0] for which in ("last", "4", "best")]
    assert len({*greedy}) == 1
    out, err = sampled("--max-new-tokens", 3, "--top-k", 5, "--top-p", 0.9, "--prompt", "ab")
    assert len(out.rstrip("\n").encode()) <= 2 + 3 * 3 and re.search(r"seed \d+", err)
    one, other, two = (
        sampled("--prompt", "a", "--seed", *rest)[0] for rest in ([5], [6], [5, "--num-samples", 2, "--out", "s.txt"])
    )
    assert two == one + other and one != other
    heads = [f"--- sample {number}, seed {seed}\n" for number, seed in ((1, 5), (2, 6))]
    assert (here / "s.txt").read_bytes() == (heads[0] + one + heads[1] + other).encode()
    letter = one[5]
    assert sampled("--prompt", "a", "--seed", 5, "--stop", letter)[0] == one[: one.index(letter, 1)] + "\n"
    assert sampled("--prompt", "--a", "--stop", "---")[0].startswith("--a")
    out, err = sampled("--prompt", "x" * 40)
    assert out.startswith("x" * 40) and err.count("warning: ") == 1 and " 16 tokens" in err


LONG = "x" * 400  # no file can have this name
# What the one line has to say: the value, and a remedy's flag.
BAD_TRAIN = [
    (["--norm", "prre"], "(prre)", "pre or peri"),
    (["--nrom", "pre"], "(--nrom)", "--norm"),
    (["bad.toml"], "(n_layer)", "n_layers"),
    (["missing.toml"], "missing.toml", ".toml file"),
    (["batch_size=4"], "batch_size=4", "a flag"),
    (["--data", "missing.txt"], "missing.txt"),
    (["--data", "empty.txt"], "empty"),
    (["--data", "short.txt"], "tokens of 20", "17", "context_length", "--data"),
    (["--data", "latin.txt"], "latin.txt", "UTF-8"),
    (["--data", "nothing/"], "nothing", ".txt"),
    (["--n-heads", "3"], "(3 heads, width 32)", "1, 2 or 4"),
    (["--device", "cuda:7"], "(cuda:7", "--device"),
    (["--tokenizer", "byte"], "(byte)", "bytes"),
    (["--micro-batch-size", "3"], "(3 and 4)", "1, 2 or 4"),
    (["--resume"], "runs)", "train.py"),
    (["--resume", "auto"], "(none)", "--out"),
    (["--config", "tiny.toml"], "(--config)", "without a flag"),
    (["--epochs", "3"], "(--epochs)", "--steps"),
    (["--data", LONG], "xxx", "text file"),
    (["--out", LONG], "xxx", "another"),
    (["--out", "r", "--resume", "--checkpoint", LONG], "r)", "train.py"),
    ([LONG], "xxx", ".toml"),
    (["nul.toml"], "data", "NUL"),
    (["--data", "a\0b"], r"a\x00b", "NUL"),
    (["--overwrite"], "(none)", "--out"),
    (["--out", ""], "(none)", "--out"),
    (["--data", ""], "data", "()"),
    (["--data", "text.jsonl"], "text.jsonl", "data/prepare.py"),
    (["text.txt"], "text.txt", "--data"),
    (["flag.toml"], "(out in flag.toml)", "--out"),
    (["table.toml"], "table.toml", "[model]"),
    (["--tokenizer", "GPT2"], "(GPT2)", "gpt2?"),
    (["--resume", "--out", "text.txt"], "text.txt)", "train.py"),
    (["--resume", "--out", "nothing"], "nothing)", "train.py"),
    (["--overwrite", "--resume", "--out", "r"], "--overwrite", "--resume"),
    (["--resume", "r", "--out", "r"], "(r)", "--out", "auto"),
    (["--resume", "auto", "--checkpoint", "3", "--out", "r"], "(3)", "--resume"),
    (["--resume", "auto", "--out", "."], "(", "--out"),
    (["--out", "text.txt/sub"], "sub: Not a directory)"),
    (["--resume", "--out", "nowhere"], "nowhere)", "train.py"),
    (["--out", "."], "(", "--out"),
]


def refused(module, arguments, words, capsys):
    """Assert that a script answers these arguments with one line, which has these words, and status 2."""
    status, out, err = call(module, *arguments, capsys=capsys)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


@pytest.mark.parametrize("case", BAD_TRAIN, ids=lambda case: " ".join(case[0]))
def test_a_mistake_in_training_is_one_line_and_nothing_is_written(here, capsys, case):
    arguments, *words = case
    (here / "bad.toml").write_text("n_layer = 3", encoding="utf-8")
    (here / "flag.toml").write_text("out = 'x'", encoding="utf-8")
    (here / "nul.toml").write_text(r'data = "a\u0000b"', encoding="utf-8")
    (here / "table.toml").write_text("[model]\nn_layers = 3", encoding="utf-8")
    (here / "text.jsonl").write_text('{"text": "a"}', encoding="utf-8")
    (here / "empty.txt").write_bytes(b"")
    (here / "short.txt").write_bytes(b"x" * 20)
    (here / "latin.txt").write_bytes("é".encode("latin-1") * 500)
    (here / "nothing").mkdir()
    before = sorted(here.rglob("*"))
    data = [] if "nul.toml" in arguments else ["--data", "text.txt"]
    refused(train, [*data, "--steps", 2, *FLAGS, *arguments], words, capsys)
    assert sorted(here.rglob("*")) == before


BAD_SAMPLE = [
    (["nowhere"], "nowhere)", "runs/text-pre"),
    (["runs/text-per"], "text-per)", "runs/text-pre"),
    (["run/text-pre"], "run/text-pre)", "runs/text-pre", "hf download run/text-pre"),
    (["runs/text-pre/step-000077"], "step-000077)", "runs/text-pre/step-000002"),
    (["text.txt"], "text.txt)", "runs/text-pre"),
    (["runs"], "runs)", "runs/text-pre"),
    (["runs/text-pre", "The "], "(The )", "--prompt"),
    (["The dog"], "The dog)", "--prompt"),
    ([LONG], "xxx", "--prompt"),
    ([3000 * "a b "], "a b", "--prompt"),
    ([""], "no checkpoint", "--prompt"),
    (["--checkpoint", ""], "( in"),
    (["--checkpoint", 5000 * "9"], "(999", "no such checkpoint"),
    (["--prompt", "--seed", "3"], "--prompt", "--help"),
    (["--prompt-file", LONG], "xxx", "prompt"),
    (["--prompt-file", ""], "prompt"),
    (["--out", LONG], "xxx", "new file"),
    (["--out", ""], "(none)", "--out"),
    (["--top-k", "0"], "top_k", "(0)", "left out"),
    (["--seed", str(2**63 - 1), "--num-samples", "2"], "num_samples", "(2)", "at most 1 "),
    (["--top-k", "257"], "top_k", "(257)", "256"),
    (["--top-p", "1.5"], "top_p", "(1.5)"),
    (["--temperature", "-1"], "temperature", "(-1.0)"),
    (["--temperature", "nan"], "temperature", "(nan)"),
    (["--temperature", "0", "--seed", "1"], "seed", "temperature 0"),
    (["--seed", "99999999999999999999999"], "seed", "(99999999999999999999999)"),
    (["--num-samples", "0"], "num_samples", "(0)"),
    (["--max-new-tokens", "0"], "max_new_tokens", "(0)"),
    (["--prompt", "a", "--prompt-file", "text.txt"], "--prompt", "--prompt-file"),
    (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["--out", "text.txt"], "(text.txt: File exists)"),
    (["--out", "nowhere/x.txt"], "nowhere/x.txt"),
    (["--checkpoint", "77"], "(77 in", "--checkpoint 2"),
    (["--device", "cuda:7"], "(cuda:7", "--device"),
    (["--temprature", "1"], "(--temprature)", "--temperature"),
]


def test_a_mistake_in_sampling_is_one_line(here, capsys):
    refused(sample, [], ["runs)", "python train.py"], capsys)
    call(train, "--data", "text.txt", "--steps", 2, *FLAGS, capsys=capsys)
    for arguments, *words in BAD_SAMPLE:
        refused(sample, arguments, words, capsys)


def test_a_run_or_a_checkpoint_that_is_not_there_is_told_from_those_that_are(here, capsys):
    call(train, "--data", "text.txt", "--steps", 2, *FLAGS, capsys=capsys)
    for script, words in ((probe, []), (train, ["--resume", "--out"]), (train, ["--init"])):
        for name, other in (("run/x", "runs/text-pre"), ("runs/text-pre/step-000077", "runs/text-pre/step-000002")):
            refused(script, [*words, name], [f"{name})", other], capsys)


def test_an_existing_run_is_kept_resumed_or_overwritten_as_asked(here, capsys):
    arguments = ["--data", "text.txt", "--out", "r", *FLAGS]
    assert call(train, *arguments, "--steps", 4, capsys=capsys)[0] == 0
    refused(train, [*arguments, "--steps", 4], ["r)", "--resume", "--overwrite", "--out"], capsys)
    status, out, _ = call(train, "--resume", "--out", "r", "--steps", 6, "--save-every", 1, capsys=capsys)
    assert status == 0 and "steps: 4 -> 6" in out and "steps   4 of 6 done" in out
    (here / "runs" / "old").mkdir(parents=True)
    os.rename(here / "r", here / "runs" / "r")
    status, out, _ = call(train, "--resume", "--steps", 7, "--save-every", "none", capsys=capsys)
    assert status == 0 and "steps   6 of 7 done" in out and f"run     {Path('runs', 'r')}\n" in out
    os.rename(here / "runs" / "r", here / "r")
    refused(train, ["--resume", "--out", "r", "--norm", "post"], ["norm (pre, not post)"], capsys)
    refused(train, ["--resume", "--out", "r", "--start", "fan_in"], ["start (gpt2, not fan_in)"], capsys)
    assert call(train, *arguments, "--steps", 2, "--overwrite", capsys=capsys)[0] == 0
    assert (here / "r" / "last").read_text(encoding="utf-8") == "2"


def test_norms_of_queries_and_keys_are_a_flag(here, capsys):
    """They make olmo2 of reordered, to the bit, and without them olmo2 is reordered."""
    commands = {"reordered": ["reordered"], "without": ["olmo2", "--no-qk-norm"]}
    commands |= {"olmo2": ["olmo2"], "with": ["reordered", "--qk-norm"]}
    weights = {}
    for name, words in commands.items():
        words = ["--data", "text.txt", "--steps", 3, "--out", name, *FLAGS, "--norm", *words]
        assert call(train, *words, capsys=capsys)[0] == 0
        weights[name] = load_file(checkpoint.find(here / name, "last") / "model.safetensors")
    for name, same in (("reordered", "without"), ("olmo2", "with")):
        one, other = weights[name], weights[same]
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        assert records(here / name) == records(here / same)
    norms = {f"blocks.{block}.attn.{name}_norm.weight" for block in range(2) for name in "qk"}
    assert weights["olmo2"].keys() - weights["reordered"].keys() == norms


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_can_be_resumed(here, forks, signum, capsys):
    process = forks.start("train", "--data", "text.txt", "--out", "r", "--steps", 10**6, *FLAGS, cwd=here)
    process.wait(until=lambda: len(records(here / "r")) > 5)
    assert process.kill(signum) == 128 + signum and process.err == ""
    step = int((here / "r" / "last").read_text(encoding="utf-8"))
    assert step > 5 and f"at step {step};" in process.out and "train.py --resume --out r\n" in process.out
    assert call(train, "--resume", "--out", "r", "--steps", step + 3, capsys=capsys)[0] == 0
    assert [record["step"] for record in records(here / "r")] == [*range(1, step + 4)]


def leave(forks, script, *arguments, cwd):
    """The script's process after its reader has read a little of stdout and left."""
    os.mkfifo(cwd / "pipe")
    process = forks.start(script, *arguments, cwd=cwd, out=cwd / "pipe")
    with open(cwd / "pipe", "rb", buffering=0) as reader:
        assert reader.read(1)
    process.wait()
    return process


def test_a_reader_who_leaves_sampling_early_is_no_error(here, forks, capsys):
    call(train, "--data", "text.txt", "--steps", 2, "--out", "r", *FLAGS, capsys=capsys)
    process = leave(forks, "sample", "r", "--seed", 1, cwd=here)
    assert process.status == 0 and process.err.endswith("seed 1\n")


class Buggy(PreLN):
    """A placement with a mistake in its code: `fault`, in evaluation mode alone if `late`."""

    fault, late = None, False

    def forward(self, x):
        if self.fault is not None and not (self.late and self.training):
            raise self.fault
        return super().forward(x)


@pytest.fixture
def buggy(monkeypatch):
    """A placement, "buggy", and a function that sets its `fault`."""
    monkeypatch.setitem(BLOCKS, "buggy", Buggy)

    def set(fault, late=False):
        monkeypatch.setattr(Buggy, "fault", fault)
        monkeypatch.setattr(Buggy, "late", late)

    return set


BUGS = [
    ValueError("too many values to unpack (expected 2)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("more than one element of the tensor refers to a single memory location. Please clone()"),
    RuntimeError("out of memory"),
    KeyError("attn_norm"),
    ModuleNotFoundError("No module named 'mine'", name="mine"),
    OSError("no call to the system failed"),
    FileNotFoundError(2, "No such file or directory", "my_table.bin"),
    BrokenPipeError(32, "Broken pipe"),
    FloatingPointError("underflow"),
    AssertionError(),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_bug_in_a_placement_keeps_its_traceback(here, capsys, buggy, bug, late):
    buggy(bug, late)
    with pytest.raises(type(bug)) as raised:
        train.main(["--data", "text.txt", "--out", "r", "--steps", "4", *FLAGS, "--norm", "buggy"])
    assert raised.value is bug and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "script, arguments", [(sample, ["r"]), (probe, ["r"]), (compare, ["buggy", "--data", "text.txt", *FLAGS])]
)
def test_so_it_does_in_the_other_scripts(here, capsys, buggy, script, arguments):
    call(train, "--data", "text.txt", "--out", "r", "--steps", 2, *FLAGS, "--norm", "buggy", capsys=capsys)
    buggy(BUGS[0])
    with pytest.raises(ValueError) as raised:
        script.main(arguments)
    assert raised.value is BUGS[0] and "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:79] . DefaultCPUAllocator: not enough memory: 9 bytes"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    ],
    ids=repr,
)
def test_memory_that_runs_out_is_one_line(here, capsys, buggy, error):
    buggy(error)
    arguments = ["--data", "text.txt", "--out", "r", "--steps", "4", *FLAGS, "--norm", "buggy"]
    status, _, err = call(train, *arguments, capsys=capsys)
    assert status == 1 and err.startswith("error: out of memory") and err.count("\n") == 1
    assert "--batch-size" in err and "--micro-batch-size" in err and "--d-model" in err


def test_more_memory_than_there_is(here, capsys):
    for settings in (["--d-model", 2**17, "--context-length", 2**24], ["--batch-size", 10**12]):
        status, _, err = call(train, "--data", "text.txt", *FLAGS, *settings, capsys=capsys)
        assert status == 1 and err.startswith("error: out of memory") and err.count("\n") == 1
    assert not (here / "runs").exists()


def test_a_remedy_names_no_flag_that_the_script_lacks(capsys):
    def body():
        raise MemoryError

    with pytest.raises(SystemExit):
        CommandLine().run(body)
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory") and "--" not in err


def test_without_a_folder_for_temporary_files_there_is_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(SystemExit) as exit:
        CommandLine().run(tempfile.mkdtemp)
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.count("\n") == 1 and "/nowhere" in err and "TMPDIR" in err


def test_a_strangers_words_do_not_steer_the_terminal(capsys):
    with pytest.raises(SystemExit):
        CommandLine().fail("no place for \x1b[2J\x1b]0;x\x07 héllo\nand more" + "x" * 5000)
    err = capsys.readouterr().err
    assert err.startswith(r"error: no place for \x1b[2J\x1b]0;x\x07 héllo and more") and len(err) < 2100


def test_a_wrong_type_of_init_is_one_line(here, capsys):
    for text, value in (("init = 3", "(3)"), ('init = ""', "()")):
        (here / "c.toml").write_text(text, encoding="utf-8")
        refused(train, ["c.toml"], ["init", value], capsys)
