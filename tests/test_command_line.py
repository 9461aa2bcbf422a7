"""The scripts as a user runs them: real processes, real signals, every mistake one line and status 2."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from toys import ROOT, TOY_RUN, as_flags, call, python

import sample
import train
from gpt.command_line import CommandLine

FLAGS = as_flags(TOY_RUN)


def after(prelude, script):
    """Arguments for python: run the script once the prelude has taken something away."""
    start = f"import runpy, socket, sys; sys.argv[0] = {script!r}; sys.path.insert(0, {str(ROOT)!r})"
    return "-c", f"{start}; {prelude}; runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"


@pytest.mark.parametrize("script", ["train.py", "sample.py", "probe.py", "compare.py"])
def test_help_needs_no_torch(script):
    result = python(*after("sys.modules['torch'] = None", script), "--help", cwd=ROOT)
    assert result.returncode == 0 and "usage: " + script in result.stdout and "(default: " in result.stdout


def test_train_then_sample_from_another_folder(here):
    """Without a network, without a locale, and with an error for any text opened in the locale's encoding."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "NO_COLOR": "1"}
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    strict += ["-W", "ignore::EncodingWarning:matplotlib.font_manager"]
    train_it, sample_it = (
        [*strict, *after("socket.socket.connect = None", name)] for name in ("train.py", "sample.py")
    )
    result = python(*train_it, "--data", "text.txt", "--steps", 9, *FLAGS, cwd=here, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\r" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["model", "corpus", "steps", "device", "run"]
    assert sum(line.startswith("step ") for line in lines) == 9
    assert re.search(r"^validation loss \d\.\d+ nats per byte at step 9; best \d\.\d+ at step \d", result.stdout, re.M)
    again = python(*sample_it, "--prompt", "The é", "--seed", 3, cwd=here, env=environment)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("The é") and len(again.stdout) > 100
    assert "text-pre" in again.stderr and "seed 3" in again.stderr
    same = python(ROOT / "sample.py", "runs/text-pre", "--prompt", "The é", "--seed", 3, cwd=here)
    assert same.stdout == again.stdout


@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
@pytest.mark.parametrize("columns, encoding", [(40, "utf-8"), (80, "cp850")])
def test_a_terminal_shows_a_bar_that_fits_and_lines_that_stay(here, columns, encoding):
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    flags = ["--data", "text.txt", "--steps", "200", "--out", "r", *FLAGS, "--eval-every", "100"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONIOENCODING": encoding, "TERM": "xterm", "NO_COLOR": "1"}
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "cwd": here, "env": environment}
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], **terminal)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(ours, 2**16):
            seen += part
    os.close(ours)
    assert process.wait(timeout=60) == 0 and b"\x1b" not in seen, seen
    frames = [frame for frame in re.split(rb"[\r\n]+", seen) if b" left" in frame]
    assert any(re.search(rb"\d+%  \d\d:\d\d left, step \d+ loss \d", frame) for frame in frames)
    assert all(len(frame.decode(encoding)) < columns for frame in frames)
    assert encoding == "utf-8" or all(frame.isascii() for frame in frames)
    said = seen.decode("utf-8", "replace").replace("\r", "\n").partition("validation loss")[0].splitlines()
    assert all(len(line) <= columns or len(line.split()) <= 2 for line in said)  # a path stays whole
    # What a pipe gets a line of at each log step is here a line of at each evaluation.
    assert [line.split()[1] for line in said if line.startswith("step ")] == ["100", "200"]


def test_sampling_flags(here, capsys):
    assert call(train, "--data", "text.txt", "--steps", 4, "--out", "r", *FLAGS, capsys=capsys)[0] == 0
    (here / "prompt.txt").write_bytes("line\r\none é".encode())
    status, out, err = call(sample, "r", "--prompt-file", "prompt.txt", "--num-samples", 2, capsys=capsys)
    assert status == 0 and out.count("line\r\none é") == 2 and err.count("--- sample") == 2
    greedy = [
        call(sample, "r", "--temperature", 0, "--prompt", "a", "--checkpoint", which, capsys=capsys)
        for which in ("last", "4", "best")
    ]
    assert greedy[0][1] == greedy[1][1] == greedy[2][1] and {status for status, *_ in greedy} == {0}
    short = call(sample, "r", "--max-new-tokens", 3, "--top-k", 5, "--top-p", 0.9, "--prompt", "ab", capsys=capsys)
    assert short[0] == 0 and len(short[1].rstrip("\n").encode()) <= 2 + 3 * 3
    assert "seed" in short[2] and re.search(r"seed (\d+)", short[2])
    arguments = ["r", "--prompt", "a", "--max-new-tokens", 30, "--seed"]
    one, other, two = (
        call(sample, *arguments, *seed, capsys=capsys)[1] for seed in ([5], [6], [5, "--num-samples", 2])
    )
    assert two == one + other and one != other
    status, out, _ = call(sample, *arguments, 5, "--num-samples", 2, "--out", "s.txt", capsys=capsys)
    assert status == 0 and out == two and (here / "s.txt").read_bytes() == two.encode()
    letter = one[5]
    stopped = call(sample, *arguments, 5, "--stop", letter, capsys=capsys)[1]
    assert stopped == one[: one.index(letter, 1)] + "\n"
    long = call(sample, "r", "--prompt", "x" * 40, capsys=capsys)
    assert long[1].startswith("x" * 40) and "warning: the model sees only the last 16 tokens of the prompt" in long[2]


BAD_TRAIN = [
    (["--norm", "prre"], "unknown norm (prre). Did you mean pre or peri?"),
    (["--nrom", "pre"], "unknown flag (--nrom). Did you mean --norm"),
    (["bad.toml"], "unknown setting (n_layer). Did you mean n_layers"),
    (["missing.toml"], "cannot read the configuration"),
    (["batch_size=4"], "a setting is a flag"),
    (["--data", "missing.txt"], "no such file"),
    (["--data", "empty.txt"], "the text is empty"),
    (["--data", "short.txt"], "split is too short"),
    (["--data", "latin.txt"], "not UTF-8 text"),
    (["--data", "nothing/"], "no .txt file in the folder"),
    (["--n-heads", "3"], "n_heads must divide d_model (3 heads, width 32). Use 1, 2 or 4 heads"),
    (["--device", "cuda:7"], "the device is not there (cuda:7"),
    (["--tokenizer", "byte"], "unknown tokenizer (byte). Did you mean bytes?"),
    (["--micro-batch-size", "3"], "must divide batch_size"),
    (["--resume"], "--out names no run (none). Give --out RUN"),
    (["--overwrite"], "--out names no run (none). Give --out RUN"),
    (["--out", ""], "--out names no run (none). Give --out RUN"),
    (["--data", ""], "data is out of range ()"),
    (["--data", "text.jsonl"], "that is no plain text"),
    (["text.txt"], "text.txt is not a TOML file of settings"),
    (["flag.toml"], "that is a flag and no setting (out in flag.toml). Give --out."),
    (["table.toml"], "a table, [model]"),
    (["--tokenizer", "GPT2"], "unknown tokenizer (GPT2). Did you mean gpt2?"),
    (["--resume", "--out", "text.txt"], "that is no run ("),
    (["--resume", "--out", "nothing"], "no checkpoint there"),
    (["--overwrite", "--resume", "--out", "r"], "Give one of them"),
    (["--resume", "r", "--out", "r"], "--resume takes auto or nothing (r)"),
    (["--resume", "auto", "--checkpoint", "3", "--out", "r"], "--checkpoint is where to resume from (3)"),
    (["--resume", "auto", "--out", "."], "the output folder is not a run"),
    (["--out", "text.txt/sub"], "cannot make the run folder"),
    (["--resume", "--out", "nowhere"], "no checkpoint there"),
    (["--out", "."], "the output folder is not a run"),
]


@pytest.mark.parametrize(
    "arguments, message", BAD_TRAIN, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_a_mistake_in_training_is_one_line_and_nothing_is_written(here, capsys, arguments, message):
    (here / "bad.toml").write_text("n_layer = 3", encoding="utf-8")
    (here / "flag.toml").write_text("out = 'x'", encoding="utf-8")
    (here / "table.toml").write_text("[model]\nn_layers = 3", encoding="utf-8")
    (here / "text.jsonl").write_text('{"text": "a"}', encoding="utf-8")
    (here / "empty.txt").write_bytes(b"")
    (here / "short.txt").write_bytes(b"x" * 20)
    (here / "latin.txt").write_bytes("é".encode("latin-1") * 500)
    (here / "nothing").mkdir()
    before = sorted(here.rglob("*"))
    status, out, err = call(train, "--data", "text.txt", "--steps", 2, *FLAGS, *arguments, capsys=capsys)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert sorted(here.rglob("*")) == before


BAD_SAMPLE = [
    (["nowhere"], "unknown run (nowhere). Known: runs/text-pre."),
    (["runs/text-per"], "unknown run (runs/text-per). Did you mean runs/text-pre?"),
    (["text.txt"], "that is no run ("),
    (["runs"], "that is a folder of runs (runs). Name one of them, as runs/text-pre."),
    (["runs/text-pre", "The "], "unexpected argument (The ). A prompt is --prompt TEXT."),
    (["--top-k", "0"], "top_k is out of range (0)"),
    (["--top-k", "257"], "top_k is out of range (257)"),
    (["--top-p", "1.5"], "top_p is out of range (1.5)"),
    (["--temperature", "-1"], "temperature is out of range (-1.0)"),
    (["--temperature", "nan"], "temperature is out of range (nan)"),
    (["--temperature", "0", "--seed", "1"], "seed and num_samples have no effect"),
    (["--seed", "99999999999999999999999"], "seed is out of range"),
    (["--num-samples", "0"], "num_samples is out of range (0)"),
    (["--max-new-tokens", "0"], "max_new_tokens is out of range (0)"),
    (["--prompt", "a", "--prompt-file", "text.txt"], "two prompts"),
    (["--prompt-file", "nowhere.txt"], "cannot read the prompt"),
    (["--out", "text.txt"], "cannot write the samples (text.txt: File exists). Name a new file."),
    (["--out", "nowhere/x.txt"], "cannot write the samples"),
    (["--checkpoint", "77"], "no such checkpoint (77 in"),
    (["--device", "cuda:7"], "the device is not there"),
    (["--temprature", "1"], "unknown flag (--temprature). Did you mean --temperature"),
]


def test_a_mistake_in_sampling_is_one_line(here, capsys):
    status, _, err = call(sample, capsys=capsys)
    assert status == 2 and "no run yet" in err and err.endswith("python train.py --norm pre\n")
    call(train, "--data", "text.txt", "--steps", 2, *FLAGS, capsys=capsys)
    for arguments, message in BAD_SAMPLE:
        status, out, err = call(sample, *arguments, capsys=capsys)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err, err


def test_an_existing_run_is_kept_resumed_or_overwritten_as_asked(here, capsys):
    arguments = ["--data", "text.txt", "--out", "r", *FLAGS]
    assert call(train, *arguments, "--steps", 4, capsys=capsys)[0] == 0
    status, _, err = call(train, *arguments, "--steps", 4, capsys=capsys)
    assert status == 2 and "there is a run already" in err
    status, out, _ = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
    assert status == 0 and "changed steps: 4 -> 6" in out and "steps   4 of 6 done" in out
    status, _, err = call(train, "--resume", "--out", "r", "--norm", "post", capsys=capsys)
    assert status == 2 and "has another norm (pre, not post)" in err
    assert call(train, *arguments, "--steps", 2, "--overwrite", capsys=capsys)[0] == 0
    assert (here / "r" / "last").read_text(encoding="utf-8") == "2"


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_can_be_resumed(here, signum, capsys):
    arguments = [sys.executable, ROOT / "train.py", "--data", "text.txt", "--out", "r", "--steps", "100000", *FLAGS]
    process = subprocess.Popen(arguments, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = here / "r" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and err == ""
    step = int((here / "r" / "last").read_text(encoding="utf-8"))
    assert step > 5 and f"stopped at step {step}; continue with: python train.py --resume --out r" in out
    assert call(train, "--resume", "--out", "r", "--steps", step + 3, capsys=capsys)[0] == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, step + 4))


def test_a_reader_who_leaves_training_early_is_told_what_is_lost(here):
    arguments = [sys.executable, ROOT / "train.py", "--data", "text.txt", "--out", "r", "--steps", "100000", *FLAGS]
    process = subprocess.Popen(arguments, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1 and err.startswith("error: nobody reads the output") and err.count("\n") == 1
    process.stderr.close()


def test_too_little_memory_is_one_line(here, capsys):
    for too_much in (["--d-model", 2**20, "--n-layers", 1], ["--batch-size", 10**12]):
        status, _, err = call(train, "--data", "text.txt", *FLAGS, *too_much, capsys=capsys)
        assert status == 1 and err.startswith("error: out of memory") and err.count("\n") == 1
    assert not (here / "runs").exists()


def test_a_reader_who_leaves_early_is_no_error(here, capsys):
    call(train, "--data", "text.txt", "--steps", 2, "--out", "r", *FLAGS, capsys=capsys)
    arguments = [sys.executable, ROOT / "sample.py", "r", "--max-new-tokens", "300"]
    process = subprocess.Popen(arguments, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait(timeout=60) == 0
    process.stderr.close()


def test_a_strangers_words_do_not_steer_the_terminal(capsys):
    with pytest.raises(SystemExit):
        CommandLine().fail("no place for \x1b[2J\x1b]0;x\x07 héllo\nand more" + "x" * 5000)
    err = capsys.readouterr().err
    assert err.startswith(r"error: no place for \x1b[2J\x1b]0;x\x07 héllo and more") and len(err) < 2100


def test_a_wrong_type_of_init_is_one_line(here, capsys):
    for text, message in (("init = 3", "init has the wrong type (3)"), ('init = ""', "init is out of range ()")):
        (here / "c.toml").write_text(text, encoding="utf-8")
        status, _, err = call(train, "c.toml", capsys=capsys)
        assert status == 2 and message in err and err.count("\n") == 1
