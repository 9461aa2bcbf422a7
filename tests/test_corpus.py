import hashlib
import http.server
import os
import socket
import threading
from pathlib import Path

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


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "content", ["one\ntwo\n", "one\r\ntwo\r\n", "one\r\ufefftwo", "héllo 😀\x00<|endoftext|>", "a\0b"]
)
def test_a_file_is_kept_byte_for_byte_but_for_its_mark(tmp_path, mark, content):
    (tmp_path / "a.txt").write_bytes((mark + content).encode("utf-8"))
    assert as_bytes(tmp_path / "a.txt") == content.encode("utf-8")


@pytest.mark.parametrize("text", ["plain text", "простой текст, немного", "ein\nTèxt\n"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_named(tmp_path, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(Mistake, match=r"a\.txt.*UTF-16.*to UTF-8"):
        as_bytes(tmp_path)


def test_a_folder_is_its_txt_files_in_order_with_a_separator_between(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("sub/c.txt", "third"), ("notes.md", "not this")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert as_bytes(tmp_path) == b"first\n\nsecond\n\nthird"
    ids = corpus.load(str(tmp_path), GPT2BPE()).tolist()
    assert ids.count(50256) == 2 and ids[-1] != 50256 and ids[0] != 50256


def link(path, target):
    path.parent.mkdir(exist_ok=True)
    try:
        path.symlink_to(target)
    except OSError:
        pytest.skip("no symbolic links")


def put(path, text="no"):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


ODDITIES = [
    (lambda f: put(f / ".checkpoints" / "a-checkpoint.txt"), "1 hidden"),
    (lambda f: put(f / ".a.txt"), "1 hidden"),
    (lambda f: (put(f / "empty.txt", ""), put(f / "blank.txt", " \n")), "2 empty"),
    (lambda f: (put(f / "A.TXT"), put(f / "b.pdf")), "2 of another kind"),
    (lambda f: (f / "folder.txt").mkdir(), ""),
    (lambda f: link(f / "again.txt", f / "b.txt"), "1 linked twice"),
    (lambda f: link(f / "sub" / "loop", f), "1 linked twice"),
    (lambda f: link(f / "sub" / "loop.md", "loop.md"), "1 of another kind"),
]


@pytest.mark.parametrize("make, words", ODDITIES)
def test_what_is_passed_over_of_a_folder_is_said(tmp_path, make, words):
    for name, text in (("a.txt", "first"), ("b.txt", "second")):
        put(tmp_path / name, text)
    make(tmp_path)
    said = []
    assert corpus.load(str(tmp_path), Bytes(), said.append).tobytes() == b"first\n\nsecond"
    assert len(said) == 1 and "2 files" in said[0] and "11 bytes" in said[0] and words in said[0]
    assert ("passed over" in said[0]) == bool(words)


def test_folders_are_read_through_links_and_hidden_ones_if_they_are_named(tmp_path):
    put(tmp_path / ".hidden" / "a.txt", "text")
    link(tmp_path / "texts" / "linked", tmp_path / ".hidden")
    assert as_bytes(tmp_path / ".hidden") == as_bytes(tmp_path / "texts") == b"text"


def test_a_text_that_is_missing_behind_its_link_is_named(tmp_path):
    put(tmp_path / "a.txt", "text")
    link(tmp_path / "b.txt", "gone")
    with pytest.raises(Mistake, match=r"b\.txt"):
        as_bytes(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_what_is_no_file_is_not_waited_for(tmp_path):
    put(tmp_path / "a.txt", "text")
    os.mkfifo(tmp_path / "b.txt")
    assert as_bytes(tmp_path) == b"text"
    for path in (tmp_path / "b.txt", "/dev/zero"):
        with pytest.raises(Mistake, match=f"{path}.*as a file"):
            as_bytes(path)


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
@pytest.mark.parametrize("script", ["train", "prepare"])
@pytest.mark.parametrize("path", ["sub", "sub/b.txt"])
def test_what_may_not_be_read_is_named(forks, tmp_path, script, path):
    for name in ("a.txt", "sub/b.txt"):
        put(tmp_path / "texts" / name, "text")
    tmp_path.chmod(0o777)
    (tmp_path / "texts" / path).chmod(0)
    arguments = {"train": ["--data", "texts"], "prepare": ["texts", "--out", "p", "--workers", 1]}[script]
    # root may read all; a user who is not may not walk from / to here, so the path stays relative
    prelude = "gpt.training.corpus.resolve = str; os.getuid() or os.setuid(65534)"
    prelude = f"sys.path.append({str(ROOT / 'data')!r}); import prepare, gpt.training.corpus; {prelude}"
    process = forks.start(script, *arguments, cwd=tmp_path, prelude=prelude)
    assert process.wait() == 2 and path in process.err and process.err.count("\n") == 1, process.err
    assert not (tmp_path / "p").exists()
    (tmp_path / "texts" / path).chmod(0o700)  # or it could not be deleted


def bad_utf8(folder):
    (folder / "x.txt").write_bytes(b"abc\xff")


@pytest.mark.parametrize(
    "name, make, message",
    [
        ("nowhere.txt", lambda f: None, r"nowhere\.txt.*python-docs, shakespeare"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b""), r"empty.*x\.txt"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b" \r\n\t\n"), r"empty.*x\.txt"),
        ("x.txt", bad_utf8, r"x\.txt.* 0xff .* 3\b.*UTF-8"),
        ("x.txt", lambda f: (f / "x.txt").write_bytes(b"\xef\xbb\xbfa\xff"), r" 4\b"),
        ("", lambda f: (f / "x.txt").write_bytes(b" \n"), "empty"),
        ("x" * 300, lambda f: None, "xxx.*too long"),
        ("x\0y", lambda f: None, "x"),
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
    names = {"python-docs": "python-docs", "a/my.txt": "my", str(tmp_path): tmp_path.stem, "/": "corpus"}
    names |= {"é" * 120 + ".txt": "é" * 50, "a/..": Path.cwd().stem}
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
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append(self.path)
            self.close_connection = True
            self.send_response({"/gone.txt": 404, "/loop.txt": 302}.get(self.path, 200))
            for header in {"/cut.txt": ["Content-Length: 99"], "/chunk.txt": ["Transfer-Encoding: chunked"]}.get(
                self.path, []
            ):
                self.send_header(*header.split(": "))
            self.send_header("Location", self.path)
            self.end_headers()
            self.wfile.write({"/empty.txt": b"", "/chunk.txt": b"99\r\nFirst"}.get(self.path, TEXT))

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
    "page, message",
    [
        ("/input.txt", hashlib.sha256(TEXT).hexdigest()),
        ("/gone.txt", "Not Found"),
        ("/loop.txt", "loop.*Found"),
        ("/cut.txt", "61 bytes"),
        ("/chunk.txt", "IncompleteRead"),
        ("/empty.txt", " 0 bytes"),
    ],
)
def test_a_wrong_or_missing_download_leaves_nothing(server, tmp_path, monkeypatch, page, message):
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHAKESPEARE", (server[0] + page, "0" * 64))
    with pytest.raises(Mistake, match=rf"(?s){page}.*{message}.*shakespeare\.txt"):
        corpus.load("shakespeare", Bytes())
    assert not (tmp_path / "cache").exists()


def test_a_download_has_a_bound(server, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LARGEST", 9)
    with pytest.raises(Mistake, match="10 bytes, sha256"):
        corpus.download(f"{server[0]}/input.txt", "0" * 64, tmp_path / "x")


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_others_may_read_a_download_as_the_umask_says(server, tmp_path):
    before = os.umask(0o027)
    try:
        corpus.download(f"{server[0]}/input.txt", hashlib.sha256(TEXT).hexdigest(), tmp_path / "x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_download_that_cannot_be_kept_is_used(server, tmp_path, monkeypatch, capsys):
    put(tmp_path / "cache", "a file where the folder should be")
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus, "SHAKESPEARE", (f"{server[0]}/input.txt", hashlib.sha256(TEXT).hexdigest()))
    assert as_bytes("shakespeare") == TEXT and str(tmp_path / "cache") in capsys.readouterr().err


def test_without_network_the_address_and_the_place_for_the_file_are_named(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/input.txt"
        with pytest.raises(Mistake) as mistake:
            corpus.download(url, "0" * 64, tmp_path / "x")
    assert url in str(mistake.value) and str(tmp_path / "x") in str(mistake.value)
