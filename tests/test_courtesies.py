"""What nobody's work depends on does not end it: the screen, a picture, TensorBoard's events."""

import os
import warnings

import pytest
from toys import TOY_RUN, as_flags, call, records

import probe
import train
from gpt.training import checkpoint

FLAGS = [*as_flags(TOY_RUN), "--data", "text.txt", "--steps", 6, "--out", "r"]
posix = pytest.mark.skipif(os.name == "nt", reason="devices and names of POSIX")


def whole(run) -> bool:
    """Whether the run was trained and logged to its end."""
    return checkpoint.find(run, "last").name == "step-000006" and records(run)[-1]["step"] == 6


@posix
def test_training_goes_on_without_a_screen(here, forks):
    process = forks.start("train", *FLAGS, cwd=here, out="/dev/full")
    assert process.wait() == 0 and whole(here / "r")
    assert process.err.count("\n") == 1 and "No space left" in process.err
    both = forks.start("train", *FLAGS, "--overwrite", cwd=here, out="/dev/full", err="/dev/full")
    assert both.wait() == 0 and whole(here / "r")


@posix
def test_training_goes_on_when_its_reader_is_gone(here, forks):
    os.mkfifo(here / "pipe")
    reader = os.open(here / "pipe", os.O_RDWR)
    process = forks.start("train", *FLAGS, cwd=here, out=here / "pipe")
    os.read(reader, 10)
    os.close(reader)
    assert process.wait() == 0 and whole(here / "r") and process.err.count("\n") <= 1


def test_what_is_asked_for_and_cannot_be_written_is_a_failure(here, forks):
    assert forks.start("train", *FLAGS, cwd=here).wait() == 0
    process = forks.start("sample", "r", "--max-new-tokens", 9, cwd=here, out="/dev/full")
    assert process.wait() == 1 and process.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("settings", ["text.usetex: True", "font.family: none\nsavefig.format: nonsense\ntoolbar"])
def test_pictures_do_not_depend_on_a_users_settings(here, settings):
    import matplotlib

    (here / "matplotlibrc").write_text(settings, encoding="utf-8")
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        matplotlib.rcParams.update({"text.usetex": True, "axes.prop_cycle": "cycler('marker', ['o', 's'])"})
        matplotlib.rc_file(here / "matplotlibrc")
        train.train(train.configure({**TOY_RUN, "data": "text.txt", "steps": 4}), "r")
    assert (here / "r" / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("error", [RuntimeError("no LaTeX"), OSError(28, "No space left on device")])
def test_a_picture_that_fails_is_one_warning(here, monkeypatch, capsys, error):
    from gpt.study import plots

    def broken(*arguments, **settings):
        raise error

    monkeypatch.setattr(plots.Figure, "savefig", broken)
    monkeypatch.setattr(train.time, "monotonic", iter(range(10**6)).__next__)  # a picture is due at each evaluation
    status, out, err = call(train, *FLAGS, capsys=capsys)
    assert status == 0 and whole(here / "r") and not (here / "r" / "curve.png").exists()
    assert [line for line in err.splitlines() if "curve.png" in line] == err.splitlines() and err.count("\n") == 1
    assert not list((here / "r").glob("*.new"))


@posix
def test_names_that_are_not_utf8(here, forks):
    text, run = os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"r\xe9")
    try:
        os.rename(here / "text.txt", here / text)
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    process = forks.start("train", *FLAGS, "--data", text, "--out", run, cwd=here, quick=False)
    assert process.wait() == 0 and process.err == "" and whole(here / run)
    assert (here / run / "curve.png").exists()
    assert forks.start("train", "--resume", "--out", run, "--steps", 8, cwd=here).wait() == 0
    assert forks.start("sample", run, "--max-new-tokens", 9, cwd=here).wait() == 0


def test_events_that_cannot_be_written_are_one_warning(here, monkeypatch, capsys):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def broken(*arguments, **settings):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", broken)
    status, out, err = call(train, *FLAGS, "--tensorboard", capsys=capsys)
    assert status == 0 and whole(here / "r") and err.count("\n") == 1 and "TensorBoard" in err


def test_a_probe_without_its_picture_prints_its_numbers(here, monkeypatch, capsys):
    from gpt.study import plots

    def broken(*arguments, **settings):
        raise RuntimeError("no LaTeX")

    monkeypatch.setattr(plots.Figure, "savefig", broken)
    status, out, err = call(probe, "pre", "--n-layers", 2, "--d-model", 16, "--out", "x.png", capsys=capsys)
    assert status == 0 and "stream" in out and "x.png" in err and err.count("\n") == 1
