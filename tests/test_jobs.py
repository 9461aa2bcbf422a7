"""Several processes do one comparison: each run once, none lost, the same results as by one process."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_compare import outcomes
from toys import TOY_RUN, as_flags, call

import compare
from gpt.config import Mistake
from gpt.files import read_lines
from gpt.study import results
from gpt.training import jobs

RUN = TOY_RUN | {"steps": 16, "eval_every": 16, "save_every": 4, "keep": 1, "seed": 7, "dropout": 0.1}
FLAGS = [*as_flags(RUN), "--data", "text.txt", "--rates", "0.01", "0.02", "--seeds", "1"]


@pytest.fixture
def alone(here, capsys, quick, monkeypatch) -> dict:
    """The outcomes of a comparison by one process, without pictures."""
    monkeypatch.setattr(results, "_draw", lambda *arguments: None)
    assert call(compare, "pre", "post", *FLAGS, "--jobs", 1, "--out", "alone", capsys=capsys)[0] == 0
    return outcomes(Path("alone"))


def began() -> set[str]:
    return {path.parent.name for path in Path("c").glob("*/metrics.jsonl")}


@pytest.mark.skipif(os.name == "nt", reason="forks, as POSIX does")
def test_four_processes_of_which_one_is_killed_and_one_is_late(alone, here, forks):
    """The killed one's run is taken over from its checkpoint; all write the same table."""
    command = ["compare", "pre", "post", *FLAGS, "--jobs", 1, "--out", "c"]
    how = {"cwd": here, "prelude": "import gpt.study.results as r; r._draw = lambda *arguments: None"}
    first = [forks.start(*command, **how) for _ in range(3)]
    assert first[0].wait(until=lambda: any(Path("c").glob("*/step-*"))) is None
    first[0].kill(signal.SIGKILL)
    helpers = [*first[1:], forks.start(*command, **how)]
    assert [helper.wait() for helper in helpers] == [0, 0, 0], [helper.err for helper in helpers]
    assert outcomes() == alone and len(alone) == 6
    lines = [line.split() for helper in helpers for line in helper.out.splitlines()]
    steps = [(line[0], line[2]) for line in lines if line[1:2] == ["step"]]
    assert len(steps) == len(set(steps))  # no step was done twice by those that lived
    assert all(not helper.err and "| `post`" in helper.out for helper in helpers)
    assert all(path.name.startswith(".") for path in Path("c").iterdir() if path.suffix == ".lock")


def processes_in(folder: Path) -> list[int]:
    """The processes that work in a folder, as /proc tells."""
    places = Path("/proc").glob("[0-9]*/cwd")
    return [int(place.parent.name) for place in places if os.path.realpath(place) == str(folder)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signum, count", [(None, 2), (signal.SIGTERM, 3), (signal.SIGKILL, 2)])
def test_the_processes_of_jobs_end_with_the_one_that_started_them(here, forks, signum, count):
    """However it ends; and with the same results."""
    (here / "work").mkdir()
    steps = "100000" if signum else "4"
    flags = [*FLAGS, "--data", str(here / "text.txt"), "--eval-every", steps, "--save-every", steps, "--steps", steps]
    process = forks.start("compare", "pre", "post", *flags, "--jobs", count, "--out", "c", cwd=here / "work")
    if signum:
        process.wait(until=lambda: len([*(here / "work").glob("c/*/steps.jsonl")]) == count)
        process.kill(signum)
    assert process.wait() == {None: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[signum] and process.err == ""
    deadline = time.monotonic() + 30
    while processes_in(here / "work") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_in(here / "work") == []
    if signum is None:
        assert len(outcomes(here / "work" / "c")) == 6
    if signum == signal.SIGTERM:  # each has saved the step that it was in
        for run in (here / "work" / "c").glob("*/last"):
            assert int(run.read_text("utf-8")) == read_lines(run.with_name("steps.jsonl"))[-1]["step"], run


def test_jobs_keep_the_cores_busy_and_no_more(monkeypatch):
    monkeypatch.setattr(jobs, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = [8]
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads[-1])
    assert jobs.share(None, 99, "cpu") == (8, 1) and jobs.share(None, 2, "cpu") == (2, 4)
    assert jobs.share(3, 99, "cpu") == (3, 2) and jobs.share(9, 2, "cpu") == (2, 4)
    assert jobs.share(None, 99, "mps")[0] == jobs.share(None, 99, "cuda:1")[0] == jobs.share(None, 0, "cpu")[0] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # which torch reads
    assert jobs.share(None, 99, "cpu") == (2, 4)
    monkeypatch.setattr(jobs, "cores", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert jobs.share(None, 99, "cpu") == (jobs.MOST, 64 // jobs.MOST)
    with pytest.raises(Mistake):
        jobs.share(0, 1, "cpu")


def test_each_process_has_a_gpu_of_those_that_are_visible(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [jobs.gpu(number) for number in (1, 2, 3)] == ["5", "2", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [jobs.gpu(number) for number in (1, 2, 3)] == ["1", "0", "1"]
