import hashlib
import http.server
import socket
import threading

import numpy as np
import pytest
from toys import shared

from gpt.tokenizer import GPT2BPE, Bytes
from gpt.training import corpus


def as_bytes(path) -> bytes:
    return corpus.load(str(path), Bytes()).tobytes()


def test_python_docs_is_english_of_a_useful_size():
    ids = corpus.load("python-docs", Bytes())
    text = ids.tobytes().decode("utf-8")
    assert (
        len(ids) > 300_000 and text.count(" the ") > 2000 and np.array_equal(ids, corpus.load("python-docs", Bytes()))
    )


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
    "name, prepare, message",
    [
        ("nowhere.txt", None, r"no corpus of that name and no such file \(.*nowhere\.txt\)\. Known names: python-docs"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b""), r"the text is empty \(.*x\.txt\)"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b" \r\n\t\n"), "the text is empty"),
        ("x.txt", bad_utf8, r"not UTF-8 text \(.*x\.txt, byte 0xff at offset 3\)"),
        ("", bad_utf8, r"not UTF-8 text \(.*x\.txt"),
        ("", lambda f: (f / "x.md").write_text("no", encoding="utf-8"), "no .txt file in the folder"),
        ("", lambda f: (f / "x.txt").mkdir(), "no .txt file in the folder"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path, name, prepare, message):
    if prepare:
        prepare(tmp_path)
    with pytest.raises(ValueError, match=message):
        corpus.load(str(tmp_path / name), Bytes())


def test_no_name_is_not_the_working_folder(text_file, monkeypatch):
    monkeypatch.chdir(text_file.parent)
    with pytest.raises(ValueError, match="no corpus of that name"):
        corpus.load("", Bytes())


def test_a_corpus_has_a_name_for_folders(tmp_path):
    assert [corpus.name(data) for data in ("python-docs", "a/my.txt", str(tmp_path))] == [
        "python-docs", "my", tmp_path.stem,
    ]  # fmt: skip


TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server():
    """A web server on the loopback address that has one file, and counts how often it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = self.path == "/input.txt"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(TEXT if found else b"no")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
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


@pytest.mark.parametrize(
    "page, message",
    [
        ("/input.txt", "not the expected file"),
        ("/gone.txt", "cannot download .*Not Found.*Fetch it another way and save"),
    ],
)
def test_a_wrong_or_missing_download_leaves_nothing(server, tmp_path, monkeypatch, page, message):
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHAKESPEARE", (server[0] + page, "0" * 64))
    with pytest.raises(ValueError, match=message):
        corpus.load("shakespeare", Bytes())
    assert not (tmp_path / "cache").exists()


def test_no_network_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"cannot download \(http://127\.0\.0\.1:9/.*\)\. Fetch it"):
        corpus.download("http://127.0.0.1:9/input.txt", "0" * 64, tmp_path / "x")


def test_the_checksum_is_that_of_tiny_shakespeare():
    assert hashlib.sha256(shared("tinyshakespeare.txt").read_bytes()).hexdigest() == corpus.SHAKESPEARE[1]
