import hashlib
import http.server
import socket
import threading

import numpy as np
import pytest
from toys import ROOT

from gpt.config import Mistake
from gpt.tokenizer import GPT2BPE, Bytes
from gpt.training import corpus


def as_bytes(path) -> bytes:
    return corpus.load(str(path), Bytes()).tobytes()


def test_python_docs_is_english_of_a_useful_size():
    ids = corpus.load("python-docs", Bytes())
    text = ids.tobytes().decode("utf-8")
    assert len(ids) > 300_000 and text.count(" the ") > 2000
    assert np.array_equal(ids, corpus.load("python-docs", Bytes()))


@pytest.mark.parametrize("content", ["one\ntwo\n", "one\r\ntwo\r\n", "\ufeffone\rtwo", "héllo 😀\x00<|endoftext|>"])
def test_a_file_is_kept_byte_for_byte(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content.encode("utf-8"))
    assert as_bytes(tmp_path / "a.txt") == content.encode("utf-8")


def test_a_folder_is_its_txt_files_in_order_with_a_separator_between(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("sub/c.txt", "third"), ("notes.md", "not this")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert as_bytes(tmp_path) == b"first\n\nsecond\n\nthird"
    ids = corpus.load(str(tmp_path), GPT2BPE()).tolist()
    assert ids.count(50256) == 2 and ids[-1] != 50256 and ids[0] != 50256


def bad_utf8(folder):
    (folder / "x.txt").write_bytes(b"abc\xff")


@pytest.mark.parametrize(
    "name, make, message",
    [
        ("nowhere.txt", lambda f: None, r"nowhere\.txt.*python-docs, shakespeare"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b""), r"empty.*x\.txt"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b" \r\n\t\n"), r"empty.*x\.txt"),
        ("x.txt", bad_utf8, r"x\.txt.* 0xff .* 3\b.*UTF-8"),
        ("", bad_utf8, r"x\.txt.*UTF-8"),
        ("", lambda f: (f / "x.md").write_text("no", encoding="utf-8"), r"\.txt"),
        ("", lambda f: (f / "x.txt").mkdir(), r"\.txt"),
        ("x.jsonl", lambda f: (f / "x.jsonl").touch(), r"data/prepare\.py .*x\.jsonl"),
        ("x.txt.gz", lambda f: (f / "x.txt.gz").touch(), r"data/prepare\.py .*x\.txt\.gz"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path, name, make, message):
    make(tmp_path)
    with pytest.raises(Mistake, match=message):
        corpus.load(str(tmp_path / name), Bytes())


def test_no_name_is_not_the_working_folder(text_file, monkeypatch):
    monkeypatch.chdir(text_file.parent)
    with pytest.raises(Mistake, match="python-docs"):
        corpus.load("", Bytes())


def test_a_corpus_has_a_name_for_folders(tmp_path):
    names = {"python-docs": "python-docs", "a/my.txt": "my", str(tmp_path): tmp_path.stem}
    assert [corpus.name(data) for data in names] == list(names.values())


def test_a_path_is_the_same_corpus_from_any_folder(text_file, monkeypatch):
    monkeypatch.chdir(text_file.parent)
    data = corpus.resolve("text.txt")
    monkeypatch.chdir("/")
    assert as_bytes(data) == text_file.read_bytes()
    assert corpus.resolve("python-docs") == "python-docs"


TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server():
    """A web server on the loopback address that has one file, and counts how often it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, content = (200, TEXT) if self.path == "/input.txt" else (404, b"no")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            socket.create_connection(listening.server_address, timeout=5).close()
        except OSError:
            listening.shutdown()
            pytest.skip("the loopback interface is down")
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def test_shakespeare_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    address, asked = server
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHAKESPEARE", (f"{address}/input.txt", hashlib.sha256(TEXT).hexdigest()))
    assert as_bytes("shakespeare") == as_bytes("shakespeare") == TEXT
    assert asked == ["/input.txt"] and [path.name for path in (tmp_path / "cache").iterdir()] == ["shakespeare.txt"]


def test_shakespeare_is_kept_beside_the_projects_other_data():
    assert corpus.CACHE == ROOT / "data"  # which git ignores


@pytest.mark.parametrize(
    "page, message", [("/input.txt", hashlib.sha256(TEXT).hexdigest()), ("/gone.txt", r"Not Found.*shakespeare\.txt")]
)
def test_a_wrong_or_missing_download_leaves_nothing(server, tmp_path, monkeypatch, page, message):
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHAKESPEARE", (server[0] + page, "0" * 64))
    with pytest.raises(Mistake, match=message):
        corpus.load("shakespeare", Bytes())
    assert not (tmp_path / "cache").exists()


def test_without_network_the_address_and_the_place_for_the_file_are_named(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/input.txt"
        with pytest.raises(Mistake) as mistake:
            corpus.download(url, "0" * 64, tmp_path / "x")
    assert url in str(mistake.value) and str(tmp_path / "x") in str(mistake.value)
