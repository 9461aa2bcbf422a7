"""What goes wrong outside: kills, full disks, damaged and hostile files, two processes in one run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from toys import IMPORTS, ROOT, TOY_RUN, as_flags, call, python, toy_config, toy_model

import sample
import train
from gpt.pretrained import export, load
from gpt.training import checkpoint
from gpt.training.run import new_run
from gpt.training.settings import TrainConfig, configure, read_toml

posix = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")
FLAGS = as_flags(TOY_RUN)


@pytest.fixture
def run(tmp_path, text_file, monkeypatch):
    """The folder of a toy run with checkpoints of its steps 3 and 4; the best is 4."""
    monkeypatch.chdir(tmp_path)
    train.train(toy_config(data=str(text_file), steps=4, save_every=1, min_lr=1e-3), "r")
    return tmp_path / "r"


KILLS = """
config = configure(json.loads(sys.argv[1]))

def child(steps):
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            saved = os.path.exists("r/last")
            train.train(configure({"steps": steps}, config), "r", "last" if saved else None, overwrite=not saved)
            os._exit(0)
        finally:
            os._exit(1)
    return pid

start = time.perf_counter()
assert os.waitpid(child(8), 0)[1] == 0
while_eight_steps = time.perf_counter() - start  # whatever else the machine is doing
rng = random.Random(0)
saved, last = [], 8
for _ in range(50):
    pid = child(10**6)
    time.sleep(rng.uniform(0, while_eight_steps))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "a run ended by itself"
    if os.path.exists("r/last"):
        state = gpt.training.checkpoint.read_state(gpt.training.checkpoint.find("r", "last"))[0]
        gpt.training.checkpoint.load_model("r")
        assert state["step"] >= last
        last = state["step"]
    saved.append(last)
assert os.waitpid(child(last + 5), 0)[1] == 0
print(json.dumps(saved))
"""


@posix
def test_fifty_kills_lose_nothing_that_was_saved(tmp_path, text_file):
    """At random moments of a run that saves, evaluates and probes at every step. In the end weights, optimizer and
    metrics are those of a run that nothing happened to."""
    steady = {
        "data": str(text_file),
        "save_every": 1,
        "eval_every": 3,
        "log_every": 1,
        "dropout": 0.1,
        "probe_every": 2,
    }
    steady |= TOY_RUN | {"warmup_steps": 2, "lr": 1e-3, "min_lr": 1e-3, "micro_batch_size": 2, "val_fraction": 0.02}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = python("-c", IMPORTS + KILLS, json.dumps(steady), cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    saved = json.loads(result.stdout)
    assert len(saved) == 50 and len(set(saved)) > 5
    train.train(configure(steady | {"steps": saved[-1] + 5, "save_every": 10**6}), str(tmp_path / "whole"))
    ends = [checkpoint.find(tmp_path / name, "last") for name in ("r", "whole")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(end / file) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    for file in ("metrics.jsonl", "probe.jsonl"):
        one, other = (
            [json.loads(line) | {"tokens_per_s": 0} for line in (end.parent / file).read_text("utf-8").splitlines()]
            for end in ends
        )
        assert one == other
    assert not [path.name for path in (tmp_path / "r").glob(".*") if path.name != ".lock"]


@posix
@pytest.mark.parametrize("limit", [100_000, 150_000])  # of one file: within the weights, and the moments
def test_a_full_disk_ends_the_run_with_one_line_and_the_old_checkpoint_intact(run, limit):
    sizes = {path.name: path.stat().st_size for path in (run / "step-000004").iterdir()}
    assert 1000 < 100_000 < sizes["model.safetensors"] < 150_000 < sizes["optimizer.safetensors"]
    before = (run / "step-000004" / "model.safetensors").read_bytes()
    prelude = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    start = f"{prelude}; import sys; sys.path.insert(0, {str(ROOT)!r}); import train; train.main(sys.argv[1:])"
    result = python("-c", start, "--resume", "--out", "r", "--steps", 500, cwd=run.parent)
    assert result.returncode == 1 and result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1 and "Make room" in result.stderr, result.stderr
    assert checkpoint.find(run, "last").name == "step-000004"
    assert (run / "step-000004" / "model.safetensors").read_bytes() == before
    assert train.train(toy_config(data=str(run.parent / "text.txt"), steps=6), "r", "last")["step"] == 6
    assert not list(run.glob(".step-*"))


@posix
def test_a_small_disk_that_is_full_ends_the_run_and_loses_nothing(run):
    """A real one, in memory, which a user may mount in a namespace of one's own."""
    (run.parent / "disk").mkdir()
    flags = [*FLAGS, "--steps", "1000", "--save-every", "1", "--keep", "100", "--data", run.parent / "text.txt"]
    train_it = " ".join(map(str, [sys.executable, ROOT / "train.py", "--out", "disk/r", *flags]))
    script = f"mount -t tmpfs -o size=1500k none disk || exit 77; {train_it}; echo $? > status; cp -a disk/r kept"
    try:
        result = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=run.parent, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if result.returncode == 77 or "unshare:" in result.stderr:
        pytest.skip(f"needs the right to mount a disk: {result.stderr.strip()}")
    assert (run.parent / "status").read_text("utf-8") == "1\n" and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("error: ") and "No space left on device" in result.stderr, result.stderr
    kept = run.parent / "kept"
    last = checkpoint.read_state(checkpoint.find(kept, "last"))[0]["step"]
    assert last > 1 and checkpoint.load_model(kept).config.n_layers == 2
    train.train(toy_config(data=str(run.parent / "text.txt"), steps=last + 2, save_every=1), str(kept), "last")
    assert checkpoint.find(kept, "last").name == f"step-{last + 2:06d}" and not list(kept.glob(".step-*"))
    steps = [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert steps == list(range(1, last + 3))


def damages():
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        for size in (0, 8, 100, "half", "less") if name == "model.safetensors" else (0, "half"):
            yield name, size
        for place in (3, 60, -100):
            yield name, ("flip", place)
        yield name, "gone"


@pytest.mark.parametrize("name, damage", list(damages()))
def test_a_damaged_checkpoint_is_refused_by_name_and_an_older_one_serves(run, capsys, name, damage):
    path = run / "step-000004" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif type(damage) is tuple:
        place = damage[1] % len(content)
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
    else:
        path.write_bytes(content[: {"half": len(content) // 2, "less": len(content) - 1}.get(damage, damage)])
    status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
    flipped_harmlessly = name == "state.json" and type(damage) is tuple  # a digit or a letter of a string
    if not flipped_harmlessly:
        assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and name in err, err
        assert "--checkpoint 3." in err
    if name == "model.safetensors":
        status, _, err = call(sample, "r", capsys=capsys)
        assert status == 2 and name in err and err.count("\n") == 1
    assert call(sample, "r", "--checkpoint", 3, "--max-new-tokens", 5, capsys=capsys)[0] == 0
    status, out, err = call(train, "--resume", "--checkpoint", 3, "--out", "r", "--steps", 6, capsys=capsys)
    assert status == 0 and "steps   3 of 6 done" in out, err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_weights_and_optimizer_of_different_steps_are_refused(run, capsys):
    for name in ("optimizer.safetensors", "model.safetensors"):
        kept = (run / "step-000004" / name).read_bytes()
        shutil.copy(run / "step-000003" / name, run / "step-000004" / name)
        status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
        assert status == 2 and name in err and "its checksum differs" in err
        (run / "step-000004" / name).write_bytes(kept)


def test_a_corpus_that_changed_is_noticed_and_another_is_taken(run, capsys):
    text = run.parent / "text.txt"
    original = text.read_bytes()
    text.write_bytes(original.replace(b"norm", b"Norm", 1))
    arguments = ["--resume", "--out", "r", "--steps", 6]
    status, _, err = call(train, *arguments, capsys=capsys)
    assert status == 2 and "the corpus has changed since" in err and str(text) in err
    text.rename(run.parent / "other.txt")
    assert call(train, *arguments, "--data", "other.txt", capsys=capsys)[0] == 0
    text.write_bytes(original)
    assert call(train, *arguments, "--data", "text.txt", "--steps", 7, capsys=capsys)[0] == 0


def test_a_setting_that_an_older_version_did_not_have_gets_its_default_and_a_note(run, capsys):
    path = run / "step-000004" / "state.json"
    state = json.loads(path.read_text("utf-8"))
    del state["config"]["adam_eps"]
    path.write_text(json.dumps(state), encoding="utf-8")
    status, out, err = call(train, "--resume", "--out", "r", "--steps", 5, capsys=capsys)
    assert status == 0 and "changed adam_eps: absent -> 1e-08\n" in out and "changed steps: 4 -> 5\n" in out, err
    state["config"]["format"] = 999
    (run / "step-000005" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
    assert status == 2 and "the run has another format (999, not 1). Use the version that wrote it." in err


def test_a_run_is_resumed_from_another_folder_with_its_own_text(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    assert call(train, "--data", "text.txt", "--steps", 2, "--out", "relative", *FLAGS, capsys=capsys)[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, out, err = call(train, "--resume", "--out", "../relative", "--steps", 3, capsys=capsys)
    assert status == 0 and "changed steps: 2 -> 3" in out and "changed data" not in out, err


def test_resume_auto_starts_what_is_not_there_and_continues_what_is(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["--data", "text.txt", "--out", "r", "--resume", "auto", *FLAGS, "--steps"]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text('{"format": 1}', encoding="utf-8")  # ended before it saved
    for steps, begun in ((2, 0), (3, 2), (3, 3)):
        status, out, err = call(train, *command, steps, capsys=capsys)
        assert status == 0 and f"steps   {begun} of {steps} done" in out, err


@posix
def test_one_process_trains_into_a_run(run, capsys):
    command = [sys.executable, ROOT / "train.py", "--resume", "--out", "r", "--steps", "1000000", "--save-every", "1"]
    process = subprocess.Popen(command, cwd=run.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while int((run / "last").read_text("utf-8")) < 6:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        for how in ("--resume", "--overwrite"):
            status, _, err = call(train, how, "--out", "r", "--data", "text.txt", *FLAGS, capsys=capsys)
            assert status == 2 and "another process works here" in err and err.count("\n") == 1, err
        assert call(sample, "r", "--max-new-tokens", 5, capsys=capsys)[0] == 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = int((run / "last").read_text("utf-8"))
    assert call(train, "--resume", "--out", "r", "--steps", last + 1, capsys=capsys)[0] == 0


@posix
def test_a_second_signal_ends_at_once(run):
    """While the first is waiting for a step to end, here one of a large batch."""
    large = ["--batch-size", "40000", "--micro-batch-size", "4", "--val-fraction", "0"]
    flags = ["--data", "text.txt", "--out", "slow", "--steps", "9", *FLAGS, *large]
    command = [sys.executable, ROOT / "train.py", *flags]
    process = subprocess.Popen(command, cwd=run.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("run "):
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (
        process.returncode == -signal.SIGINT and "stopped at" not in out and not (run.parent / "slow" / "last").exists()
    )


UNPRIVILEGED = """
os.geteuid() or os.setuid(65534)
statuses = []
for how in (["--out", "r", "--resume"], ["--out", "r", "--overwrite"], ["--out", "new"]):
    try:
        train.main(["--data", "text.txt", "--steps", "6", *how])
    except SystemExit as exit:
        statuses.append(exit.code)
print(statuses)
"""


@posix
def test_a_folder_that_cannot_be_written(run):
    """By a user without rights, since root has them all; what that user may not read is imported before."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(run.parent, folder, dirs_exist_ok=True)
        os.chmod(folder, 0o555)
        os.chmod(os.path.join(folder, "r"), 0o555)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        result = python("-c", IMPORTS + UNPRIVILEGED, cwd=folder, env=environment)
        lines = result.stderr.splitlines()
        assert result.stdout.splitlines()[-1] == "[2, 2, 2]" and len(lines) == 3, result.stderr
        assert all(line.startswith("error: cannot ") and "Permission denied" in line for line in lines), lines
        os.chmod(folder, 0o755)
        os.chmod(os.path.join(folder, "r"), 0o755)


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


bounded = settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def small_run(folder):
    """A run folder of a tiny model with everything that is loaded from one."""
    config = configure({"n_layers": 1, "n_heads": 1, "d_model": 2, "context_length": 2})
    model = toy_model(vocab_size=256, n_layers=1, n_heads=1, d_model=2, context_length=2)
    state = {"step": 1, "best_step": 1, "config": checkpoint.config_to_json(config)}
    folder.mkdir()
    checkpoint.save(folder, model.state_dict(), {}, state, keep=1)
    return folder / "step-000001"


def fuzz(path, use, counts):
    """Replace `path` by 500 files near it; each has to be taken or refused with a ValueError."""
    original = path.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little") if path.suffix == ".safetensors" else len(original)

    @seed(1)
    @bounded
    @given(mutations(original[:header]))
    def attack(content):
        path.write_bytes(content + original[header:])
        try:
            use()
            counts["taken"] += 1
        except ValueError as error:
            counts["refused"] += 1
            assert str(error)

    attack()
    path.write_bytes(original)


@posix
def test_two_thousand_files_of_strangers_are_taken_or_refused(tmp_path):
    """No traceback but ValueError's, no hang, no gigabyte."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = {"taken": 0, "refused": 0}
    folder = small_run(tmp_path / "r")
    state = json.loads((folder / "state.json").read_text("utf-8"))
    del state["sha256"]  # or else every change would be refused for that
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    fuzz(folder / "state.json", lambda: checkpoint.load_model(folder), counts)
    fuzz(folder / "model.safetensors", lambda: checkpoint.load_model(folder), counts)
    export(toy_model(n_layers=1, d_model=2, n_heads=1), tmp_path / "hf")
    fuzz(tmp_path / "hf" / "config.json", lambda: load(tmp_path / "hf"), counts)
    shutil.copy(ROOT / "configs" / "tiny.toml", tmp_path)
    fuzz(tmp_path / "tiny.toml", lambda: configure(read_toml(tmp_path / "tiny.toml"), TrainConfig()), counts)
    print(counts)
    assert sum(counts.values()) >= 2000 * 0.9 and counts["taken"] > 50 and counts["refused"] > 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # in KiB


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
    with pytest.raises(ValueError, match="the checkpoint is damaged|is out of range"):
        checkpoint.load_model(folder)


def test_names_compilers_and_wrappers_put_before_are_taken_off(tmp_path):
    folder = small_run(tmp_path / "r")
    expected = checkpoint.load_model(folder).state_dict()
    state = json.loads((folder / "state.json").read_text("utf-8"))
    del state["sha256"]
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."):
        save_file({prefix + name: tensor for name, tensor in expected.items()}, folder / "model.safetensors")
        loaded = checkpoint.load_model(folder).state_dict()
        assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_a_process_killed_at_its_start_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").touch()
    (tmp_path / "r" / ".config.json.new").touch()
    assert new_run(str(tmp_path / "r"), "", False) == tmp_path / "r"


def test_a_best_checkpoint_that_is_gone_is_best_no_more(run):
    path = run / "step-000004" / "state.json"
    state = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(state | {"best_step": 1, "best_val_loss": 0.1}), encoding="utf-8")
    end = train.train(toy_config(data=str(run.parent / "text.txt"), steps=6), "r", "last")
    assert end["best_step"] == 6 and checkpoint.find(run).name == "step-000006"
