"""Every call to the file system fails once: the work ends well or in one line, and the next try ends in the same bits.

The calls are those of tests/failing.c, below the working folder, in a real process. The usual suite takes a few of
them; -m slow takes all, with each of six errors.
"""

import shutil
import subprocess
import sys

import pytest
from toys import ROOT, TOY_RUN, Forks, as_flags, records

ERRORS = ("ENOSPC", "EIO", "EACCES", "EINVAL", "ENOSYS", "EOPNOTSUPP")
FEW = 4  # calls of each command in the usual suite
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="wants Linux and a compiler")

RUN = [*as_flags(TOY_RUN | {"eval_every": 2, "save_every": 1, "probe_every": 2, "keep": 1}), "--data", "text.txt"]
TRAIN = ("train", "--out", "r", "--resume", "auto", *RUN)
# By name: what is done before, the command, and the same command for the next try.
COMMANDS = {
    "train": ([], (*TRAIN, "--steps", 4)),
    "resume": ([(*TRAIN, "--steps", 2)], (*TRAIN, "--steps", 4)),
    "prepare": (
        [],
        ("prepare", "text.txt", "--out", "p", "--tokenizer", "bytes", "--shard-tokens", 4000, "--workers", 1),
    ),
    "compare": ([], ("compare", "pre", "post", "--out", "c", "--seeds", 1, "--jobs", 1, *RUN, "--steps", 2)),
    "export": ([(*TRAIN, "--steps", 2)], ("gpt.pretrained", "export", "r", "e")),
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """Forks of a process with tests/failing.c in it."""
    folder = tmp_path_factory.mktemp("failing")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "failing.so", ROOT / "tests" / "failing.c"], check=True)
    forks = Forks(folder, LD_PRELOAD=str(folder / "failing.so"))
    yield forks
    forks.server.communicate()


class Work:
    """A command in folders of its own: what it makes, and how many calls it takes."""

    def __init__(self, forks, name: str, folder, text):
        self.forks, self.folder, self.text = forks, folder, text
        self.before, self.command = COMMANDS[name]
        log = folder / "log"
        cwd, process = self.run("whole", "fail_at(0, 0)", log)
        assert process.status == 0, process.err
        self.made, self.calls = self.products(cwd), log.read_text("utf-8").splitlines()

    def start(self, cwd, command, prelude="", log=""):
        quick = command[0] == "train" and not prelude  # the picture is drawn where a call of it may fail
        process = self.forks.start(command[0], *command[1:], cwd=cwd, prelude=prelude, quick=quick, FAILING_LOG=log)
        process.wait(seconds=60)
        return process

    def run(self, name: str, order: str, log=""):
        """The folder, and the command's process, which obeys an order as tests/failing.c takes them."""
        cwd = self.folder / name
        cwd.mkdir()
        shutil.copy(self.text, cwd / "text.txt")
        for command in self.before:
            assert self.start(cwd, command).status == 0
        arm = f"import ctypes, errno, os; ctypes.CDLL(None).{order.replace('(', '(os.getcwdb(), ')}"
        return cwd, self.start(cwd, self.command, arm, log)

    def products(self, cwd) -> dict:
        """By path: the bytes of weights and ids, the numbers of the lines."""
        files = {path.relative_to(cwd): path for path in sorted(cwd.rglob("*")) if path.is_file()}
        made = {path: file.read_bytes() for path, file in files.items() if path.suffix in (".safetensors", ".bin")}
        return made | {path: records(file.parent, file.name) for path, file in files.items() if path.suffix == ".jsonl"}

    def check(self, n: int, error: str):
        case = f"{n}: {self.calls[n - 1]} {error}"
        cwd, process = self.run(f"{n}-{error}", f"fail_at({n}, errno.{error})")
        lines = process.err.splitlines()
        assert process.status in (0, 1, 2), (case, process.err)
        errors = [line for line in lines if not line.startswith("warning: ")]
        assert len(errors) == (process.status > 0) and all(line.startswith("error: ") for line in errors), (case, lines)
        if process.status:
            again = self.start(cwd, self.command)
            assert again.status == 0, (case, process.err, again.err)
        made, hidden = self.products(cwd), [path for path in cwd.rglob(".*") if not path.name.endswith(".lock")]
        if "cannot delete" in process.err:  # what is old may stay
            made, hidden = {path: made[path] for path in self.made}, []
        assert made == self.made and hidden == [], (case, process.err, hidden)
        shutil.rmtree(cwd)


# A comparison does what training does, and takes longer.
PARAMETERS = [pytest.param(name, marks=pytest.mark.slow if name == "compare" else ()) for name in COMMANDS]


@pytest.fixture(scope="module", params=PARAMETERS)
def work(request, failing, tmp_path_factory) -> Work:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("\n".join(f"{i}: the norm of line {i * 7919 % 101}" for i in range(260)), encoding="utf-8")
    return Work(failing, request.param, tmp_path_factory.mktemp(request.param), text)


def test_some_failing_calls(work):
    numbers = range(1, len(work.calls) + 1, -(-len(work.calls) // FEW))
    for number, n in enumerate(numbers):
        work.check(n, ERRORS[number % len(ERRORS)])


@pytest.mark.parametrize("call, error", [("chmod", "EPERM"), ("flock", "ENOSYS"), ("flock", "ENOLCK")])
def test_a_file_system_without_modes_or_locks_will_do(work, call, error):
    if any(line.startswith(call) for line in work.calls):
        cwd, process = work.run(f"{call}-{error}", f"fail_all(b'{call}', errno.{error})")
        assert process.status == 0 and work.products(cwd) == work.made, process.err
        assert ("warning: no lock" in process.err) == (call == "flock") and "error" not in process.err


def test_a_file_system_without_fsync_will_do(work):
    cwd, process = work.run("fsync", "fail_all(b'fsync', errno.EINVAL)")
    assert process.status == 0 and work.products(cwd) == work.made, process.err


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_all_failing_calls(work, error):
    failures = []
    for n in range(1, len(work.calls) + 1):
        try:
            work.check(n, error)
        except AssertionError as failure:
            failures.append(str(failure).partition("\n")[0])
    assert not failures, "\n".join([f"{len(failures)} of {len(work.calls)} calls", *failures])
