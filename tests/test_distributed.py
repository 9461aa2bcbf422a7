"""Several processes: real ones, over gloo on the loopback address."""

import json
import os
import re
import signal
import socket
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from toys import KINDS, ROOT, TOY_RUN, as_flags, call, records, toy_config, toy_model, toy_tokens

import train
from gpt.config import Mistake
from gpt.loss import NextToken
from gpt.training import checkpoint, device, distributed
from gpt.training.device import Compute
from gpt.training.distributed import ALONE, World, world

pytestmark = [
    pytest.mark.skipif(os.name == "nt" or not torch.distributed.is_available(), reason="forks, with gloo"),
    pytest.mark.usefixtures("quick"),
]
STEPS = 3
SETTINGS = {"steps": STEPS, "lr": 2e-3, "min_lr": 2e-3, "batch_size": 8, "eval_every": 2, "probe_every": 2}
SETTINGS |= {"adam_eps": 1e-3}  # large, or else Adam makes much of rounding where gradients are tiny
# Runs by name: replicas for each kind of placement; shards for those that differ in what is sharded, and in
# micro-batches.
TOGETHER = {placement: {"norm": placement} for placement in KINDS}
TOGETHER |= {
    f"{placement} sharded": {"norm": placement, "shard": True} for placement in ("pre", "post", "rezero", "mhc")
}
TOGETHER |= {"adamw sharded": {"optimizer": "adamw", "shard": True, "micro_batch_size": 2}}


def flags(**settings) -> list[str]:
    return as_flags(TOY_RUN | SETTINGS | {"data": "text.txt"} | settings)


# Takes several command lines, each with the port where its processes meet, and trains by one after the other.
SEVERAL = """
def several(lines, main=train.main):
    for port, words in map(json.loads, lines):
        os.environ["MASTER_PORT"] = str(port)
        try:
            main(words)
        except SystemExit as exit:
            if exit.code:
                raise

train.main = several
"""

# Lets torchrun's agent fork its workers, which else import everything again.
FORKING = """
from torch.distributed import run as launcher
from torch.distributed.launcher.api import elastic_launch

def worker(*words):
    try:
        train.main([*words])
    except SystemExit as exit:
        if exit.code:
            raise

def main(words):
    arguments = launcher.parse_args(["--start-method", "fork", *words])
    elastic_launch(launcher.config_from_args(arguments)[0], worker)(*arguments.training_script_args)

launcher.main = main
"""

# Ends this process after its first step.
FAILS = """
from gpt.training.distributed import World

def largest(self, value):
    raise MemoryError("the last straw")

World.largest = largest
"""

# Sends this process SIGTERM when all have just agreed to go on.
LATE = """
from gpt.training.distributed import World

def largest(self, value, largest=World.largest):
    agreed = largest(self, value)
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
    return agreed

World.largest = largest
"""


class Jobs:
    """Jobs of several processes, as torchrun would start them, in one folder. This process holds the stores by which
    they meet, each at a free port."""

    def __init__(self, folder, forks):
        self.folder, self.forks, self.stores = folder, forks, []
        forks.ask("import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict")

    def port(self) -> int:
        """Where the processes of a job can meet."""
        self.stores.append(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return self.stores[-1].port

    def start(self, *commands, preludes=None):
        """One process for each command's words."""
        size, port = len(commands), self.port()
        return [
            self.forks.start(
                "train", *words, cwd=self.folder, prelude=(preludes or {}).get(rank, ""),
                RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=True,
            )
            for rank, words in enumerate(commands)
        ]  # fmt: skip

    def run(self, runs: dict):
        """Two processes that train these runs, settings by name, one after the other; only the first speaks."""
        lines = [json.dumps([self.port(), flags(out=name, **settings)]) for name, settings in runs.items()]
        processes = self.start(lines, lines, preludes={0: SEVERAL, 1: SEVERAL})
        for rank, process in enumerate(processes):
            assert process.wait(seconds=180) == 0, process.err
            assert rank == 0 or process.out == "" == process.err
        return processes[0]

    def alone(self, name, **settings):
        """The folder of a run that this process trains alone."""
        run = self.folder / f"{name} alone"
        data = {"data": str(self.folder / "text.txt")}
        train.train(toy_config(**SETTINGS | data | settings), str(run))
        return run


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, forks):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text.txt").write_text("".join(f"{i}: norm {i * 7919 % 101}\n" for i in range(400)), encoding="utf-8")
    return Jobs(folder, forks)


def assert_close(one, other):
    """Two runs that differ by rounding: everything they wrote down, and all tensors of their last checkpoints."""
    for file in ("metrics.jsonl", "steps.jsonl", "probe.jsonl"):
        pairs = list(zip(records(one, file), records(other, file), strict=True))
        for a, b in pairs:
            assert a.keys() == b.keys() and a["step"] == b["step"]
            assert all(a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6) for key in a), (a, b)
        assert file == "probe.jsonl" or max(abs(a["loss"] - b["loss"]) for a, b in pairs) < 1e-5
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors, others = (load_file(checkpoint.find(run, "last") / name) for run in (one, other))
        assert tensors.keys() == others.keys()
        for key in tensors:
            assert torch.allclose(tensors[key], others[key], atol=1e-5), (name, key)


@pytest.fixture(scope="module")
def together(jobs):
    first = jobs.run(TOGETHER)
    assert first.out.count("2 processes, replicas; cpu") == len(KINDS) and first.err == ""
    assert first.out.count("2 processes, shards; cpu") == len(TOGETHER) - len(KINDS)
    return jobs.folder


@pytest.mark.parametrize("name", TOGETHER)
def test_the_result_does_not_depend_on_the_number_of_processes(jobs, together, name):
    """Nor on shards, on the optimizer and on micro-batches."""
    settings = TOGETHER[name] | {"shard": False, "micro_batch_size": None}
    assert_close(jobs.alone(name, **settings), together / name)


def test_each_process_drops_units_of_its_own(jobs):
    """On a text of one letter, where all rows are the same: without dropout two processes with four rows each have the
    loss of one process with four rows, and with dropout another."""
    (jobs.folder / "a.txt").write_text("a" * 4000, encoding="utf-8")
    settings = {"data": str(jobs.folder / "a.txt"), "steps": 1, "warmup_steps": 0}
    runs = {f"dropout {share}": settings | {"dropout": share} for share in (0.0, 0.5)}
    jobs.run(runs)
    differences = [
        abs(records(jobs.folder / name)[0]["loss"] - records(jobs.alone(name, **runs[name], batch_size=4))[0]["loss"])
        for name in runs
    ]
    assert differences[0] < 1e-5 and differences[1] > 1e-3, differences


def test_a_run_goes_on_with_another_number_of_processes(jobs):
    """Begun on two, resumed on one and then on four."""
    settings = {"micro_batch_size": 1, "warmup_steps": 0, "eval_every": 1}
    jobs.run({"resumed": settings | {"steps": 1, "shard": True}})
    (one,) = jobs.start(["--resume", "--out", "resumed", "--steps", "2"])
    assert one.wait() == 0 and one.err.startswith("warning: ") and one.err.count("\n") == 1
    assert "(1 process)" in one.err and "torchrun" in one.err  # nothing is sharded
    first, *_ = four = jobs.start(*[["--resume", "--out", "resumed", "--steps", str(STEPS), "--no-shard"]] * 4)
    assert [process.wait() for process in four] == [0] * 4 and "4 processes, replicas; cpu" in first.out
    assert_close(jobs.alone("resumed", **settings), jobs.folder / "resumed")


TIED = """
from gpt.blocks import BLOCKS, PreLN

class Tied(PreLN):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.attn_again = self.attn

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x)) + self.attn_again(self.mlp_norm(x))
        return x + self.mlp(self.mlp_norm(x))

BLOCKS["tied"] = Tied
"""


def test_a_weight_of_two_names_goes_on_as_if_never_stopped(jobs):
    def train_by_two(*words):
        for process in jobs.start([*words], [*words], preludes={0: TIED, 1: TIED}):
            assert process.wait() == 0, process.err

    train_by_two(*flags(out="tied", norm="tied", save_every=1, keep=9))
    whole = jobs.folder / "tied" / f"step-{STEPS:06d}"
    before = {path.name: path.read_bytes() for path in whole.glob("*.safetensors")}
    assert {"blocks.0.attn.qkv.weight", "blocks.0.attn_again.qkv.weight"} <= load_file(
        whole / "model.safetensors"
    ).keys()
    train_by_two("--resume", "--out", "tied", "--checkpoint", 1)
    assert {path.name: path.read_bytes() for path in whole.glob("*.safetensors")} == before


def test_a_mistake_is_one_line_of_every_process_and_nothing_hangs(jobs):
    """Before the processes have met; when all have; of the first, which alone makes the folder."""
    (jobs.folder / "foreign").mkdir()
    (jobs.folder / "foreign" / "x").touch()
    for settings, words in (
        ({"batch_size": 7, "out": "r"}, ["(7)", "6 or 8"]),
        ({"data": "nowhere.txt", "out": "r"}, ["nowhere.txt"]),
        ({"out": "foreign"}, ["foreign)", "--out"]),
    ):
        for process in jobs.start(*[flags(**settings)] * 2):
            assert process.wait() == 2 and process.err.startswith("error: ") and process.err.count("\n") == 1
            assert all(word in process.err for word in words), process.err
    assert not (jobs.folder / "r").exists() and os.listdir(jobs.folder / "foreign") == ["x"]


def test_a_loss_that_is_not_finite_ends_all(jobs):
    for process in jobs.start(*[flags(out="diverged", norm="none", lr=1e30, warmup_steps=0)] * 2):
        assert process.wait() == 1 and process.err.startswith("error: ") and "--lr" in process.err


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_that_one_process_is_asked_for_is_one_of_all(jobs, late):
    """Also if it is asked when all have just agreed to go on."""
    out = f"stopped-{late}"
    first, second = jobs.start(*[flags(out=out, steps=10**6, save_every=1)] * 2, preludes={1: LATE} if late else {})
    if not late:
        second.wait(until=(jobs.folder / out / "last").exists)
        os.kill(second.pid, signal.SIGTERM)
    assert [first.wait(), second.wait()] == [128 + signal.SIGTERM] * 2, first.err + second.err
    assert f"torchrun --nproc_per_node 2 train.py --resume --out {out}" in first.out and second.out == ""
    steps = [record["step"] for record in records(jobs.folder / out)]
    assert steps == [*range(1, len(steps) + 1)]
    assert checkpoint.read_state(checkpoint.find(jobs.folder / out, "last"))[0]["step"] == steps[-1]


def test_processes_that_differ_are_refused(jobs):
    """In a setting, or in whether they go on with a run or delete it."""
    jobs.alone("there", steps=1, warmup_steps=0)
    there = flags(out="there alone", warmup_steps=0)
    setting = jobs.start(flags(out="new", seed=1), flags(out="new", seed=2))
    way = jobs.start([*there, "--resume", "auto"], [*there, "--overwrite"])
    for first, second in (setting, way):
        assert first.wait() and second.wait() == 2 and f"({jobs.folder / 'text.txt'})" in second.err, second.err
    assert not (jobs.folder / "new").exists() and (jobs.folder / "there alone" / "last").exists()


def test_a_process_that_is_lost_is_noticed(jobs):
    first, second = jobs.start(*[flags(out="killed", steps=10**6, save_every=1)] * 2)
    second.wait(until=(jobs.folder / "killed" / "last").exists)
    assert second.kill(signal.SIGKILL) == -signal.SIGKILL and first.wait() == 1
    assert first.err.startswith("error: another process of this job") and first.err.count("\n") == 1, first.err
    steps = [record["step"] for record in records(jobs.folder / "killed")]
    assert steps == [*range(1, len(steps) + 1)]
    assert checkpoint.load_model(jobs.folder / "killed").config.n_layers == 2


def test_the_process_that_failed_speaks_before_the_others(jobs):
    """In an earlier second: torchrun repeats the first words of a job, and tells no smaller times apart."""
    preludes = [f"os.environ['TORCHELASTIC_ERROR_FILE'] = '{rank}.json'\n" for rank in range(2)]
    processes = jobs.start(*[flags(out="failed")] * 2, preludes={0: preludes[0], 1: preludes[1] + FAILS})
    assert [process.wait() for process in processes] == [1, 1]
    survivor, failed = (json.loads((jobs.folder / f"{rank}.json").read_text("utf-8"))["message"] for rank in range(2))
    assert "the last straw" in failed["message"] and "another process" in survivor["message"]
    assert int(failed["extraInfo"]["timestamp"]) < int(survivor["extraInfo"]["timestamp"])


@pytest.fixture(scope="module")
def torchrun(forks):
    """Start one of torchrun's agents: torchrun(words, cwd=folder)."""
    forks.ask("import torch.distributed.run")
    return lambda words, **how: forks.start("torch.distributed.run", *words, **how)


def test_two_machines_go_on_by_themselves_when_one_loses_its_process(here, torchrun):
    """Two agents, with the command of docs/bigger.md."""
    (line,) = re.findall(r"^TORCH_.*--nnodes 2.*$", (ROOT / "docs" / "bigger.md").read_text("utf-8"), re.M)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = line.replace("--nproc_per_node 8", "--nproc_per_node 1").replace("HOST:29500", f"127.0.0.1:{port}")
    setting, program, *words = line.replace(" train.py configs/gpt2.toml", f" {ROOT / 'train.py'}").split()
    assert program == "torchrun" and words[-4:] == ["--out", "runs/big", "--resume", "auto"]
    words += flags(out="r", steps=100, save_every=10, log_every=10, eval_every=100, probe_every=1000)
    agents = [torchrun(words, cwd=here, prelude=FORKING, **dict([setting.split("=")])) for _ in range(2)]
    try:
        saved = here / "r" / "last"
        ended = agents[1].wait(until=lambda: saved.exists() and int(saved.read_text("utf-8") or 0) >= 20)
        assert ended is None, agents[1].err
        worker = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(worker[0]), signal.SIGKILL)
        assert [agent.wait() for agent in agents] == [0, 0], agents[0].err
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill(signal.SIGTERM)
    begun = [int(step) for agent in agents for step in re.findall(r"steps +(\d+) of 100 done", agent.out)]
    assert sorted(begun)[0] == 0 and 20 <= sorted(begun)[1] < 100 and len(begun) == 2
    assert [record["step"] for record in records(here / "r")] == [1, *range(10, 101, 10)]


def test_the_last_words_of_a_job_are_those_of_the_process_that_failed(here, torchrun):
    agent = torchrun(["--standalone", ROOT / "train.py", "--steps", 0], cwd=here)
    assert agent.wait() == 1 and "steps is out of range (0)" in agent.err.partition("Root Cause")[2]


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # on a stream that is captured
@pytest.mark.parametrize("mistake, value", [(["--steps", 0], "(0)"), (["--norm", "none", "--lr", 1e30], "nan")])
def test_torchrun_is_told_of_mistakes_and_of_failures(here, monkeypatch, capsys, mistake, value):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "error.json"))
    status, _, err = call(train, *flags(warmup_steps=0), *mistake, capsys=capsys)
    assert status in (1, 2) and value in err
    assert value in json.loads((here / "error.json").read_text("utf-8"))["message"]["message"]


@pytest.mark.parametrize(
    "weight",
    [torch.ones(()), torch.ones(2, 3).t(), torch.ones(3, dtype=torch.float64), None],
    ids=lambda w: str(w)[:20],
)
def test_a_weight_that_cannot_be_split_is_named(weight):
    """None stands for a weight of two names."""
    block = (model := toy_model()).blocks[1]
    block.odd = block.mlp.up.weight if weight is None else torch.nn.Parameter(weight)
    with pytest.raises(Mistake, match=r"\(blocks\.1\.(odd|mlp\.up\.weight): .*--shard"):
        distributed.shard(model)


def test_shards_want_a_format_without_a_scaler(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: World(size=2, local_size=2))
    monkeypatch.setattr(device, "choose", lambda *arguments: Compute("cuda", "float16", "off"))
    with pytest.raises(Mistake, match=r"--shard .*\(float16\).*--dtype float32"):
        train.train(toy_config(shard=True))


LAUNCHED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
LAUNCHED |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
IMPOSSIBLE = {name: None for name in [*LAUNCHED][2:]} | {"RANK": "8", "WORLD_SIZE": "4", "LOCAL_RANK": "x"}


@pytest.mark.parametrize(
    "name, value", [*IMPOSSIBLE.items(), ("LOCAL_RANK", None), ("RANK", "-1"), ("MASTER_PORT", "x")]
)
def test_an_environment_of_processes_that_cannot_meet(monkeypatch, name, value):
    for variable, number in (LAUNCHED | {name: value or ""}).items():
        monkeypatch.setenv(variable, number)
    with pytest.raises(Mistake, match=rf"\b{name}={value or ''}[,)].*torchrun.*WORLD_SIZE"):
        world()


def test_the_environment_of_torchrun_is_read(monkeypatch):
    assert world() is ALONE
    for alone in ({"RANK": "0"}, {"WORLD_SIZE": "8"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}):
        with monkeypatch.context() as patch:
            for name, value in alone.items():
                patch.setenv(name, value)
            assert world() is ALONE
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    for restarts, shared in (("0", "True"), ("3", "False")):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        assert world() == World(rank=5, size=8, local_rank=1, local_size=4)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(Mistake, match=r"\(--max-restarts 3\).*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        world()


@pytest.mark.parametrize(
    "batch_size, micro, processes, expected", [(12, None, 1, 12), (12, None, 4, 3), (12, 2, 3, 2), (12, 3, 2, 3)]
)
def test_the_rows_of_a_forward_pass(batch_size, micro, processes, expected):
    config = toy_config(batch_size=batch_size, micro_batch_size=micro)
    assert config.micro_size(processes) == expected


@pytest.mark.parametrize(
    "batch_size, micro, message",
    [(7, None, r"2 processes \(7\).* 6 or 8"), (1, None, r"2 processes \(1\).* 2"), (8, 8, r"\(8 and 4\).* 1, 2 or 4")],
)
def test_rows_that_cannot_be_shared_out(batch_size, micro, message):
    with pytest.raises(Mistake, match=message):
        toy_config(batch_size=batch_size, micro_batch_size=micro).micro_size(2)


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
    net = distributed.replicated(NextToken(model), "cpu")
    net.register_comm_hook(None, count)
    for number in range(3):
        with distributed.exchanging(model, net, last=number == 2):
            net(tokens).backward()
    assert set(exchanges) == {2}
    model = toy_model()
    distributed.shard(model)
    net = NextToken(model)
    for number in range(3):
        with distributed.exchanging(model, net, last=number == 2):
            net(tokens).backward()
        assert all((p.grad is not None) == (number == 2) for p in model.parameters())
