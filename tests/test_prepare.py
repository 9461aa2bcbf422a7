"""data/prepare.py and the shards it writes: real files, real worker processes."""

import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ROOT, TOY_RUN, as_flags, call, python, toy_config

import train
from gpt.config import Failure, Mistake
from gpt.tokenizer import TOKENIZERS, Bytes
from gpt.training import corpus, shards
from gpt.training import workers as worker_processes
from gpt.training.data import Data

sys.path.append(str(ROOT / "data"))  # workers import it by its name too
import prepare  # noqa: E402

BPE = prepare.make_tokenizer("gpt2")
POSIX = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def prepared(out, *texts, tokenizer="bytes", workers=1, shard_tokens=5000, overwrite=False):
    """The ids of these files, prepared."""
    prepare.prepare(list(map(str, texts)), str(out), tokenizer, workers, shard_tokens, overwrite)
    return np.asarray(corpus.load(str(out), TOKENIZERS[tokenizer]()))


def written(folder, ids, tokenizer=None, size=7):
    """A prepared corpus of these ids."""
    tokenizer = tokenizer or Bytes()
    folder.mkdir()
    writer = shards.Writer(folder, tokenizer, size, {})
    writer.add(np.array(ids, tokenizer.dtype))
    writer.finish()
    return shards.read(folder, tokenizer)


def times(folder) -> dict[str, int]:
    """When each file of ids was last changed."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}


def whole(documents, tokenizer) -> list[int]:
    """The ids of documents that are each encoded whole."""
    parts = [[*tokenizer.separator, *tokenizer.encode(each).tolist()] for each in documents]
    return [i for part in parts for i in part][len(tokenizer.separator) :]


def blocks(text: str, size: int) -> list[str]:
    pieces = list(prepare.blocks(io.BytesIO(text.encode("utf-8")), size))
    assert [begins for begins, _ in pieces] == [i == 0 for i in range(len(pieces))]
    return [piece for _, piece in pieces]


spaces = st.text(alphabet=" \n\t\r\u00a0\u2028\x1c\x85", max_size=6)
words = st.one_of(st.text(max_size=6), st.sampled_from(["'s", "'ll", "don't", "<|endoftext|>", "123", "a" * 50, "é😀"]))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.lists(st.one_of(spaces, words), max_size=30).map("".join), st.integers(1, 20))
def test_a_cut_changes_no_id(text, size):
    text = text.encode("utf-8", "replace").decode("utf-8")
    pieces = blocks(text, size)
    assert "".join(pieces) == text and all(pieces)
    assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text).tolist()


@pytest.mark.parametrize("space", [" ", "\n", "\r\n", "\t"])
def test_a_text_is_cut_in_pieces_of_the_size_that_is_asked_for(space):
    pieces = blocks(f"one{space}two{space}three{space}" * 100, 100)
    assert len(pieces) > 10 and max(map(len, pieces)) < 120


def test_a_worker_gets_a_part_of_a_file_with_many_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK", 100)
    (tmp_path / "t.jsonl").write_text('{"text": "0123456789"}\n' * 500, encoding="utf-8")
    batches = [batch for batch, _ in prepare.batches([tmp_path / "t.jsonl"], {})]
    assert sum(map(len, batches)) == 500 and max(sum(len(text) for _, text in batch) for batch in batches) < 120


@pytest.fixture
def texts(tmp_path):
    """A folder with every kind of file, among them awkward ones, and its documents in order."""
    documents = {
        "a.txt": ["The first.\r\n\r\n  It's 1 text – söme 😀.\n" * 300],
        "b.jsonl": ["one", "two\n words", "x" * 30_000, " \n"],
        "c.txt.gz": ["y" * 20_000 + " " * 20_000 + "z"],
        "d/e.jsonl.gz": ["<|endoftext|>", "naïve"],
    }
    folder = tmp_path / "texts"
    (folder / "d").mkdir(parents=True)
    for name, parts in documents.items():
        text = "".join(json.dumps({"text": each, "id": 1}) + "\n\n" for each in parts) if "jsonl" in name else parts[0]
        with (gzip.open if name.endswith(".gz") else open)(folder / name, "wb") as file:
            file.write(text.encode("utf-8-sig"))
    (folder / "none.txt").touch()
    (folder / "space.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf \n"))
    (folder / ".hidden.txt").write_text("not this", encoding="utf-8")
    (folder / "notes.md").write_text("not this", encoding="utf-8")
    return folder, [each for parts in documents.values() for each in parts]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_shards_hold_the_ids_of_documents_encoded_whole(texts, tmp_path, monkeypatch, name):
    """From all kinds of files and in many batches, on one worker or two. The folder has nothing else."""
    monkeypatch.setattr(prepare, "BLOCK", 1000)
    folder, documents = texts
    tokenizer = TOKENIZERS[name]()
    expected = whole(documents, tokenizer)
    workers = {"bytes": 2, "gpt2": 1}[name]
    assert prepared(tmp_path / "p", folder, tokenizer=name, workers=workers).tolist() == expected
    meta = json.loads((tmp_path / "p" / "meta.json").read_text("utf-8"))
    assert meta["documents"] == len(documents) and meta["tokens"] == len(expected)
    assert meta["bytes"] == sum(len(each.encode("utf-8")) for each in documents)
    assert [shard["tokens"] for shard in meta["shards"][:-1]] == [5000] * (len(expected) // 5000)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"meta.json", ".lock", *(shard["name"] for shard in meta["shards"])}
    size = sum((tmp_path / "p" / shard["name"]).stat().st_size for shard in meta["shards"])
    assert size == len(expected) * np.dtype(tokenizer.dtype).itemsize


def test_the_command_says_what_it_made_and_overwrites_only_when_told(texts, tmp_path, capsys):
    out = tmp_path / "a corpus"
    written(out, range(33))
    mine = {"notes.md", "12345 measurements.bin", "00002.bin.txt", "00077.bin"}
    for name in mine:
        (out / name).touch()
    flags = [texts[0], "--tokenizer", "bytes", "--out", out, "--workers", 1]
    status, printed, err = call(prepare, *flags, capsys=capsys)
    assert status == 2 and printed == "" and "--overwrite" in err and len(corpus.load(str(out), Bytes())) == 33
    status, printed, err = call(prepare, *flags, "--overwrite", capsys=capsys)
    ids = np.asarray(corpus.load(str(out), Bytes()))
    assert status == 0 and f"{len(ids):,} tokens" in printed and f"--data '{out}' --tokenizer bytes" in printed, err
    assert all(words in printed for words in ("4 files", "8 documents", "1 hidden", "2 empty", "1 of another kind"))
    assert ids.tolist() == whole(texts[1], Bytes())
    shard = json.loads((out / "meta.json").read_text("utf-8"))["shards"][0]["name"]
    assert {path.name for path in out.iterdir()} == {shard, "meta.json", ".lock", *mine}


BAD = [b"", b" \n", b"\n" * 2**20 + b"abc\xff", "text".encode("utf-16"), "text".encode("utf-32-be")]


@pytest.mark.parametrize("content", BAD, ids=["empty", "blank", "late", "utf-16", "utf-32"])
def test_a_bad_text_leaves_the_old_corpus_and_a_good_one_takes_its_place(tmp_path, capsys, content):
    written(tmp_path / "p", range(33))
    (tmp_path / "t.txt").write_bytes(content)
    flags = [tmp_path / "t.txt", "--tokenizer", "bytes", "--out", tmp_path / "p", "--workers", 1, "--overwrite"]
    status, out, err = call(prepare, *flags, capsys=capsys)
    assert status == 2 and out == "" and "t.txt" in err
    assert np.asarray(corpus.load(str(tmp_path / "p"), Bytes())).tolist() == [*range(33)]
    (tmp_path / "t.txt").write_text("text", encoding="utf-8")
    assert call(prepare, *flags, capsys=capsys)[0] == 0
    assert np.asarray(corpus.load(str(tmp_path / "p"), Bytes())).tobytes() == b"text"
    assert len(list((tmp_path / "p").glob("*.bin"))) == 1


class Kill(BaseException):
    pass


@pytest.mark.parametrize("again", [1, 2], ids=["the same texts again", "other texts"])
def test_wherever_a_kill_comes_the_folder_has_the_old_corpus_or_the_new_one(tmp_path, monkeypatch, again):
    """And what is done then leaves no file of an older corpus."""
    ids = {0: range(33), 1: range(100, 140), 2: range(50, 70)}

    def write(folder, source):
        writer = shards.Writer(folder, Bytes(), 7, {"files": source}, overwrite=True)
        if writer.position == 0:
            writer.add(np.array(ids[source], np.uint8))
        writer.finish()

    def killed(function, left, *arguments, **keywords):
        if not left:
            raise Kill
        left.pop()
        return function(*arguments, **keywords)

    for count in itertools.count():
        folder, left = tmp_path / str(count), [None] * count
        folder.mkdir()
        write(folder, 0)
        dead = True
        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for name in ("replace", "unlink"):
                patch.setattr(os, name, functools.partial(killed, getattr(os, name), left))
            write(folder, 1)
            dead = False
        read = np.asarray(corpus.load(str(folder), Bytes())).tolist()
        assert read == [*ids[1]] or (dead and read == [*ids[0]])
        write(folder, again)
        assert np.asarray(corpus.load(str(folder), Bytes())).tolist() == [*ids[again]]
        assert len(list(folder.iterdir())) == 1 + -(-len(ids[again]) // 7)
        if not dead:
            break
    assert count > 20


def test_what_an_early_kill_leaves_is_called_unfinished_and_taken_over(tmp_path):
    (tmp_path / "p").mkdir()
    shards.Writer(tmp_path / "p", Bytes(), 7, {"files": "others"})
    with pytest.raises(Mistake, match="data/prepare.py"):
        corpus.load(str(tmp_path / "p"), Bytes())
    (tmp_path / "t.txt").write_text("text", encoding="utf-8")
    assert prepared(tmp_path / "p", tmp_path / "t.txt").tobytes() == b"text"


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), NotImplementedError("no sem_open"), ImportError("no")]
)
def test_without_semaphores_one_worker_is_the_remedy(texts, tmp_path, monkeypatch, capsys, error):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", refuse)
    flags = [texts[0], "--tokenizer", "bytes", "--out", tmp_path / "p"]
    status, out, err = call(prepare, *flags, "--workers", 2, capsys=capsys)
    assert status == 2 and out == "" and "--workers 1" in err and err.count("\n") == 1
    assert call(prepare, *flags, "--workers", 1, capsys=capsys)[0] == 0


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_slices_of_shards_are_slices_of_the_ids(numbers, data):
    one, other = numbers
    for _ in range(2):  # a slice, and a slice of it
        start, stop = data.draw(st.integers(-40, 40)), data.draw(st.one_of(st.none(), st.integers(-40, 40)))
        one, other = one[start:stop], other[start:stop]
        assert len(one) == len(other) and np.asarray(one).tolist() == other.tolist()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return written(tmp_path_factory.mktemp("shards") / "p", range(33)), np.arange(33)


def test_training_reads_shards_as_it_reads_an_array(tmp_path):
    ids = np.random.default_rng(0).integers(50257, size=500).astype(np.uint16)
    one, other = Data(ids, 16, 4, 0.2, 1), Data(written(tmp_path / "p", ids, BPE, size=37), 16, 4, 0.2, 1)
    assert all(one.batch(step).equal(other.batch(step)) for step in range(50))
    assert all(a.equal(b) for a, b in zip(one.windows(3), other.windows(3), strict=True))


def test_ids_are_stored_in_the_type_that_holds_the_vocabulary(tmp_path):
    class Large(Bytes):
        name, vocab_size, dtype = "large", 100_000, np.uint32

    assert np.asarray(written(tmp_path / "p", [70_000, 3], Large())).tolist() == [70_000, 3]
    meta = json.loads((tmp_path / "p" / "meta.json").read_text("utf-8"))
    (tmp_path / "p" / "meta.json").write_text(json.dumps(meta | {"dtype": "uint16"}), encoding="utf-8")
    with pytest.raises(Mistake, match="uint16.*100000.*data/prepare.py"):
        shards.read(tmp_path / "p", Large())


def test_a_corpus_has_one_digest_and_another_corpus_another(tmp_path):
    one, again, other = (written(tmp_path / name, ids) for name, ids in (("a", [1, 2]), ("b", [1, 2]), ("c", [2, 1])))
    assert corpus.digest(one) == corpus.digest(one[:1]) == corpus.digest(again) != corpus.digest(other)


def add_a_byte(folder):
    with open(folder / "00001.bin", "ab") as file:
        file.write(b"\0")


DAMAGES = [
    (add_a_byte, "00001.bin has 8 bytes, not 7"),
    (lambda folder: (folder / "00002.bin").unlink(), "00002.bin"),
    (lambda folder: (folder / "meta.json").write_text("{}", encoding="utf-8"), "tokenizer"),
    (lambda folder: (folder / "meta.json").write_text("[]", encoding="utf-8"), "meta.json"),
    (lambda folder: (folder / "meta.json").write_bytes(b"\xff{"), "meta.json"),
    (lambda folder: (folder / "meta.json").unlink(), "data/prepare.py"),
    (lambda folder: (folder / "00002.bin").write_bytes(bytes(7)), "00002.bin.*checksum"),
]


@pytest.mark.parametrize("damage, value", DAMAGES)
def test_damaged_shards_are_refused(tmp_path, damage, value):
    written(tmp_path / "p", range(33))
    damage(tmp_path / "p")
    with pytest.raises(Mistake, match=value):
        shards.read(tmp_path / "p", Bytes())


class Wide(Bytes):
    name, vocab_size, dtype = "wide", 300, np.uint16


def put_id(path, place, value):
    ids = np.fromfile(path, np.uint16)
    ids[place] = value
    ids.tofile(path)


@pytest.mark.parametrize("first, seen", [(0, True), (1, False)], ids=["changed last", "changed first"])
def test_of_a_large_corpus_the_checksums_of_what_was_changed_last_are_computed(tmp_path, monkeypatch, first, seen):
    ids = written(tmp_path / "p", range(33), Wide())
    assert ids.checked == 66
    for number, path in enumerate(sorted((tmp_path / "p").glob("*.bin"))):
        os.utime(path, (10**9 + number, 10**9 + number))
    put_id(tmp_path / "p" / "00001.bin", 3, 299)
    os.utime(tmp_path / "p" / "00001.bin", (2 * 10**9 - first * 15 * 10**8,) * 2)
    monkeypatch.setattr(shards, "CHECKED", 30)
    if seen:
        with pytest.raises(Mistake, match="00001.bin"):
            shards.read(tmp_path / "p", Wide())
    else:
        assert shards.read(tmp_path / "p", Wide()).checked == 24  # the last file has five ids


@pytest.mark.parametrize("checked, error", [(2**31, Mistake), (0, Failure)], ids=["at the start", "when it is read"])
def test_an_id_that_the_vocabulary_lacks_is_named_before_it_is_used(tmp_path, monkeypatch, checked, error):
    monkeypatch.setattr(shards, "CHECKED", checked)
    written(tmp_path / "p", range(33), Wide())
    put_id(tmp_path / "p" / "00001.bin", 3, 300)
    with pytest.raises(error, match="00001.bin.* 300 .* 3, offset 6,"):
        np.asarray(shards.read(tmp_path / "p", Wide())[8:12])


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 3)], ids=["lost", "cut"])
def test_a_file_that_is_lost_or_cut_during_a_run_is_named(tmp_path, damage):
    ids, path = written(tmp_path / "p", range(33)), tmp_path / "p" / "00001.bin"
    changed = path.stat().st_mtime_ns
    damage(path)
    if path.exists():
        os.utime(path, ns=(changed, changed))
    with pytest.raises(Failure, match="00001.bin.*--resume"):
        np.asarray(ids)


def test_a_corpus_that_another_replaces_is_not_read_on(tmp_path):
    """Shards open their files at each read, and the other corpus has files of the same names and sizes."""
    ids = written(tmp_path / "p", range(33))
    assert np.asarray(ids[3:10]).tolist() == list(range(3, 10))
    (tmp_path / "p").rename(tmp_path / "old")
    written(tmp_path / "p", range(33, 66))
    with pytest.raises(Failure, match="00000.bin"):
        np.asarray(ids[3:10])


def test_a_prepared_corpus_trains_and_resumes_and_wants_its_own_tokenizer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "p", np.arange(600) % 256, size=100)
    train.train(toy_config(data="p", steps=1), "r")
    assert "6 files of 600 bytes, 600 of them checked" in capsys.readouterr().out
    assert train.train(toy_config(data="p", steps=2), "r", "last")["step"] == 2
    flags = [*as_flags(TOY_RUN), "--steps", 1]
    status, _, err = call(train, "--data", "p", "--tokenizer", "gpt2", *flags, capsys=capsys)
    assert status == 2 and "(bytes, not gpt2)" in err and "--tokenizer bytes" in err
    (tmp_path / "p").rename(tmp_path / "old")
    written(tmp_path / "p", np.arange(600) % 255, size=100)
    with pytest.raises(Mistake, match="corpus has changed"):
        train.train(toy_config(data="p", steps=3), "r", "last")


MISTAKES = [
    (["nowhere"], "nowhere"),
    (["empty"], ".jsonl.gz"),
    (["bad.txt"], f"bad.txt: byte {2**20 + 3} "),
    (["end.txt"], "end.txt"),
    (["bad.jsonl"], "bad.jsonl: line 2 "),
    (["list.jsonl"], "list.jsonl: line 1 "),
    (["cut.txt.gz"], "cut.txt.gz"),
    (["not.txt.gz"], "not.txt.gz"),
    (["none.txt"], "none.txt"),
    (["good.txt", "--workers", "0"], "--workers"),
    (["good.txt", "--workers", "62"], "1 to 61"),
    (["good.txt", "--shard-tokens", "0"], "--shard-tokens"),
    (["good.txt", "--tokenizer", "gtp2"], "gpt2"),
    (["good.txt", "--out", "empty/.."], "--out"),
    (["good.txt", "--out", "good.txt/x"], "good.txt/x"),
    (["good.txt", "--out", "good.txt"], "good.txt"),
    (["good.txt", "--out", "thesis", "--overwrite"], "--out"),
    (["good.txt", "--out", "measured", "--overwrite"], "--out"),
    (["good.txt", "--out", "hidden", "--overwrite"], "--out"),
    (["x" * 300], "too long"),
    ([""], "''"),
    (["wide.txt"], "wide.txt"),
]


@pytest.mark.parametrize("arguments, value", MISTAKES, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis").mkdir()
    for name in ("meta.json", "thesis.txt"):
        (tmp_path / "thesis" / name).write_text("{}", encoding="utf-8")
    for name in (
        "measured/meta.json",
        "measured/00000.bin",
        "measured/12345 measurements.bin",
        "hidden/.progress.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"shards": [], "dtype": "f4", "source": 1}', encoding="utf-8")
    for name, content in (
        ("bad.txt", b"\n" * 2**20 + b"abc\xff"),
        ("end.txt", "ab é".encode()[:-1]),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n'),
        ("list.jsonl", b"[" * 100_000),
        ("cut.txt.gz", gzip.compress(b"text " * 1000)[:-20]),
        ("not.txt.gz", b"text"),
        ("none.txt", b""),
        ("wide.txt", "text".encode("utf-16-le")),
        ("good.txt", b"text"),
    ):
        (tmp_path / name).write_bytes(content)
    flags = ["--out", "p", "--tokenizer", "bytes", "--workers", 1]
    status, out, err = call(prepare, *flags, *arguments, capsys=capsys)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and value in err, err
    assert not (tmp_path / "p" / "meta.json").exists() and (tmp_path / "thesis" / "thesis.txt").exists()
    assert len(list((tmp_path / "measured").iterdir())) == 3 and len(list((tmp_path / "hidden").iterdir())) == 1


def test_a_folder_of_texts_may_have_a_meta_json_of_its_own(tmp_path):
    for name in ("meta.json", "thesis.txt"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    assert corpus.load(str(tmp_path), Bytes()).tobytes() == b"text"


@POSIX
def test_more_shards_than_files_may_be_open_are_read(tmp_path):
    written(tmp_path / "p", np.arange(300) % 256, size=1)
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
import numpy as np
from gpt.tokenizer import Bytes
from gpt.training import corpus
ids = corpus.load("p", Bytes())
parts = [np.asarray(ids[i : i + 2]) for i in range(0, 300, 2)]
assert np.array_equal(np.asarray(ids), np.arange(300) % 256) and np.array_equal(np.concatenate(parts), ids)
"""
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@POSIX
def test_a_full_disk_ends_it_with_one_line_and_it_goes_on_when_there_is_room(tmp_path, monkeypatch, capsys):
    """The finished shards are kept, and not written again. A limit on the size of files stands in for the disk."""
    import resource

    monkeypatch.setattr(prepare, "BLOCK", 300)  # so that it goes on within a batch that is not the first
    documents = [str(number) * 30 for number in range(100, 150)]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in documents)
    (tmp_path / "t.jsonl").write_text(lines, encoding="utf-8")
    command = [tmp_path / "t.jsonl", "--tokenizer", "bytes", "--workers", 1, "--shard-tokens", 100]
    command += ["--out", tmp_path / "p"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the record of the shards grows beyond it
    try:
        status, out, err = call(prepare, *command, capsys=capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    with pytest.raises(Mistake, match="data/prepare.py"):
        corpus.load(str(tmp_path / "p"), Bytes())
    recorded = json.loads((tmp_path / "p" / ".progress.json").read_text("utf-8"))["shards"]
    before = times(tmp_path / "p")
    assert call(prepare, *command, capsys=capsys)[0] == 0
    after = times(tmp_path / "p")
    assert len(after) > len(recorded) > 4 and all(after[each["name"]] == before[each["name"]] for each in recorded)
    assert np.asarray(corpus.load(str(tmp_path / "p"), Bytes())).tolist() == whole(documents, Bytes())


@POSIX
@pytest.mark.parametrize("file", [".progress.json", "00000.bin"])  # is there before workers start, and while they work
def test_ctrl_c_twice_ends_a_preparation_at_once_and_without_a_word(tmp_path, file):
    (tmp_path / "t.txt").write_bytes(b"the norm of a line\n" * 100_000)
    # Named so often that no machine is done with it before the signal.
    flags = [*["t.txt"] * 3000, "--tokenizer", "gpt2", "--workers", "2", "--shard-tokens", "100000", "--out", "p"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, ROOT / "data" / "prepare.py", *flags]
    process = subprocess.Popen(command, start_new_session=True, cwd=tmp_path, **pipes)
    while not (tmp_path / "p" / file).exists():
        assert process.poll() is None
        time.sleep(0.005)
    for pause in (0.01, 0.01, 0.02, 0.05):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out + err == ""


@POSIX
def test_a_second_ctrl_c_does_not_keep_the_first_from_ending_the_workers(monkeypatch):
    before, ended = signal.getsignal(signal.SIGINT), []

    class Worker:
        def kill(self):
            os.kill(os.getpid(), signal.SIGINT)
            ended.append(self)

    monkeypatch.setattr(worker_processes.multiprocessing, "active_children", lambda: [Worker(), Worker()])
    try:
        with pytest.raises(KeyboardInterrupt, match="the first"), worker_processes.open_pool(2):
            raise KeyboardInterrupt("the first")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) == 2


@POSIX
def test_a_worker_killed_half_way_through_its_result_is_not_waited_for(tmp_path):
    lines = f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\nfrom gpt.training import workers\n"
    lines += "with workers.open_pool(2) as pool:\n"
    lines += "    assert workers.begin(pool, [(True, 'ab')], 'bytes', True)().tobytes() == b'ab'\n"
    lines += "    os.write(pool._result_queue._writer.fileno(), b'half')\n"
    lines += "    sys.exit(3)\n"
    process = subprocess.Popen([sys.executable, "-c", lines], cwd=tmp_path)
    try:
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()


@POSIX
def test_a_killed_preparation_goes_on_and_leaves_no_worker_behind(tmp_path):
    text = np.random.default_rng(0).integers(32, 127, size=4_000_000, dtype=np.uint8).tobytes()
    (tmp_path / "t.txt").write_bytes(text)
    (tmp_path / "u.txt").write_bytes(text[:100_000])
    flags = ["t.txt", "u.txt", "--tokenizer", "bytes", "--workers", "2", "--shard-tokens", "10000", "--out", "p"]
    command = [sys.executable, ROOT / "data" / "prepare.py", *flags]
    process = subprocess.Popen(command, start_new_session=True, cwd=tmp_path)
    while not (tmp_path / "p" / "00001.bin").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    recorded = json.loads((tmp_path / "p" / ".progress.json").read_text("utf-8"))["shards"]
    before = times(tmp_path / "p")
    assert recorded and not (tmp_path / "p" / "meta.json").exists()
    with pytest.raises(Mistake, match="--overwrite"):  # other files
        prepared(tmp_path / "p", tmp_path / "u.txt", shard_tokens=10_000)
    names = [tmp_path / "t.txt", tmp_path / "u.txt"]
    assert prepared(tmp_path / "p", *names, shard_tokens=10_000).tobytes() == text + b"\n\n" + text[:100_000]
    after = times(tmp_path / "p")
    assert len(after) > len(recorded) and all(after[each["name"]] == before[each["name"]] for each in recorded)
    for _ in range(100):  # the workers of the killed process
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("workers outlive their parent")
