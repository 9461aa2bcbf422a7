"""Several processes: real ones, over gloo on the loopback address."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from toys import IMPORTS, ROOT, TOY_RUN, as_flags, call, python, toy_config, toy_model, toy_tokens

import train
from gpt import BLOCKS
from gpt.loss import next_token_loss
from gpt.training import checkpoint, device, distributed
from gpt.training.device import Compute
from gpt.training.distributed import ALONE, World, world

pytestmark = pytest.mark.skipif(os.name == "nt" or not torch.distributed.is_available(), reason="forks, with gloo")
STEPS = 4
SETTINGS = {"steps": STEPS, "lr": 2e-3, "min_lr": 2e-3, "batch_size": 8, "val_fraction": 0.05, "eval_every": 1}
SETTINGS |= {"probe_every": 2, "adam_eps": 1e-3}  # large, or else Adam makes much of rounding where gradients are tiny

# Forks for each process of each job, as torchrun would start them.
FORKS = (
    IMPORTS
    + """
import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict
train.closing_sample = lambda run, config: ""  # takes as long as all the rest

def start(rank, n, port, name, arguments):
    pid = os.fork()
    if pid:
        return pid
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}-{rank}.{stream}", os.O_CREAT | os.O_WRONLY), number)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {
        key: str(value) for key, value in
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}.items()
    }
    status, largest = 1, gpt.training.distributed.World.largest

    def asked_then(self, value):
        found = largest(self, value)
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    try:
        if name == "late" and rank == 1:  # the signal comes when the processes have just agreed to go on
            gpt.training.distributed.World.largest = asked_then
        train.main(arguments)
    except SystemExit as exit:
        status = exit.code or 0
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

results = {}
for name, (n, arguments, event) in json.loads(sys.argv[1]).items():
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = arguments if isinstance(arguments[0], list) else [arguments] * n
    pids = [start(rank, n, port, name, own[rank]) for rank in range(n)]
    if event:
        folder, rank, signum = event
        while not os.path.exists(f"{folder}/last"):
            time.sleep(0.01)
        os.kill(pids[rank], signum)
    started = time.monotonic()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    results[name] = [statuses, time.monotonic() - started]
print(json.dumps(results))
"""
)


def flags(**settings) -> list[str]:
    return as_flags(TOY_RUN | SETTINGS | settings)


def said(folder, name, rank, stream) -> str:
    return (folder / f"{name}-{rank}.{stream}").read_text("utf-8")


def records(run, file="metrics.jsonl") -> list[dict]:
    lines = [json.loads(line) for line in (run / file).read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def assert_close(one, other):
    """Two runs that differ by rounding: everything they wrote down, and all tensors of their last checkpoints."""
    for file in ("metrics.jsonl", "probe.jsonl"):
        mine, theirs = records(one, file), records(other, file)
        assert [record["step"] for record in mine] == [record["step"] for record in theirs]
        for a, b in zip(mine, theirs):
            assert a.keys() == b.keys()
            assert all(a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6) for key in a), (a, b)
        if file == "metrics.jsonl":
            assert max(abs(a["loss"] - b["loss"]) for a, b in zip(mine, theirs)) < 1e-5
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(checkpoint.find(run, "last") / name) for run in (one, other))
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.allclose(mine[key], theirs[key], atol=1e-5), (name, key)


EQUAL = [*((norm, norm + "2") for norm in BLOCKS), *((norm, norm + "2s") for norm in ("pre", "post", "rezero"))]
EQUAL += [("pre", "pre4"), ("adamw", "adamw2s"), ("pre", "resumed")]
MISTAKES = {
    "rows": ({"batch_size": 7}, "batch_size must be a multiple of the 2 processes (7). Use 6 or 8."),
    "few": ({"batch_size": 1}, "batch_size must be a multiple of the 2 processes (1). Use 2."),
    "micro": ({"micro_batch_size": 8}, "micro_batch_size must divide batch_size / 2 (8 and 4). Use 1, 2 or 4."),
    "missing": ({"data": "nowhere.txt"}, "no corpus of that name and no such file"),
    "float16": ({"dtype": "float16"}, "no such number format on cpu (float16)"),
    "there": ({}, "the output folder is not a run"),
}


def planned(data):
    """All jobs of this file that need no launcher."""

    def job(n, out, event=None, **settings):
        return n, flags(**{"data": data, "out": out} | settings), event

    for norm in BLOCKS:
        yield norm, job(1, norm, norm=norm)
        yield norm + "2", job(2, norm + "2", norm=norm)
    for norm in ("pre", "post", "rezero"):
        yield norm + "2s", job(2, norm + "2s", norm=norm, shard=True)
    yield "pre4", job(4, "pre4", micro_batch_size=1)
    yield "adamw", job(1, "adamw", optimizer="adamw")
    yield "adamw2s", job(2, "adamw2s", optimizer="adamw", shard=True, micro_batch_size=2)
    again = ["--resume", "--out", "resumed", "--steps"]
    yield "resumed-a", job(2, "resumed", steps=1, shard=True)
    yield "resumed-b", (1, [*again, "3"], None)
    yield "resumed", (4, [*again, str(STEPS), "--no-shard"], None)
    for name, n in (("dropout", 1), ("dropout2", 2), ("dropout2-again", 2)):
        yield name, job(n, name, dropout=0.3)
    for n in (1, 2):
        yield f"one-letter{n}", job(n, f"one-letter{n}", data="same.txt", batch_size=n, dropout=0.3, steps=1)
    for name, (settings, _) in MISTAKES.items():
        yield name, job(2, name, **settings)
    yield "differ", (2, [flags(data=data, out="differ", seed=seed) for seed in (1, 2)], None)
    yield "diverged", job(2, "diverged", norm="none", lr=1e30, warmup_steps=0)
    yield "late", job(2, "late", steps=10**6)
    for name, signum in (("asked", signal.SIGTERM), ("killed", signal.SIGKILL)):
        yield name, job(2, name, (name, 1, signum), steps=10**6, save_every=1)
    asked = flags(data=data, out="asked", steps=10**6, save_every=1)
    yield "resume-differs", (2, [[*asked, "--resume", "auto"], [*asked, "--overwrite"]], None)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of all jobs, and (statuses, seconds) of each. Started by one process, since most of the time of a job
    goes to imports."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text.txt").write_text("".join(f"{i}: norm {i * 7919 % 101}\n" for i in range(400)), encoding="utf-8")
    (folder / "same.txt").write_text("a" * 2000, encoding="utf-8")
    (folder / "there").mkdir()
    (folder / "there" / "x").touch()
    result = python(
        "-c", FORKS, json.dumps(dict(planned("text.txt"))), cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder, json.loads(result.stdout)


@pytest.mark.parametrize("one, other", EQUAL, ids=[other for _, other in EQUAL])
def test_the_result_does_not_depend_on_the_number_of_processes(done, one, other):
    """Replicas and shards, with micro-batches, begun on two, resumed on one and then on four; one process speaks."""
    folder, results = done
    for name, (statuses, _) in results.items():
        if name.startswith(other):
            assert not any(statuses), [said(folder, name, rank, "err") for rank in range(len(statuses))]
            for rank in range(1, len(statuses)):
                assert said(folder, name, rank, "out") == "" == said(folder, name, rank, "err")
    assert_close(folder / one, folder / other)


def test_what_is_said_about_processes(done):
    folder, _ = done
    assert "device  2 processes, shards; cpu" in said(folder, "pre2s", 0, "out")
    assert "device  4 processes, replicas; cpu" in said(folder, "pre4", 0, "out")
    assert said(folder, "pre2s", 0, "err") == said(folder, "pre4", 0, "err") == ""
    expected = "warning: nothing is sharded (1 process). Start several: torchrun --nproc_per_node N train.py ...\n"
    assert said(folder, "resumed-b", 0, "err") == expected


def test_dropout_differs_between_processes_and_repeats(done):
    folder, _ = done
    one, two, again = (records(folder / name) for name in ("dropout", "dropout2", "dropout2-again"))
    assert two == again != one
    alone, mean = (records(folder / f"one-letter{n}")[0]["loss"] for n in (1, 2))  # of rows that are all the same
    assert abs(alone - mean) > 1e-5


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_of_every_process_and_nothing_hangs(done, name):
    folder, results = done
    assert results[name][0] == [2, 2] and results[name][1] < 20 and not (folder / name / "config.json").exists()
    for rank in range(2):
        err = said(folder, name, rank, "err")
        assert err.startswith("error: ") and err.count("\n") == 1 and MISTAKES[name][1] in err, err


@pytest.mark.parametrize("name", ["differ", "resume-differs"])
def test_processes_that_differ_are_refused(done, name):
    folder, results = done
    assert results[name][0][1] == 2 and "the processes differ" in said(folder, name, 1, "err")
    assert not (folder / "differ").exists() and (folder / "asked" / "last").exists()


def test_a_loss_that_is_not_finite_ends_all(done):
    folder, results = done
    assert results["diverged"][0] == [1, 1]
    assert all("the run diverged" in said(folder, "diverged", rank, "err") for rank in range(2))


@pytest.mark.parametrize("name", ["asked", "late"])
def test_a_stop_that_one_process_is_asked_for_is_one_of_all(done, name):
    folder, results = done
    assert results[name][0] == [128 + signal.SIGTERM] * 2, said(folder, name, 1, "err")
    assert "stopped at step" in said(folder, name, 0, "out") and said(folder, name, 1, "out") == ""


def test_a_process_that_is_lost_is_noticed(done):
    folder, results = done
    assert results["killed"][0] == [1, -signal.SIGKILL] and results["killed"][1] < 30
    err = said(folder, "killed", 0, "err")
    assert err.startswith("error: another process of this job is gone (") and err.count("\n") == 1, err


@pytest.mark.parametrize("run", ["asked", "killed"])
def test_what_ends_early_has_each_step_once_and_a_checkpoint(done, run):
    folder, _ = done
    steps = [record["step"] for record in records(folder / run)]
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint.load_model(folder / run).config.n_layers == 2


def torchrun(*arguments) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


def test_two_machines_go_on_by_themselves_when_one_loses_its_process(tmp_path, text_file):
    """Two of torchrun's agents, with the command of docs/bigger.md. The last words of a job that fails are its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (line,) = re.findall(r"^TORCH_.*--nnodes 2.*$", (ROOT / "docs" / "bigger.md").read_text("utf-8"), re.M)
    line = line.replace("--nproc_per_node 8", "--nproc_per_node 1").replace("HOST:29500", f"127.0.0.1:{port}")
    setting, program, *words = line.replace(" train.py configs/gpt2.toml", f" {ROOT / 'train.py'}").split()
    environment = os.environ | dict([setting.split("=")])
    assert program == "torchrun" and words[-4:] == ["--out", "runs/big", "--resume", "auto"]
    settings = {"steps": 300, "save_every": 10, "log_every": 10, "eval_every": 200, "probe_every": 1000}
    command = torchrun(*words, *flags(data=text_file, out="r", **settings))
    agents = []
    for number in range(2):
        with open(tmp_path / f"{number}.log", "w", encoding="utf-8") as log:
            agents.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment))
    try:
        while not (tmp_path / "r" / "last").exists() or int((tmp_path / "r" / "last").read_text("utf-8")) < 50:
            assert all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
        worker = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(worker[0]), signal.SIGKILL)
        assert [agent.wait(timeout=90) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(timeout=60)
    logs = [(tmp_path / f"{number}.log").read_text("utf-8") for number in range(2)]
    begun = [int(step.replace(",", "")) for log in logs for step in re.findall(r"steps +([\d,]+) of 300 done", log)]
    assert sorted(begun)[0] == 0 and 50 <= sorted(begun)[1] < 300 and len(begun) == 2
    assert [record["step"] for record in records(tmp_path / "r")] == [1, *range(10, 301, 10)]


def test_the_last_words_of_a_job_are_those_of_the_process_that_failed(tmp_path, text_file):
    command = torchrun("--standalone", "--nproc_per_node", 2, ROOT / "train.py")
    command += flags(data=text_file, out="r", norm="none", lr=1e30, warmup_steps=0)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "the run diverged (step" in result.stderr.partition("Root Cause")[2]


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # on a stream that is captured
def test_torchrun_is_told_of_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    status, _, err = call(train, "--steps", 0, capsys=capsys)
    assert status == 2 and "steps is out of range (0)" in err
    assert "steps is out of range (0)" in json.loads((tmp_path / "error.json").read_text("utf-8"))["message"]["message"]


def test_shards_want_a_format_without_a_scaler(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: World(size=2, local_size=2))
    monkeypatch.setattr(device, "choose", lambda *arguments: Compute("cuda", "float16", "off"))
    with pytest.raises(ValueError, match=r"--shard works in bfloat16 or float32 \(float16\)\. Give --dtype float32"):
        train.train(toy_config(shard=True))


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    assert world() is ALONE
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        assert world() is ALONE
        monkeypatch.setenv(name, str(value))
    for restarts, shared in (("0", "True"), ("3", "False")):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        assert world() == World(rank=5, size=8, local_rank=1, local_size=4)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match=r"\(--max-restarts 3\)\. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        world()


@pytest.mark.parametrize(
    "batch_size, micro, processes, expected", [(12, None, 1, 12), (12, None, 4, 3), (12, 2, 3, 2), (12, 3, 2, 3)]
)
def test_the_rows_of_a_forward_pass(batch_size, micro, processes, expected):
    config = toy_config(batch_size=batch_size, micro_batch_size=micro)
    assert config.micro_size(processes) == expected


@pytest.fixture
def group():
    """This process alone, joined to itself."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_gradients_are_exchanged_with_the_last_micro_batch_alone(group):
    exchanges = []

    def count(state, bucket):
        exchanges.append(number)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model, tokens = toy_model(), toy_tokens()
    net = distributed.replicated(model, "cpu")
    net.register_comm_hook(None, count)
    for number in range(3):
        with distributed.exchanging(net, number == 2):
            next_token_loss(net(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert set(exchanges) == {2}
    model = toy_model()
    distributed.shard(model)
    for number in range(3):
        with distributed.exchanging(model, number == 2):
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        assert all((p.grad is not None) == (number == 2) for p in model.parameters())
