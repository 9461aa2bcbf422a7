"""The fixtures of all tests, which shut out the folder, the environment and the home that they are started in."""

import os
import re
from pathlib import Path

import pytest
import torch

# Settings of torchrun, the hub's library, proxies, matplotlib, Python and terminals that the user's shell may have.
FOREIGN = "RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TORCHELASTIC_.*|HF_.*|.*_proxy|MPL.*|PYTHON(PATH|SAFEPATH|IOENCODING)"
FOREIGN += "|COLUMNS|LINES"
for variable in [name for name in os.environ if re.fullmatch(FOREIGN, name, re.IGNORECASE)]:
    del os.environ[variable]


@pytest.fixture(autouse=True, scope="session")
def nowhere(tmp_path_factory):
    """An empty folder to work in and an empty home, so that nothing of the user's is met."""
    home = tmp_path_factory.mktemp("home")
    os.environ |= {"HOME": str(home), "USERPROFILE": str(home), "MPLCONFIGDIR": str(home / "matplotlib")}
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("nowhere"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def text_file(tmp_path) -> Path:
    """Six kilobytes of text with some structure and some characters of several bytes."""
    path = tmp_path / "text.txt"
    lines = (f"{i}: the norm of line {i * 7919 % 101} is söme – {'ab' * (i % 5)}" for i in range(160))
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    return path


@pytest.fixture
def here(tmp_path, text_file, monkeypatch) -> Path:
    """A folder of its own to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Training without its picture and its closing sample, which take most of a short run's time."""
    import train

    monkeypatch.setattr(train, "draw", lambda *arguments: None)
    monkeypatch.setattr(train, "closing_sample", lambda *arguments: "")


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Starts scripts as processes: forks.start("train", "--steps", 8, cwd=folder)."""
    from toys import Forks

    if not hasattr(os, "fork"):
        pytest.skip("forks, as POSIX does")
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.server.communicate()
