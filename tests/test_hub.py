"""Published weights by name: downloaded once; a folder of that name comes first."""

import functools
import http.server
import socket
import sys
import threading

import golden
import pytest
from toys import call, toy_model

import probe
import sample
import train
from gpt.config import Mistake
from gpt.pretrained import export, load, recognizes
from gpt.published import NAMES
from gpt.tokenizer import Bytes


class Hub(http.server.SimpleHTTPRequestHandler):
    """As much of huggingface.co as a download needs, for one repository: /OWNER/NAME/resolve/REVISION/FILE."""

    def translate_path(self, path):
        repository, _, file = path.partition("/resolve/")
        self.server.asked += [file] if file else []  # not what else the hub's library wants to know
        return super().translate_path(file.rpartition("/")[2] if repository == "/" + NAMES["gpt2"] else "nowhere")

    def end_headers(self):
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub on this machine whose gpt2 is a toy model of bytes: the environment that leads there, and what it is asked
    for."""
    export(toy_model(vocab_size=256), tmp_path / "hub", Bytes())
    handler = functools.partial(Hub, directory=tmp_path / "hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked = []
    try:
        socket.create_connection(server.server_address, timeout=5).close()
    except OSError:
        server.server_close()
        pytest.skip("the loopback interface is down")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": tmp_path / "cache"}
    yield environment | {"HF_HUB_DISABLE_PROGRESS_BARS": 1, "NO_PROXY": "*"}, server.asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_name_is_downloaded_once_and_then_needs_no_network(tmp_path, hub, forks):
    pytest.importorskip("huggingface_hub")
    (environment, asked), words = hub, ["--seed", 1, "--max-new-tokens", 9]
    missing = forks.start("sample", "gpt2-xl", cwd=tmp_path, **environment)
    first = forks.start("sample", "gpt2", *words, cwd=tmp_path, **environment)
    assert first.wait() == 0 and len(first.out) > 9, first.err
    assert missing.wait() == 2 and missing.out == "" and missing.err.count("\n") == 1, missing.err
    assert "gpt2-xl" in missing.err and NAMES["gpt2-xl"] in missing.err and "HF_ENDPOINT" in missing.err
    before = len(asked)
    full = forks.start("sample", NAMES["gpt2"], *words, cwd=tmp_path, **environment)
    assert full.wait() == 0 and full.out == first.out, full.err
    for endpoint in (environment["HF_ENDPOINT"], "http://127.0.0.1:9"):  # nothing listens at the second
        again = forks.start("sample", "gpt2", *words, cwd=tmp_path, **environment | {"HF_ENDPOINT": endpoint})
        assert again.wait() == 0 and again.out == first.out, again.err
    assert len(asked) == before > 0


def test_without_a_connection_a_name_is_refused_and_a_slow_one_is_awaited(here, monkeypatch):
    """The hub's library would try again, for half a minute."""
    hub, errors = (pytest.importorskip(f"huggingface_hub{part}") for part in ("", ".errors"))
    tried, missing = [], errors.LocalEntryNotFoundError("slow")

    def download(repository, file, local_files_only=False):
        tried.append(local_files_only)
        raise missing

    monkeypatch.setattr(hub, "hf_hub_download", download)
    for error, expected in (("ConnectError", [True]), ("ConnectionError", [True]), ("ReadTimeout", [True, False])):
        tried.clear()
        monkeypatch.setattr(hub, "get_hf_file_metadata", fails(type(error, (Exception,), {})("slow")))
        with pytest.raises(Mistake, match=r"gpt2 \(.*slow\).*HF_ENDPOINT"):
            load("gpt2")
        assert tried == expected


def fails(error):
    """A function that raises this error."""

    def function(*arguments):
        raise error

    return function


def test_without_the_hubs_library_a_folder_still_loads_and_a_name_says_how(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load(golden.folder(here / "w")).config.d_model == 12
    with pytest.raises(Mistake, match="gpt2.*pip install huggingface-hub"):
        load("gpt2")


def test_a_folder_is_read_as_a_folder_whatever_its_name(here):
    (here / "gpt2").mkdir()
    with pytest.raises(Mistake, match=r"gpt2.config\.json"):
        load("gpt2")
    assert not recognizes("gpt2")
    golden.folder(here / "gpt2")
    assert recognizes("gpt2") and load("gpt2").config.d_model == 12


@pytest.mark.parametrize(
    "name, meant", [("gtp2", "gpt2"), ("GPT2", "gpt2"), ("openai-comunity/gpt2", "openai-community/gpt2")]
)
def test_a_near_miss_is_taken_for_a_name(name, meant):
    assert recognizes(name)
    with pytest.raises(Mistake, match=rf"\({name}\).*{meant}\b"):
        load(name)


@pytest.mark.parametrize(
    "name", ["openai/gpt2", "microsoft/DialoGPT-medium", "distilbert/distilbert-base", "me/openai-gpt"]
)
def test_another_name_of_the_hub_is_told_how_to_become_a_folder(name, here, capsys):
    for script, arguments in ((sample, [name]), (probe, [name]), (train, ["--init", name])):
        status, out, err = call(script, *arguments, capsys=capsys)
        assert (status, out) == (2, "") and f"{name})" in err and f"hf download {name} --local-dir" in err
        assert "Did you mean" not in err and err.count("\n") == 1
    (here / name.partition("/")[0]).mkdir()
    assert not recognizes(name)  # a path into a folder that is there


def test_names_that_are_recognized():
    assert all(map(recognizes, [*NAMES, *NAMES.values()]))
    assert not any(map(recognizes, ["nowhere", "runs/mine", "gpt-neo", "a/b/c", "The dog " * 500, ""]))
