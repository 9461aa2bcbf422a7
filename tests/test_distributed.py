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
from conftest import ROOT, TOY_RUN, python, toy_config
from safetensors.torch import load_file

from gpt import BLOCKS, checkpoint
from gpt.distributed import ALONE, World, world

pytestmark = pytest.mark.skipif(os.name == "nt" or not torch.distributed.is_available(), reason="forks, with gloo")
STEPS = 4
SETTINGS = {"steps": STEPS, "lr": 2e-3, "min_lr": 2e-3, "batch_size": 8, "val_fraction": 0.05, "eval_every": 1}
SETTINGS |= {"probe_every": 2, "adam_eps": 1e-3}  # large, or else Adam makes much of rounding where gradients are tiny

# Imports once and forks for each process of each job, as torchrun would start them.
FORKS = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports the compiler
import gpt.checkpoint, gpt.corpus, gpt.data, gpt.depth, gpt.device, gpt.distributed, gpt.generate, gpt.optim
import gpt.pretrained, pydoc_data.topics, tqdm, train
import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict

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
    status = 1
    try:
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


def flags(**settings) -> list[str]:
    found = []
    for name, value in (TOY_RUN | SETTINGS | settings).items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [] if value is False else [flag, str(value)]
    return found


def jobs(folder, **named) -> dict:
    """Run jobs one after the other, NAME=(processes, arguments or a list of each one's, None or (run, rank, signal to
    send when the run has saved)); gives their (statuses, seconds)."""
    result = python("-c", FORKS, json.dumps(named), cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


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


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path, text_file):
    """Every placement on two; some split in shards, on four, with several micro-batches, stopped and resumed on
    another number."""
    named = {}
    common = {"data": text_file}
    for norm in BLOCKS:
        named[f"{norm}1"] = (1, flags(norm=norm, out=f"{norm}1", **common), None)
        named[f"{norm}2"] = (2, flags(norm=norm, out=f"{norm}2", **common), None)
    for norm in ("pre", "post", "rezero"):
        named[f"{norm}2s"] = (2, flags(norm=norm, out=f"{norm}2s", shard=True, **common), None)
    named["pre4"] = (4, flags(norm="pre", out="pre4", micro_batch_size=1, **common), None)
    named["pre3s"] = (4, flags(norm="pre", out="pre3s", micro_batch_size=1, shard=True, **common), None)
    named["adamw1"] = (1, flags(optimizer="adamw", out="adamw1", **common), None)
    named["adamw2s"] = (2, flags(optimizer="adamw", out="adamw2s", shard=True, **common), None)
    for name, settings in (("part", {}), ("parts", {"shard": True})):
        again = ["--resume", "--out", name]
        named[f"{name}-a"] = (2, flags(norm="post", out=name, **common | settings | {"steps": 1}), None)
        named[f"{name}-b"] = (1, [*again, "--steps", "2"], None)
        named[f"{name}-c"] = (4, [*again, "--steps", str(STEPS), "--shard" if name == "part" else "--no-shard"], None)
    results = jobs(tmp_path, **named)
    for name, (statuses, _) in results.items():
        assert not any(statuses), (name, said(tmp_path, name, 0, "err"), said(tmp_path, name, len(statuses) - 1, "err"))
        for rank in range(1, len(statuses)):
            assert said(tmp_path, name, rank, "out") == "" == said(tmp_path, name, rank, "err")
    for norm in BLOCKS:
        assert_close(tmp_path / f"{norm}1", tmp_path / f"{norm}2")
    for one, other in (
        ("pre1", "pre2s"),
        ("post1", "post2s"),
        ("rezero1", "rezero2s"),
        ("pre1", "pre4"),
        ("pre1", "pre3s"),
        ("adamw1", "adamw2s"),
        ("post1", "part"),
        ("post1", "parts"),
    ):
        assert_close(tmp_path / one, tmp_path / other)
    assert "2 processes, shards" in said(tmp_path, "pre2s", 0, "out")
    assert "2 processes, replicas" in said(tmp_path, "pre2", 0, "out")
    assert "warning: nothing is sharded (1 process)" in said(tmp_path, "parts-b", 0, "err")


def test_dropout_differs_between_processes_and_repeats(tmp_path, text_file):
    common = {"data": text_file, "dropout": 0.3, "probe_every": 4}
    results = jobs(
        tmp_path,
        one=(1, flags(out="one", **common), None),
        two=(2, flags(out="two", **common), None),
        again=(2, flags(out="again", **common), None),
    )
    assert not any(status for statuses, _ in results.values() for status in statuses)
    assert records(tmp_path / "two") == records(tmp_path / "again") != records(tmp_path / "one")


MISTAKES = {
    "rows": ({"batch_size": 7}, "batch_size must be a multiple of the 2 processes (7). Use 6 or 8."),
    "few": ({"batch_size": 1}, "batch_size must be a multiple of the 2 processes (1). Use 2."),
    "micro": ({"micro_batch_size": 8}, "micro_batch_size must divide batch_size / 2 (8 and 4). Use 1, 2 or 4."),
    "data": ({"data": "nowhere.txt"}, "no corpus of that name and no such file"),
    "float16": ({"shard": True, "dtype": "float16"}, "no such number format on cpu (float16)"),
    "taken": ({"out": "there"}, "the output folder is not a run"),
}


def test_a_mistake_is_one_line_of_every_process_and_nothing_hangs(tmp_path, text_file):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    named = {name: (2, flags(**{"data": text_file, "out": name} | own), None) for name, (own, _) in MISTAKES.items()}
    differ = [flags(data=text_file, out="differ", seed=seed) for seed in (1, 2)]
    results = jobs(tmp_path, **named, differ=(2, differ, None))
    for name, (_, message) in MISTAKES.items():
        assert results[name][0] == [2, 2] and results[name][1] < 10
        for rank in range(2):
            err = said(tmp_path, name, rank, "err")
            assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
        assert not (tmp_path / name).exists()
    assert results["differ"][0][1] == 2 and "the processes differ" in said(tmp_path, "differ", 1, "err")
    assert not (tmp_path / "differ").exists()


def test_signals_and_losses_of_one_process_end_all(tmp_path, text_file):
    """A stop that one process is asked for is saved by all at one step; a killed one is noticed; a loss that is not
    finite is said by all."""
    endless = flags(data=text_file, steps=10**6, out="asked", save_every=1)
    killed = flags(data=text_file, steps=10**6, out="killed", save_every=1)
    diverged = flags(data=text_file, out="diverged", norm="none", lr=1e30, warmup_steps=0, steps=20)
    results = jobs(
        tmp_path,
        asked=(2, endless, ("asked", 1, signal.SIGTERM)),
        killed=(2, killed, ("killed", 1, signal.SIGKILL)),
        diverged=(2, diverged, None),
    )
    assert results["asked"][0] == [128 + signal.SIGTERM] * 2
    assert "stopped at step" in said(tmp_path, "asked", 0, "out") and said(tmp_path, "asked", 1, "out") == ""
    assert results["killed"][0] == [1, -signal.SIGKILL] and results["killed"][1] < 30
    err = said(tmp_path, "killed", 0, "err")
    assert err.startswith("error: another process of this job is gone (") and err.count("\n") == 1, err
    for run in ("asked", "killed"):
        steps = [record["step"] for record in records(tmp_path / run)]
        assert steps == list(range(1, len(steps) + 1))
        assert checkpoint.load_model(tmp_path / run).config.n_layers == 2
    assert results["diverged"][0] == [1, 1]
    assert all("the run diverged" in said(tmp_path, "diverged", rank, "err") for rank in range(2))


def torchrun(*arguments) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


def test_two_machines_go_on_by_themselves_when_one_loses_its_process(tmp_path, text_file):
    """Two of torchrun's agents, with the README's command. The last words of a job that fails are its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = ["--nnodes", 2, "--nproc_per_node", 1, "--max-restarts", 3, "--rdzv_backend", "c10d"]
    machines += ["--rdzv_id", "job", "--rdzv_endpoint", f"127.0.0.1:{port}", ROOT / "train.py", "--resume", "auto"]
    settings = {"steps": 600, "save_every": 10, "log_every": 10, "eval_every": 200, "probe_every": 1000}
    command = torchrun(*machines, *flags(data=text_file, out="r", **settings))
    agents = []
    for number in range(2):
        with open(tmp_path / f"{number}.log", "w", encoding="utf-8") as log:
            agents.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log))
    try:
        while not (tmp_path / "r" / "last").exists() or int((tmp_path / "r" / "last").read_text("utf-8")) < 100:
            assert all(agent.poll() is None for agent in agents)
            time.sleep(0.05)
        worker = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(worker[0]), signal.SIGKILL)
        assert [agent.wait(timeout=90) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.terminate()
    logs = [(tmp_path / f"{number}.log").read_text("utf-8") for number in range(2)]
    begun = [int(step.replace(",", "")) for log in logs for step in re.findall(r"steps +([\d,]+) of 600 done", log)]
    assert sorted(begun)[0] == 0 and 100 <= sorted(begun)[1] < 600 and len(begun) == 2
    assert [record["step"] for record in records(tmp_path / "r")] == [1, *range(10, 601, 10)]


def test_the_last_words_of_a_job_are_those_of_the_process_that_failed(tmp_path, text_file):
    command = torchrun("--standalone", "--nproc_per_node", 2, ROOT / "train.py")
    command += flags(data=text_file, out="r", norm="none", lr=1e30, warmup_steps=0)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "the run diverged (step" in result.stderr.partition("Root Cause")[2]


def test_the_environment_of_torchrun_is_read(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert world() is ALONE
    for name, value in {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        assert world() is ALONE
        monkeypatch.setenv(name, str(value))
    assert world() == World(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize(
    "batch_size, micro, processes, expected", [(12, None, 1, 12), (12, None, 4, 3), (12, 2, 3, 2), (12, 3, 2, 3)]
)
def test_the_rows_of_a_forward_pass(batch_size, micro, processes, expected):
    config = toy_config(batch_size=batch_size, micro_batch_size=micro)
    assert config.micro_size(processes) == expected
