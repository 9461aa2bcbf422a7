"""Any text becomes ids and comes back; GPT-2's ids are OpenAI's."""

import hashlib
import json
import pickle
import random
import re

import numpy as np
import pytest

from gpt.config import Mistake
from gpt.tokenizer import FOREIGN, GPT2BPE, TOKENIZERS, VOCAB_BPE, Bytes, require_stored, stored_in
from gpt.training import corpus


@pytest.fixture(scope="module")
def gpt2():
    return GPT2BPE()


TEXTS = [
    "Hello, world!\n",
    "héllo 😀 你好\r\n\ttabs  and   spaces ",
    "'s 're 12345 _x_\n\n\n",
    "\u0085\u2028\x00\x7f",
    "",
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_comes_back(name):
    tokenizer = TOKENIZERS[name]()
    every = "".join(map(chr, random.Random(0).sample(range(0x20000), 500))).encode("utf-8", "ignore").decode()
    for text in (*TEXTS, every):
        ids = tokenizer.encode(text)
        assert ids.dtype == tokenizer.dtype and ids.ndim == 1 and (ids < tokenizer.vocab_size).all()
        assert tokenizer.decode_bytes(ids).decode("utf-8") == text
        assert tokenizer.decode_bytes(ids.tolist()) == tokenizer.decode_bytes(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_survives_the_way_to_another_process(name):
    tokenizer = TOKENIZERS[name]()
    again = pickle.loads(pickle.dumps(tokenizer))
    assert np.array_equal(again.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_separator_and_start_are_ids_of_the_tokenizer(name):
    tokenizer = TOKENIZERS[name]()
    assert max(tokenizer.separator) < tokenizer.vocab_size and len(tokenizer.encode_prompt(tokenizer.start)) == 1
    assert np.iinfo(tokenizer.dtype).max >= tokenizer.vocab_size - 1


def test_bytes_are_their_own_ids():
    assert Bytes().encode("hé").tolist() == [104, 0xC3, 0xA9]


def test_the_merges_file_is_openais():
    digest = hashlib.sha256(VOCAB_BPE.read_bytes()).hexdigest()
    assert digest == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def test_every_id_is_openais(gpt2):
    """The checksum of encoder.json, which maps each of the 50,257 tokens, in printable characters, to its id."""
    vocabulary = gpt2.to_json()["model"]["vocab"]
    digest = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()
    assert digest == "855ec41a9d90094ebb1189ee8082e915505cf2dfe0691a4f39da9c020f9476b2"


def test_the_bytes_of_every_id(gpt2):
    """The checksum of all byte strings in the order of their ids, measured when encoder.json was at hand."""
    digest = hashlib.sha256()
    for id in range(gpt2.vocab_size):
        token = gpt2.decode_bytes([id])
        digest.update(len(token).to_bytes(4, "big") + token)
    assert digest.hexdigest() == "af0cef9ba46f5448ba140da917cbe92e677a268d56c731855633f7db19bc7bcf"


def test_known_ids(gpt2):
    assert gpt2.encode("The dog").tolist() == [464, 3290]
    assert gpt2.encode("Hello, I am").tolist() == [15496, 11, 314, 716]
    assert gpt2.encode_prompt("<|endoftext|>").tolist() == [50256]


@pytest.mark.slow
def test_tiny_shakespeare_has_its_published_number_of_tokens(gpt2):
    """Only the first run is slow: it downloads the text."""
    (text,) = corpus.shakespeare()
    cut = int(len(text) * 0.9)
    assert (len(gpt2.encode(text[:cut])), len(gpt2.encode(text[cut:]))) == (301_966, 36_059)


def test_the_end_of_text_marker_is_text_in_a_corpus_and_special_in_a_prompt(gpt2):
    text = "a<|endoftext|>b"
    assert gpt2.end_of_text not in gpt2.encode(text) and len(gpt2.encode(text)) > 3
    assert gpt2.encode_prompt(text).tolist() == [64, 50256, 65]
    assert gpt2.decode_bytes(gpt2.encode_prompt(text)) == text.encode()


def test_a_missing_merges_file_is_named(tmp_path):
    with pytest.raises(Mistake, match=r"\(.*nowhere\.bpe\)"):
        GPT2BPE(tmp_path / "nowhere.bpe")


def write_files(folder, tokenizer, **changes):
    """The tokenizer in the three files of Hugging Face's libraries, with `changes` of the parts of tokenizer.json."""
    stored = tokenizer.to_json() | changes
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]), encoding="utf-8")
    lines = [
        "#version: 0.2",
        *(pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]),
    ]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_folder_with_the_same_tokenizer_is_taken(tmp_path, gpt2):
    for tokenizer in (gpt2, Bytes()):
        folder = tmp_path / tokenizer.name
        write_files(folder, tokenizer)
        require_stored(tokenizer, folder)
        assert [path.name for path in stored_in(folder)] == ["tokenizer.json", "vocab.json", "merges.txt"]
    stored = gpt2.to_json()
    pairs = [merge.split(" ") for merge in stored["model"]["merges"]]  # as newer versions write them
    padded = {"vocab": stored["model"]["vocab"] | {"<pad>": 50257}, "merges": pairs}
    write_files(tmp_path / "other", gpt2, model=padded, added_tokens=[{"content": "[PAD]", "id": 50258}])
    require_stored(gpt2, tmp_path / "other")
    assert stored_in(tmp_path) == []
    require_stored(gpt2, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_saves_of_gpt2s_tokenizer_is_taken(tmp_path, gpt2):
    transformers = pytest.importorskip("transformers")
    model = gpt2.to_json()["model"]
    write_files(tmp_path / "files", gpt2)
    (tmp_path / "files" / "tokenizer.json").unlink()
    pairs = [tuple(merge.split(" ")) for merge in model["merges"]]
    transformers.GPT2Tokenizer(vocab=model["vocab"], merges=pairs).save_pretrained(tmp_path / "saved")
    require_stored(gpt2, tmp_path / "saved")
    assert stored_in(tmp_path / "saved")


def other_vocabulary(stored):
    """Two words in each other's place, as in another language the words of the same ids are others."""
    a, b = "the", "Ġthe"
    words = stored["model"]["vocab"]
    return {"model": stored["model"] | {"vocab": words | {a: words[b], b: words[a]}}}


DIFFERENT = {
    "vocabulary": other_vocabulary,
    "merges": lambda stored: {"model": stored["model"] | {"merges": stored["model"]["merges"][::-1]}},
    "fewer merges": lambda stored: {"model": stored["model"] | {"merges": stored["model"]["merges"][:-1]}},
    "lower case": lambda stored: {"normalizer": {"type": "Lowercase"}},
    "other pieces": lambda stored: {"pre_tokenizer": {"type": "Whitespace"}},
    "prefix": lambda stored: {"pre_tokenizer": stored["pre_tokenizer"] | {"add_prefix_space": True}},
    "dropout": lambda stored: {"model": stored["model"] | {"dropout": 0.5}},
    "whole words": lambda stored: {"model": stored["model"] | {"ignore_merges": True}},
    "special word": lambda stored: {"added_tokens": [*stored["added_tokens"], {"id": 262, "content": "Ġthe"}]},
    "other kind": lambda stored: {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "merges": []}},
    "nothing": lambda stored: {"model": {"vocab": {}, "merges": []}},
    "garbage": lambda stored: {"added_tokens": 3},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_a_folder_with_another_tokenizer_is_refused_by_the_file(tmp_path, gpt2, change):
    write_files(tmp_path / "w", gpt2, **DIFFERENT[change](gpt2.to_json()))
    with pytest.raises(Mistake, match=r"\(.*tokenizer\.json.*from Python") as error:
        require_stored(gpt2, tmp_path / "w")
    assert len(str(error.value)) < 600
    (tmp_path / "w" / "tokenizer.json").unlink()
    if change in ("vocabulary", "merges", "fewer merges"):
        file = "vocab.json" if change == "vocabulary" else "merges.txt"
        with pytest.raises(Mistake, match=rf"{file}.*from Python"):
            require_stored(gpt2, tmp_path / "w")


def test_256_ids_need_not_be_bytes(tmp_path):
    letters = {chr(0x4E00 + i): i for i in range(256)}
    write_files(tmp_path / "w", Bytes(), model={"vocab": letters, "merges": ["a b"]})
    for file in ("tokenizer.json", "vocab.json", "merges.txt"):
        with pytest.raises(Mistake, match=re.escape(file)):
            require_stored(Bytes(), tmp_path / "w")
        (tmp_path / "w" / file).unlink()
    require_stored(Bytes(), tmp_path / "w")
    for file in FOREIGN:
        (tmp_path / "w" / file).write_bytes(b"\xff")
        with pytest.raises(Mistake, match=re.escape(file)):
            require_stored(Bytes(), tmp_path / "w")
        (tmp_path / "w" / file).unlink()


CONTENTS = {"empty": b"", "bytes": b"\xff\xfe\x00", "deep": b"[" * 10**5, "number": b"3", "huge": b" " * (2**24 + 1)}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "merges.txt"])
def test_a_tokenizers_file_that_cannot_be_read_is_named(tmp_path, gpt2, content, file):
    (tmp_path / file).write_bytes(CONTENTS[content])
    with pytest.raises(Mistake, match=re.escape(file)) as error:
        require_stored(gpt2, tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert content != "huge" or f"{2**24:,} bytes" in str(error.value)
