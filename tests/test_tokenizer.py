"""Any text becomes ids and comes back; GPT-2's ids are OpenAI's."""

import hashlib
import json
import pickle
import random

import numpy as np
import pytest

from gpt.config import Mistake
from gpt.tokenizer import GPT2BPE, TOKENIZERS, VOCAB_BPE, Bytes
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
