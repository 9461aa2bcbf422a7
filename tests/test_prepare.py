"""data/prepare.py and the shards it writes: real files, real worker processes."""

import gzip
import io
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
from gpt.tokenizer import GPT2BPE, TOKENIZERS, Bytes
from gpt.training import corpus, shards
from gpt.training.data import Data

sys.path.append(str(ROOT / "data"))  # workers import it by its name too
import prepare  # noqa: E402

BPE = GPT2BPE()
FLAGS = as_flags(TOY_RUN)


def blocks(text: str, size: int) -> list[str]:
    found = list(prepare.blocks(io.BytesIO(text.encode("utf-8")), size))
    assert [begins for begins, _ in found] == [i == 0 for i in range(len(found))]
    return [piece for _, piece in found]


spaces = st.text(alphabet=" \n\t\r\u00a0\u2028\x1c\x85", max_size=6)
words = st.one_of(st.text(max_size=6), st.sampled_from(["'s", "'ll", "don't", "<|endoftext|>", "123", "a" * 50, "é😀"]))


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.lists(st.one_of(spaces, words), max_size=30).map("".join), st.integers(1, 20))
def test_a_cut_changes_no_id(text, size):
    text = text.encode("utf-8", "replace").decode("utf-8")
    found = blocks(text, size)
    assert "".join(found) == text and all(found)
    assert [i for piece in found for i in BPE.encode(piece)] == BPE.encode(text).tolist()


@pytest.mark.parametrize("space", [" ", "\n", "\r\n", "\t"])
def test_a_text_is_cut_in_pieces_of_the_size_that_is_asked_for(space):
    pieces = blocks(f"one{space}two{space}three{space}" * 100, 100)
    assert len(pieces) > 10 and max(map(len, pieces)) < 120


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
    for name, own in documents.items():
        text = "".join(json.dumps({"text": each, "id": 1}) + "\n\n" for each in own) if "jsonl" in name else own[0]
        with (gzip.open if name.endswith(".gz") else open)(folder / name, "wb") as file:
            file.write(text.encode("utf-8"))
    (folder / "none.txt").touch()
    (folder / "notes.md").write_text("not this", encoding="utf-8")
    return folder, [each for own in documents.values() for each in own]


def whole(documents, tokenizer) -> list[int]:
    """The ids of documents that are each encoded whole."""
    parts = [[*tokenizer.separator, *tokenizer.encode(each).tolist()] for each in documents]
    return [i for part in parts for i in part][len(tokenizer.separator) :]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_shards_hold_the_ids_of_documents_encoded_whole(texts, tmp_path, capsys, name):
    folder, documents = texts
    flags = ["--tokenizer", name, "--out", tmp_path / "p", "--shard-tokens", 5000, "--workers", 2]
    status, out, err = call(prepare, folder, *flags, capsys=capsys)
    assert status == 0 and f"{len(documents)} documents" in out and "--data" in out, err
    tokenizer = TOKENIZERS[name]()
    ids, expected = corpus.load(str(tmp_path / "p"), tokenizer), whole(documents, tokenizer)
    assert np.asarray(ids).tolist() == expected
    meta = json.loads((tmp_path / "p" / "meta.json").read_text("utf-8"))
    assert meta["documents"] == len(documents) and meta["tokens"] == len(expected)
    assert meta["bytes"] == sum(len(each.encode("utf-8")) for each in documents)
    assert [shard["tokens"] for shard in meta["shards"][:-1]] == [5000] * (len(expected) // 5000)
    there = {path.name for path in (tmp_path / "p").iterdir()}
    assert there == {"meta.json", ".lock", *(shard["name"] for shard in meta["shards"])}
    size = sum((tmp_path / "p" / shard["name"]).stat().st_size for shard in meta["shards"])
    assert size == len(expected) * np.dtype(tokenizer.dtype).itemsize
    status, _, err = call(prepare, folder, *flags, capsys=capsys)
    assert status == 2 and "there is a prepared corpus already" in err and "--overwrite" in err
    assert call(prepare, folder / "b.jsonl", *flags, "--overwrite", capsys=capsys)[0] == 0
    assert len(corpus.load(str(tmp_path / "p"), tokenizer)) == len(whole(documents[1:5], tokenizer))


def written(folder, ids, tokenizer=BPE, size=7):
    """A prepared corpus of these ids."""
    folder.mkdir()
    writer = shards.Writer(folder, tokenizer, size, {})
    writer.add(np.array(ids, tokenizer.dtype))
    writer.close()
    return shards.read(folder, tokenizer)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
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
    one, other = Data(ids, 16, 4, 0.2, 1), Data(written(tmp_path / "p", ids, size=37), 16, 4, 0.2, 1)
    for step in range(300):  # past the release of what was read
        assert one.batch(step).equal(other.batch(step))
    assert all(a.equal(b) for a, b in zip(one.windows(3), other.windows(3), strict=True))


def test_ids_are_stored_in_the_type_that_holds_the_vocabulary(tmp_path):
    class Large(Bytes):
        name, vocab_size, dtype = "large", 100_000, np.uint32

    assert np.asarray(written(tmp_path / "p", [70_000, 3], Large())).tolist() == [70_000, 3]
    meta = json.loads((tmp_path / "p" / "meta.json").read_text("utf-8"))
    (tmp_path / "p" / "meta.json").write_text(json.dumps(meta | {"dtype": "uint16"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the prepared corpus is damaged \(.*uint16 for 100000 ids\)"):
        shards.read(tmp_path / "p", Large())


def damage_size(folder):
    with open(folder / "00001.bin", "ab") as file:
        file.write(b"\0")


DAMAGES = [
    (damage_size, "00001.bin has 15 bytes, not 14"),
    (lambda folder: (folder / "00002.bin").unlink(), "00002.bin"),
    (lambda folder: (folder / "meta.json").write_text("{}", encoding="utf-8"), "tokenizer"),
    (lambda folder: (folder / "meta.json").write_text("[]", encoding="utf-8"), "is not a JSON file"),
    (lambda folder: (folder / "meta.json").write_bytes(b"\xff{"), "is not a JSON file"),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message for _, message in DAMAGES])
def test_damaged_shards_are_refused(tmp_path, damage, message):
    written(tmp_path / "p", range(33))
    damage(tmp_path / "p")
    with pytest.raises(ValueError, match=message):
        corpus.load(str(tmp_path / "p"), BPE)


def test_a_prepared_corpus_trains_and_resumes_and_wants_its_own_tokenizer(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(prepare, "texts", "--tokenizer", "bytes", "--out", "p", "--workers", 1, capsys=capsys)[0] == 0
    train.train(toy_config(data="p", steps=2), "r")
    assert train.train(toy_config(data="p", steps=4), "r", "last")["step"] == 4
    status, _, err = call(train, "--data", "p", "--tokenizer", "gpt2", *FLAGS, "--steps", 1, capsys=capsys)
    assert status == 2 and "prepared for another tokenizer (bytes, not gpt2). Give --tokenizer" in err
    call(prepare, "texts/a.txt", "--tokenizer", "bytes", "--out", "p", "--overwrite", capsys=capsys)
    status, _, err = call(train, "--resume", "--out", "r", "--steps", 6, capsys=capsys)
    assert status == 2 and "the corpus has changed since" in err


MISTAKES = [
    (["nowhere"], "no such file or folder"),
    (["empty"], "no .txt, .txt.gz, .jsonl, .jsonl.gz file in the folder"),
    (["bad.txt"], f"bad.txt: byte {2**20 + 3} is not UTF-8"),
    (["end.txt"], "end.txt: it ends within a character"),
    (["bad.jsonl"], 'line 2 is no JSON object with a "text"'),
    (["list.jsonl"], 'line 1 is no JSON object with a "text"'),
    (["cut.txt.gz"], "Compressed file ended before"),
    (["not.txt.gz"], "Not a gzipped file"),
    (["none.txt"], "there is no text in the files"),
    (["good.txt", "--workers", "0"], "workers is out of range (0)"),
    (["good.txt", "--workers", "62"], "workers is out of range (62). It must be from 1 to 61."),
    (["good.txt", "--shard-tokens", "0"], "shard_tokens is out of range (0)"),
    (["good.txt", "--tokenizer", "gtp2"], "unknown tokenizer (gtp2). Did you mean gpt2?"),
    (["good.txt", "--out", "empty/.."], "the output folder is not a prepared corpus"),
    (["good.txt", "--out", "good.txt/x"], "cannot make the folder"),
    (["good.txt", "--out", "good.txt"], "cannot make the folder"),
    (["good.txt", "--out", "theirs", "--overwrite"], "the output folder is not a prepared corpus"),
]


@pytest.mark.parametrize(
    "arguments, message", MISTAKES, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs").mkdir()
    for name in ("meta.json", "thesis.txt"):
        (tmp_path / "theirs" / name).write_text("{}", encoding="utf-8")
    for name, content in (
        ("bad.txt", b"\n" * 2**20 + b"abc\xff"),
        ("end.txt", "ab é".encode()[:-1]),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n'),
        ("list.jsonl", b"[" * 100_000),
        ("cut.txt.gz", gzip.compress(b"text " * 1000)[:-20]),
        ("not.txt.gz", b"text"),
        ("none.txt", b""),
        ("good.txt", b"text"),
    ):
        (tmp_path / name).write_bytes(content)
    status, out, err = call(prepare, "--out", "p", "--workers", 1, *arguments, capsys=capsys)
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert not (tmp_path / "p" / "meta.json").exists() and (tmp_path / "theirs" / "thesis.txt").exists()


def test_a_folder_of_texts_may_have_a_meta_json_of_its_own(tmp_path):
    for name in ("meta.json", "thesis.txt"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    assert corpus.load(str(tmp_path), Bytes()).tobytes() == b"text"


def test_deleting_a_prepared_corpus_leaves_other_files(tmp_path, capsys):
    written(tmp_path / "p", range(33))
    (tmp_path / "p" / "notes.md").touch()
    (tmp_path / "t.txt").write_text("text", encoding="utf-8")
    flags = ["--tokenizer", "bytes", "--out", tmp_path / "p", "--workers", 1, "--overwrite"]
    assert call(prepare, tmp_path / "t.txt", *flags, capsys=capsys)[0] == 0
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"00000.bin", "meta.json", "notes.md", ".lock"}
    assert np.asarray(corpus.load(str(tmp_path / "p"), Bytes())).tobytes() == b"text"


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_more_shards_than_files_may_be_open_are_refused_by_name(tmp_path):
    import resource

    written(tmp_path / "p", range(300), size=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = f"import resource, sys; sys.path.insert(0, {str(ROOT)!r})"
    code += "; resource.setrlimit(resource.RLIMIT_NOFILE, (90, {}))"
    code += f"; from gpt import corpus, tokenizer; corpus.load({str(tmp_path / 'p')!r}, tokenizer.GPT2BPE())"
    assert python("-c", code.format(limits[1]), cwd=tmp_path).returncode == 0  # which raises the limit
    result = python("-c", code.format(90), cwd=tmp_path)
    assert "ValueError: too many shards (300). Allow more open files: ulimit -n." in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_killed_preparation_goes_on_and_leaves_no_worker_behind(tmp_path, capsys):
    rng = np.random.default_rng(0)
    words = np.array(["".join(chr(97 + c) for c in rng.integers(26, size=n)) for n in rng.integers(1, 9, size=3000)])
    text = " ".join(rng.choice(words, 400_000))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    (tmp_path / "u.txt").write_text(text[:100_000], encoding="utf-8")
    flags = [
        tmp_path / "t.txt",
        tmp_path / "u.txt",
        "--workers",
        "2",
        "--shard-tokens",
        "30000",
        "--out",
        tmp_path / "p",
    ]
    process = subprocess.Popen([sys.executable, ROOT / "data" / "prepare.py", *flags], start_new_session=True)
    while not (tmp_path / "p" / "00001.bin").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    noted = json.loads((tmp_path / "p" / ".progress.json").read_text("utf-8"))["shards"]
    kept = {shard["name"]: (tmp_path / "p" / shard["name"]).stat().st_mtime_ns for shard in noted}
    assert not (tmp_path / "p" / "meta.json").exists()
    with pytest.raises(ValueError, match=r"not prepared to its end \(.*\)\. Start data/prepare.py again"):
        corpus.load(str(tmp_path / "p"), BPE)
    status, _, err = call(prepare, *flags[1:], capsys=capsys)
    assert status == 2 and "a part of another corpus" in err
    assert call(prepare, *flags, capsys=capsys)[0] == 0
    done = json.loads((tmp_path / "p" / "meta.json").read_text("utf-8"))["shards"]
    assert len(done) > len(kept) >= 1
    assert all((tmp_path / "p" / name).stat().st_mtime_ns == moment for name, moment in kept.items())
    assert np.asarray(corpus.load(str(tmp_path / "p"), BPE)).tolist() == whole([text, text[:100_000]], BPE)
    for _ in range(100):  # the killed one's workers
        if subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).returncode:
            break
        time.sleep(0.1)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("workers outlive their parent")
