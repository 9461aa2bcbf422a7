"""Text <-> token ids. Both tokenizers work on UTF-8 bytes, so any text can be encoded and nothing is ever fetched."""

from pathlib import Path

import numpy as np

END_OF_TEXT = "<|endoftext|>"
VOCAB_BPE = Path(__file__).parents[1] / "data" / "gpt2" / "vocab.bpe"


class Bytes:
    """One id for each of the 256 bytes."""

    name = "bytes"
    vocab_size = 256
    dtype = np.uint8
    unit = "byte"
    end_of_text = None
    separator = (10, 10)  # between documents: a blank line, for want of an id of its own
    start = "\n"  # what a sample without a prompt begins with

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text's UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8"), dtype=self.dtype)

    encode_prompt = encode

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` stand for: perhaps part of a character."""
        return bytes(ids)


class GPT2BPE:
    """GPT-2's byte-pair encoding, 50,257 ids: 256 bytes, the 50,000 merges of vocab.bpe in order, <|endoftext|>.

    Raises ValueError if the merges file is missing.
    """

    name = "gpt2"
    vocab_size = 50257
    dtype = np.uint16
    unit = "token"
    end_of_text = 50256
    separator = (50256,)
    start = END_OF_TEXT

    def __init__(self, path: Path = VOCAB_BPE):
        # Imported here, since a run on bytes has no use for tiktoken.
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self._bpe = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=_read_merges(path),
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text of a corpus, in which the end-of-text marker is text like any other."""
        return np.array(self._bpe.encode_ordinary(text), dtype=self.dtype)

    def encode_prompt(self, text: str) -> np.ndarray:
        """As `encode`, but an end-of-text marker is the one special id, so that a prompt can start from it."""
        return np.array(self._bpe.encode(text, allowed_special="all"), dtype=self.dtype)

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` stand for: perhaps part of a character."""
        return self._bpe.decode_bytes([int(i) for i in ids])


def _read_merges(path: Path) -> dict[bytes, int]:
    """vocab.bpe -> the rank of each byte string. The file writes bytes as printable characters: those that print
    stand for themselves, the other 68 for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    as_byte = {chr(byte) if byte in printable else chr(256 + i - len(printable)): byte for i, byte in enumerate(order)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"GPT-2's merges are missing ({path}). Restore the file from the repository.") from None
    for line in lines[1:]:  # the first line is a version
        ranks[bytes(as_byte[character] for character in line.replace(" ", ""))] = len(ranks)
    return ranks


TOKENIZERS = {"bytes": Bytes, "gpt2": GPT2BPE}
