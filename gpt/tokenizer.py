"""Text <-> token ids. Both tokenizers work on UTF-8 bytes, so any text can be encoded and nothing is ever fetched."""

import hashlib
import json
from pathlib import Path

import numpy as np

from gpt.config import Mistake
from gpt.files import read_json, read_text

# The files in which other programs keep a tokenizer; the last ones are of kinds that we do not have.
FILES = ("tokenizer.json", "vocab.json", "merges.txt")
FOREIGN = ("vocab.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
END_OF_TEXT = "<|endoftext|>"
VOCAB_BPE = Path(__file__).parents[1] / "data" / "gpt2" / "vocab.bpe"
# The character by which GPT-2's files write each byte, in the order of their ids: 188 bytes are printable characters of
# Latin-1 and stand for themselves, the other 68 for the characters from 256 on.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
CHARACTERS = {byte: chr(byte) for byte in PRINTABLE}
CHARACTERS |= {byte: chr(256 + i) for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


class Bytes:
    """One id for each of the 256 bytes."""

    name = "bytes"
    vocab_size = 256
    dtype = np.uint8
    unit = "byte"
    end_of_text = None
    separator = (10, 10)  # between documents: a blank line, as there is no id for it
    start = "\n"  # what a sample without a prompt begins with

    def encode(self, text: str) -> np.ndarray:
        """(N,) ids of the text's UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8"), dtype=self.dtype)

    encode_prompt = encode

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` stand for. They may end in the middle of a character."""
        return bytes(ids)

    def to_json(self) -> dict:
        """The same tokenizer in the format of Hugging Face's tokenizers."""
        return _to_json({CHARACTERS[byte]: byte for byte in range(256)}, [], None)


class GPT2BPE:
    """GPT-2's byte-pair encoding, 50,257 ids: the 256 bytes, the 50,000 merges of vocab.bpe in order, <|endoftext|>.

    Raises Mistake if the file of the merges is missing.
    """

    name = "gpt2"
    vocab_size = 50257
    dtype = np.uint16
    unit = "token"
    end_of_text = 50256
    separator = (50256,)
    start = END_OF_TEXT

    def __init__(self, path: Path = VOCAB_BPE):
        import tiktoken  # here: a run on bytes does not need it
        from tiktoken_ext.openai_public import r50k_pat_str

        try:
            self._merges = path.read_text(encoding="utf-8").splitlines()[1:]  # the first line is a version
        except FileNotFoundError:
            raise Mistake(f"GPT-2's merges are missing ({path}). Restore the file from the repository.") from None
        self._words = [*CHARACTERS.values(), *(merge.replace(" ", "") for merge in self._merges)]
        byte_of = {character: byte for byte, character in CHARACTERS.items()}
        ranks = {bytes(map(byte_of.__getitem__, word)): rank for rank, word in enumerate(self._words)}
        special = {END_OF_TEXT: self.end_of_text}
        self._bpe = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens=special,
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        """(N,) ids of a text of a corpus, in which the end-of-text marker is text like any other."""
        return self._bpe.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)

    def encode_prompt(self, text: str) -> np.ndarray:
        """As `encode`, but the end-of-text marker is its one id, so that a prompt can start with it."""
        return np.array(self._bpe.encode(text, allowed_special="all"), dtype=self.dtype)

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` stand for. They may end in the middle of a character."""
        return self._bpe.decode_bytes([int(i) for i in ids])

    def to_json(self) -> dict:
        """The same tokenizer in the format of Hugging Face's tokenizers."""
        vocabulary = {word: i for i, word in enumerate([*self._words, END_OF_TEXT])}
        return _to_json(vocabulary, self._merges, self.end_of_text)


def identity(tokenizer) -> dict:
    """What tells one tokenizer from another: its name, its number of ids and a checksum of all of it."""
    content = json.dumps(tokenizer.to_json(), sort_keys=True).encode("utf-8")
    size = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    return size | {"sha256": hashlib.sha256(content).hexdigest()}


def stored_in(folder: Path) -> list[Path]:
    """The files of a tokenizer in a folder of weights."""
    ours = [path for name in FILES if (path := folder / name).exists()]
    return ours or [path for name in FOREIGN if (path := folder / name).exists()]


def require_stored(tokenizer, folder: Path):
    """Raise Mistake if the folder has the files of another tokenizer than this one; it may have ids beyond ours."""
    model = tokenizer.to_json()["model"]
    ours = {"vocab": model["vocab"], "merges": _ranks(model["merges"])}
    for path in stored_in(folder):
        try:
            for part, stored in _content(path, tokenizer.vocab_size).items():
                for key in (*ours[part], *stored):
                    if ours[part].get(key) != stored.get(key):
                        raise ValueError(f"{key!r:.80} is {stored.get(key)}, not {ours[part].get(key)}")
        except Mistake:  # it cannot be read
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error) if type(error) is ValueError else f"no byte pairs, {error!r:.80}"
            raise Mistake(
                f"the weights have another tokenizer than {tokenizer.name} ({path}: {reason}). "
                "Use them from Python, with ids."
            ) from None


def _ranks(merges: list) -> dict[str, int]:
    """The merges, as "a b" or as ["a", "b"], and the place of each."""
    return {pair if isinstance(pair, str) else " ".join(pair): rank for rank, pair in enumerate(merges)}


def _content(path: Path, size: int) -> dict[str, dict]:
    """What a tokenizer's file has of these: "vocab", the ids by word that are below `size`, and "merges"."""
    if path.name == "merges.txt":
        version, *lines = read_text(path).splitlines() or [""]
        return {"merges": _ranks(lines if version.startswith("#version") else [version, *lines])}
    if path.name not in FILES:
        raise ValueError("no byte pairs")
    stored, merges = read_json(path), {}
    if path.name == "tokenizer.json":
        splits, model = stored["pre_tokenizer"], stored["model"]
        plain = splits["type"] == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
        if not plain or stored.get("normalizer") or model.get("dropout") or model.get("ignore_merges"):
            raise ValueError("another normalizer or pre_tokenizer, or other merging")
        special = {token["content"]: token["id"] for token in stored.get("added_tokens", [])}
        if whole := [word for word in special if special[word] < size and word != END_OF_TEXT]:
            raise ValueError(f"{whole[0]!r:.80} is not split")
        stored, merges = model["vocab"] | special, {"merges": _ranks(model["merges"])}
    return {"vocab": {word: i for word, i in stored.items() if i < size}} | merges


def _to_json(vocabulary: dict[str, int], merges: list[str], end_of_text: int | None) -> dict:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [] if end_of_text is None else [{"id": end_of_text, "content": END_OF_TEXT, **plain}]
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2BPE}
