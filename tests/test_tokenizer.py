import hashlib
import json
import pickle
import random

import numpy as np
import pytest
from toys import shared

from gpt.tokenizer import GPT2BPE, TOKENIZERS, VOCAB_BPE, Bytes


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


def test_every_id_is_encoder_jsons(gpt2):
    """encoder.json maps each of the 50,257 tokens, in the file's printable characters, to its id."""
    theirs = json.loads(shared("gpt2/encoder.json").read_text(encoding="utf-8"))
    assert len(theirs) == gpt2.vocab_size
    first_256 = [token for token, id in sorted(theirs.items(), key=lambda item: item[1])[:256]]
    as_byte = {character: gpt2.decode_bytes([id])[0] for id, character in enumerate(first_256)}
    assert sorted(as_byte.values()) == list(range(256))
    for token, id in theirs.items():
        if id != gpt2.end_of_text:
            assert gpt2.decode_bytes([id]) == bytes(as_byte[character] for character in token)
    assert theirs["<|endoftext|>"] == gpt2.end_of_text
    assert [as_byte[c] for c in "!~¡ÿĀĠĊŃ"] == [0x21, 0x7E, 0xA1, 0xFF, 0x00, 0x20, 0x0A, 0xAD]


def test_the_ids_of_all_tokens_in_one_number(gpt2):
    """As the test above, without encoder.json: the digest of all byte strings in the order of their ids."""
    digest = hashlib.sha256()
    for id in range(gpt2.vocab_size):
        token = gpt2.decode_bytes([id])
        digest.update(len(token).to_bytes(4, "big") + token)
    assert digest.hexdigest() == "af0cef9ba46f5448ba140da917cbe92e677a268d56c731855633f7db19bc7bcf"


def test_known_ids(gpt2):
    assert gpt2.encode("The dog").tolist() == [464, 3290]
    assert gpt2.encode("Hello, I am").tolist() == [15496, 11, 314, 716]
    assert gpt2.encode_prompt("<|endoftext|>").tolist() == [50256]


def test_tiny_shakespeare_has_its_published_number_of_tokens(gpt2):
    text = shared("tinyshakespeare.txt").read_text(encoding="utf-8")
    cut = int(len(text) * 0.9)
    assert (len(gpt2.encode(text[:cut])), len(gpt2.encode(text[cut:]))) == (301_966, 36_059)


def test_the_end_of_text_marker_is_text_in_a_corpus_and_special_in_a_prompt(gpt2):
    text = "a<|endoftext|>b"
    assert gpt2.end_of_text not in gpt2.encode(text) and len(gpt2.encode(text)) > 3
    assert gpt2.encode_prompt(text).tolist() == [64, 50256, 65]
    assert gpt2.decode_bytes(gpt2.encode_prompt(text)) == text.encode()


def test_a_missing_merges_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"merges are missing \(.*nowhere\.bpe\)"):
        GPT2BPE(tmp_path / "nowhere.bpe")
