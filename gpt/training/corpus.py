"""A corpus by name, file or folder -> documents of text -> one row of token ids; or a prepared folder's shards."""

import hashlib
import os
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

from gpt.config import Mistake
from gpt.training import shards

CACHE = Path(__file__).parents[2] / "data"
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


def load(data: str, tokenizer) -> np.ndarray | shards.Shards:
    """The token ids of a corpus, (N,) of tokenizer.dtype: all its documents with the tokenizer's separator between.

    `data` is a key of CORPORA; a text file; a folder, of which each .txt file is a document, sorted by path; or a
    folder that data/prepare.py made. Text is UTF-8 and kept byte for byte, line ends included. Raises Mistake if the
    corpus is missing, empty, not UTF-8, damaged, or prepared for another tokenizer.
    """
    if data and data not in CORPORA and shards.are_in(Path(data)):
        return shards.read(Path(data), tokenizer)
    documents = CORPORA[data]() if data in CORPORA else _read(data)
    separator = np.array(tokenizer.separator, dtype=tokenizer.dtype)
    parts = [part for document in documents for part in (separator, tokenizer.encode(document))]
    return np.concatenate(parts[1:])


def digest(ids: np.ndarray | shards.Shards) -> str:
    """A checksum that tells one corpus, as ids, from another."""
    return ids.digest if isinstance(ids, shards.Shards) else hashlib.sha256(ids.data).hexdigest()


def resolve(data: str) -> str:
    """`data` with a path made absolute: the same corpus in whatever folder a run is continued."""
    return data if data in CORPORA or not data else str(Path(data).absolute())


def name(data: str) -> str:
    """A short name for a corpus, fit for a folder's name."""
    return data if data in CORPORA else Path(data).absolute().stem


def _read(data: str) -> list[str]:
    path = Path(data)
    if not data or not os.path.exists(path):  # os.path.exists is False, not an error, without permission
        raise Mistake(
            f"no corpus of that name and no such file ({path.absolute()}). "
            f"Known names: {', '.join(CORPORA)}; else give a text file or a folder of .txt files."
        )
    if path.name.endswith((".jsonl", ".gz")):
        raise Mistake(f"not a plain text ({path.absolute()}). Prepare it first: python data/prepare.py {path}")
    files = sorted(file for file in path.rglob("*.txt") if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise Mistake(f"no .txt file in the folder ({path.absolute()}). Put the corpus there as UTF-8 .txt files.")
    return [_text(file) for file in files]


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise Mistake(f"cannot read the text ({path}: {error.strerror}). Give another file.") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise Mistake(f"not UTF-8 text ({path}, {place}). Convert the file to UTF-8.") from None
    if not text.strip():
        raise Mistake(f"the text is empty ({path}). Give a file with text in it.")
    return text


def python_docs() -> list[str]:
    """The language reference that every CPython carries for help(), about half a megabyte of English, by topic."""
    from pydoc_data.topics import topics

    return [topics[topic] for topic in sorted(topics)]


def shakespeare() -> list[str]:
    """Tiny Shakespeare, 1,115,394 bytes, downloaded on first use."""
    path = CACHE / "shakespeare.txt"
    if not path.exists():
        download(*SHAKESPEARE, path)
    return [_text(path)]


def download(url: str, sha256: str, path: Path):
    """Fetch `url` to `path`. Raises Mistake, and leaves nothing, if it cannot be fetched or has another checksum."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:  # urllib's errors are OSErrors
        reason = getattr(error, "reason", error)
        raise Mistake(f"cannot download ({url}: {reason}). Fetch it another way and save it as {path}.") from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise Mistake(f"not the expected file ({url}: sha256 {actual}, not {sha256}). Try again later.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


CORPORA = {"python-docs": python_docs, "shakespeare": shakespeare}
