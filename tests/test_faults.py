"""What goes wrong outside: kills, full disks, damaged and hostile files, two processes in one run."""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from toys import ROOT, TOY_RUN, as_flags, call, records, toy_config, toy_model, write_config

import sample
import train
from gpt.config import Mistake
from gpt.pretrained import export, load
from gpt.training import checkpoint
from gpt.training.run import new_run
from gpt.training.settings import TrainConfig, configure, read_toml

posix = pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
pytestmark = pytest.mark.usefixtures("quick")
FLAGS = as_flags(TOY_RUN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with text.txt, and in r a toy run with checkpoints of its steps 3 and 4; the best is 4."""
    folder = tmp_path_factory.mktemp("trained")
    text = "\n".join(f"{i}: the norm of line {i * 7919 % 101} is söme" for i in range(160))
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train, "draw", lambda *arguments: None)
        train.train(toy_config(data="text.txt", steps=4, save_every=1, min_lr=1e-3), "r")
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """The run folder of `trained`, a fresh copy in the working folder."""
    shutil.copytree(trained / "r", tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "r"


def steps(run) -> list[int]:
    """The steps in metrics.jsonl."""
    return [record["step"] for record in records(run)]


def last(run) -> int:
    return int((run / "last").read_text("utf-8"))


def test_kills_lose_nothing_that_was_saved(tmp_path, text_file, forks):
    """At random moments of a run that saves at every step, evaluates and probes. In the end everything is as after a
    run that nothing happened to."""
    settings = TOY_RUN | {"data": text_file, "save_every": 1, "eval_every": 3, "dropout": 0.1, "probe_every": 2}
    settings |= {"warmup_steps": 2, "lr": 1e-3, "min_lr": 1e-3, "micro_batch_size": 2, "val_fraction": 0.02}

    def start(steps):
        return forks.start(
            "train", *as_flags(settings | {"steps": steps}), "--out", "r", "--resume", "auto", cwd=tmp_path
        )

    begun = time.perf_counter()
    assert start(9).wait() == 0
    while_nine_steps = min(0.5, time.perf_counter() - begun)  # whatever else the machine is doing
    moments, saved = random.Random(0), [9]
    for _ in range(15):
        process = start(10**6)
        time.sleep(moments.uniform(0, while_nine_steps))
        assert process.kill(signal.SIGKILL) == -signal.SIGKILL, "a run ended by itself"
        checkpoint.load_model(tmp_path / "r")
        saved.append(last(tmp_path / "r"))
    assert saved == sorted(saved) and len({*saved}) > 5
    end = saved[-1] + 5
    assert start(end).wait() == 0
    whole = {"data": str(text_file), "steps": end, "save_every": 10**6}
    train.train(configure(settings | whole), str(tmp_path / "whole"))
    ends = [checkpoint.find(tmp_path / name, "last") for name in ("r", "whole")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(end / file) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    for file in ("metrics.jsonl", "steps.jsonl", "probe.jsonl"):
        assert records(tmp_path / "r", file) == records(tmp_path / "whole", file)
    one, other = (checkpoint.read_state(end)[0] for end in ends)
    assert all(one[name] == other[name] for name in ("step", "val_loss", "best_step", "best_val_loss", "corpus"))
    assert not [path.name for path in (tmp_path / "r").glob(".*") if path.name != ".lock"]


def test_a_kill_between_probing_and_logging_a_saved_step_repeats_neither(here, forks, capsys):
    prelude = "from gpt.training.trainer import Trainer; Trainer.log = lambda *arguments: os.kill(os.getpid(), 9)"
    settings = [*FLAGS, "--data", "text.txt", "--save-every", 1, "--probe-every", 1, "--steps", 2]
    process = forks.start("train", "--out", "r", *settings, cwd=here, prelude=prelude)
    assert process.wait() == -signal.SIGKILL and last(here / "r") == 1 and not (here / "r" / "metrics.jsonl").exists()
    assert call(train, "--resume", "--out", "r", capsys=capsys)[0] == 0
    assert steps(here / "r") == [1, 2]
    assert [record["step"] for record in records(here / "r", "probe.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("limit", [100_000, 150_000])  # of one file: within the weights, and the moments
def test_a_full_disk_ends_the_run_with_one_line_and_the_old_checkpoint_intact(run, forks, capsys, limit):
    sizes = {path.name: path.stat().st_size for path in (run / "step-000004").iterdir()}
    assert 1000 < 100_000 < sizes["model.safetensors"] < 150_000 < sizes["optimizer.safetensors"]
    before = (run / "step-000004" / "model.safetensors").read_bytes()
    prelude = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = forks.start("train", "--resume", "--out", "r", "--steps", 500, cwd=run.parent, prelude=prelude)
    assert process.wait() == 1 and process.err.startswith("error: ") and process.err.count("\n") == 1, process.err
    assert "step 5" in process.err and "File too large" in process.err
    assert last(run) == 4 and (run / "step-000004" / "model.safetensors").read_bytes() == before
    assert not list(run.glob(".step-*"))
    assert call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)[0] == 0 and last(run) == 6


# Mounts a small disk in memory, as a user may in namespaces of one's own, and keeps a copy of the run that fills it.
SMALL_DISK = """
import ctypes, shutil
libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
try:
    failed = libc.unshare(0x10000000 | 0x00020000)  # of users, and of mounts
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
except OSError:
    failed = True
if failed or libc.mount(b"none", b"disk", b"tmpfs", 0, b"size=1500k"):
    sys.exit(77)

def main(words, main=train.main):
    try:
        main(words)
    finally:
        shutil.copytree("disk/r", "kept")

train.main = main
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a disk")
def test_a_small_disk_that_is_full_ends_the_run_and_loses_nothing(here, forks, capsys):
    (here / "disk").mkdir()
    flags = [*FLAGS, "--steps", "1000", "--save-every", "1", "--keep", "100", "--data", "text.txt"]
    process = forks.start("train", "--out", "disk/r", *flags, cwd=here, prelude=SMALL_DISK)
    if process.wait() == 77:
        pytest.skip("needs the right to mount a disk")
    assert process.status == 1 and process.err.startswith("error: ") and process.err.count("\n") == 1, process.err
    assert "No space left on device" in process.err, process.err
    kept = here / "kept"
    end = last(kept)
    assert end > 1 and checkpoint.load_model(kept).config.n_layers == 2 and not list(kept.glob(".step-*"))
    assert call(train, "--resume", "--out", "kept", "--steps", end + 2, capsys=capsys)[0] == 0
    assert last(kept) == end + 2
    assert steps(kept) == [*range(1, end + 3)]


def damages(content: bytes):
    """What may be left of a file: its beginning, all of it but for one bit, nothing."""
    for size in (0, 8, 100, len(content) // 2, len(content) - 1):
        yield content[:size]
    for place in (3, 60, len(content) - 100):
        yield content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]
    yield None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_an_older_one_serves(run, capsys, name):
    original = (run / "step-000004" / name).read_bytes()
    for number, content in enumerate(damages(original)):
        folder = shutil.copytree(run, run.with_name(str(number)))
        path = folder / "step-000004" / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        resume = ["--resume", "--out", folder, "--steps", 6]
        status, _, err = call(train, *resume, capsys=capsys)
        if name == "state.json" and content and len(content) == len(original):
            continue  # the bit is of a digit or of a string, which may do no harm
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and name in err, err
        assert "--checkpoint 3" in err
        if name == "model.safetensors":
            status, _, err = call(sample, folder, capsys=capsys)
            assert status == 2 and name in err and err.count("\n") == 1
    assert call(sample, folder, "--checkpoint", 3, "--max-new-tokens", 5, capsys=capsys)[0] == 0
    status, out, err = call(train, *resume, "--checkpoint", 3, capsys=capsys)
    assert status == 0 and "steps   3 of 6 done" in out, err
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_weights_and_optimizer_of_different_steps_are_refused(run, capsys):
    for name in ("optimizer.safetensors", "model.safetensors"):
        kept = (run / "step-000004" / name).read_bytes()
        shutil.copy(run / "step-000003" / name, run / "step-000004" / name)
        status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
        assert status == 2 and name in err and "--checkpoint 3" in err
        (run / "step-000004" / name).write_bytes(kept)


def test_a_corpus_that_changed_is_noticed_and_another_is_taken(here, capsys):
    train.train(toy_config(data="text.txt", steps=4), "r")
    original = (here / "text.txt").read_bytes()
    (here / "text.txt").write_bytes(original.replace(b"norm", b"Norm", 1))
    arguments = ["--resume", "--out", "r", "--steps", 6]
    status, _, err = call(train, *arguments, capsys=capsys)
    assert status == 2 and f"({here / 'text.txt'})" in err and err.count("\n") == 1
    (here / "text.txt").rename(here / "other.txt")
    assert call(train, *arguments, "--data", "other.txt", capsys=capsys)[0] == 0
    (here / "text.txt").write_bytes(original)
    assert call(train, *arguments, "--data", "text.txt", "--steps", 7, capsys=capsys)[0] == 0


def test_a_setting_that_an_older_version_did_not_have_gets_its_default_and_a_note(run, capsys):
    path = run / "step-000004" / "state.json"
    state = json.loads(path.read_text("utf-8"))
    del state["config"]["adam_eps"]
    path.write_text(json.dumps(state), encoding="utf-8")
    status, out, err = call(train, "--resume", "--out", "r", "--steps", 5, capsys=capsys)
    assert status == 0 and "adam_eps: absent -> 1e-08\n" in out and "steps: 4 -> 5\n" in out, err
    state["config"]["format"] = 999
    (run / "step-000005" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
    assert status == 2 and "(999, not 1)" in err and err.count("\n") == 1


def test_a_run_is_resumed_from_another_folder_with_its_own_text(here, monkeypatch, capsys):
    assert call(train, "--data", "text.txt", "--steps", 2, "--out", "relative", *FLAGS, capsys=capsys)[0] == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    status, out, err = call(train, "--resume", "--out", "../relative", "--steps", 3, capsys=capsys)
    assert status == 0 and "steps: 2 -> 3" in out and "data: " not in out, err


def test_resume_auto_starts_what_is_not_there_and_continues_what_is(here, capsys):
    command = ["--data", "text.txt", "--out", "r", "--resume", "auto", *FLAGS, "--steps"]
    (here / "r").mkdir()
    write_config(here / "r")  # ended before it saved
    for total, begun in ((2, 0), (3, 2), (3, 3)):
        status, out, err = call(train, *command, total, capsys=capsys)
        assert status == 0 and f"steps   {begun} of {total} done" in out, err


def test_one_process_trains_into_a_run(run, trained, forks, capsys):
    process = forks.start(
        "train", "--resume", "--out", "r", "--steps", 10**6, "--save-every", 1, "--keep", 999, cwd=run.parent
    )
    assert process.wait(until=lambda: last(run) >= 6) is None, process.err
    for how in ("--resume", "--overwrite"):
        status, _, err = call(train, how, "--out", "r", "--data", trained / "text.txt", *FLAGS, capsys=capsys)
        assert status == 2 and f"({run})" in err and err.count("\n") == 1, err
    assert call(sample, "r", "--max-new-tokens", 5, capsys=capsys)[0] == 0
    assert process.kill(signal.SIGKILL) == -signal.SIGKILL
    assert call(train, "--resume", "--out", "r", "--steps", last(run) + 1, capsys=capsys)[0] == 0


def test_a_second_signal_ends_at_once(here, forks):
    """While the first is waiting for a step to end, here one of a large batch."""
    large = ["--batch-size", "40000", "--micro-batch-size", "4", "--val-fraction", "0"]
    process = forks.start("train", "--data", "text.txt", "--out", "slow", "--steps", 9, *FLAGS, *large, cwd=here)
    process.wait(until=lambda: "run     slow" in process.out)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.kill(signal.SIGINT) == -signal.SIGINT and not (here / "slow" / "last").exists()
    assert "continue" not in process.out


def test_a_folder_that_cannot_be_written(trained, forks):
    """By a user without rights, since root has them all; what that user may not read is imported before."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(trained, folder, dirs_exist_ok=True)
        for place in (folder, os.path.join(folder, "r")):
            os.chmod(place, 0o555)
        for how in (["r", "--resume"], ["r", "--overwrite"], ["new"]):
            prelude = "os.geteuid() or os.setuid(65534)"
            process = forks.start("train", "--data", "text.txt", "--out", *how, *FLAGS, cwd=folder, prelude=prelude)
            assert process.wait() == 2 and process.err.startswith("error: ") and process.err.count("\n") == 1, (
                process.err
            )
            assert f"{how[0]}: Permission denied" in process.err, process.err
        for place in (folder, os.path.join(folder, "r")):
            os.chmod(place, 0o755)


@posix
def test_what_a_user_may_not_read_is_a_mistake(trained, forks):
    """A folder or a file, in whatever a script is given; as above, by a user without rights."""
    cases = {
        "r": [("sample", "r"), ("probe", "r"), ("train", "--resume", "--out", "r"), ("train", "--init", "r")],
        "r/step-000004": [("sample", "r"), ("gpt.pretrained", "export", "r", "new")],
        "r/step-000004/model.safetensors": [("sample", "r"), ("train", "--init", "r", "--data", "text.txt")],
        "r/best": [("sample", "r")],
        "text.txt": [("train", "--data", "text.txt")],
        "w": [("gpt.pretrained", "check", "w"), ("train", "--init", "w")],
        "w/model.safetensors": [("gpt.pretrained", "check", "w"), ("sample", "w")],
    }
    prelude = "import probe; os.geteuid() or os.setuid(65534)"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(trained, folder, dirs_exist_ok=True)
        export(toy_model(vocab_size=256), os.path.join(folder, "w"))
        os.chmod(folder, 0o777)
        for name, commands in cases.items():
            path = os.path.join(folder, name)
            mode = os.stat(path).st_mode
            os.chmod(path, 0)
            processes = [forks.start(*words, cwd=folder, prelude=prelude) for words in commands]
            for words, process in zip(commands, processes):
                assert process.wait() == 2 and process.err.startswith("error: "), (name, words, process.err)
                assert process.err.count("\n") == 1 and name in process.err, (name, words, process.err)
                assert "ermission denied" in process.err, (name, words, process.err)
            os.chmod(path, mode)


def mutations(content: bytes):
    """Bytes near `content`: cut, flipped, repeated, with numbers and words put in."""
    words = (b"1e400", b"-1", b"null", b"[" * 2000, b'"../../x"', b"9" * 40, b"\xff\xfe", b"\x00", b"NaN", b"{", b"1")
    piece = st.one_of(st.binary(max_size=9), st.sampled_from(words))
    edit = st.tuples(st.integers(0, len(content)), st.integers(0, 12), piece)

    def apply(edits):
        changed = content
        for place, removed, new in edits:
            changed = changed[:place] + new + changed[place + removed :]
        return changed

    return st.one_of(
        st.lists(edit, min_size=1, max_size=4).map(apply), st.integers(0, len(content)).map(lambda n: content[:n])
    )


bounded = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def small_run(folder):
    """A run folder of a tiny model with everything that is loaded from one."""
    config = configure({"n_layers": 1, "n_heads": 1, "d_model": 2, "context_length": 2})
    model = toy_model(vocab_size=256, n_layers=1, n_heads=1, d_model=2, context_length=2)
    state = {"step": 1, "best_step": 1, "config": checkpoint.config_to_json(config)}
    folder.mkdir()
    checkpoint.save(folder, model.state_dict(), {}, state)
    checkpoint.tidy(folder, state, keep=1)
    return folder / "step-000001"


def fuzz(path, use):
    """Replace `path` by files near it, of which each has to be taken or refused as a Mistake; returns how many were."""
    original, taken, refused = path.read_bytes(), [], []
    header = 8 + int.from_bytes(original[:8], "little") if path.suffix == ".safetensors" else len(original)

    @seed(1)
    @bounded
    @given(mutations(original[:header]))
    def attack(content):
        path.write_bytes(content + original[header:])
        try:
            use()
            taken.append(content)
        except Mistake as mistake:
            refused.append(content)
            assert str(mistake)

    attack()
    path.write_bytes(original)
    return len(taken), len(refused)


@posix
def test_hundreds_of_files_of_strangers_are_taken_or_refused(tmp_path):
    """No other error, no hang, no gigabyte."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = small_run(tmp_path / "r")
    state = json.loads((folder / "state.json").read_text("utf-8"))
    del state["sha256"]  # or else every change would be refused for that
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    export(toy_model(n_layers=1, d_model=2, n_heads=1), tmp_path / "hf")
    shutil.copy(ROOT / "configs" / "tiny.toml", tmp_path)
    counts = [
        fuzz(folder / "state.json", lambda: checkpoint.load_model(folder)),
        fuzz(folder / "model.safetensors", lambda: checkpoint.load_model(folder)),
        fuzz(tmp_path / "hf" / "config.json", lambda: load(tmp_path / "hf")),
        fuzz(tmp_path / "tiny.toml", lambda: configure(read_toml(tmp_path / "tiny.toml"), TrainConfig())),
    ]
    taken, refused = map(sum, zip(*counts))
    assert taken + refused > 500 and taken > 20 and refused > 150, counts
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 2**30  # bytes there, KiB elsewhere


@pytest.mark.parametrize(
    "settings",
    [
        {"n_layers": 10**9},
        {"d_model": 10**12},
        {"d_model": 2**62},
        {"context_length": 10**15},
        {"n_heads": 3, "d_model": 3},
    ],
    ids=str,
)
def test_absurd_sizes_in_a_strangers_checkpoint_are_refused(tmp_path, settings):
    folder = small_run(tmp_path / "r")
    state = json.loads((folder / "state.json").read_text("utf-8"))
    state["config"] |= settings
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(Mistake):
        checkpoint.load_model(folder)


def test_a_process_killed_at_its_start_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").touch()
    (tmp_path / "r" / ".config.json.new").touch()
    assert new_run(str(tmp_path / "r"), "", False) == tmp_path / "r"


def test_a_best_checkpoint_that_is_gone_is_best_no_more(run, capsys):
    path = run / "step-000004" / "state.json"
    state = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(state | {"best_step": 1, "best_val_loss": 0.1}), encoding="utf-8")
    assert call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)[0] == 0
    assert checkpoint.find(run).name == "step-000006"
