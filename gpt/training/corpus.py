"""A corpus by name, file or folder -> documents of text -> one row of token ids; or a prepared folder's shards."""

import codecs
import contextlib
import gzip
import hashlib
import http.client
import os
import shlex
import stat
import sys
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from gpt.config import Mistake
from gpt.files import courtesy, new_file
from gpt.training import shards

CACHE = Path(__file__).parents[2] / "data"
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
LARGEST = 2**24  # bytes that a download may have

CONTROLS = bytes(range(9))  # UTF-16 and UTF-32 have them in most of their even or odd bytes, and texts hardly any
Passed = dict[str, list[Path]]  # files and folders that are not read, by the reason


def load(data: str, tokenizer, tell: Callable[[str], object] = lambda text: None) -> np.ndarray | shards.Shards:
    """The token ids of a corpus, (N,) of tokenizer.dtype: all its documents with the tokenizer's separator between.

    `data` is a key of CORPORA; a text file; a folder, of which each .txt file is a document, sorted by path; or a
    folder that data/prepare.py made. Text is UTF-8 and kept byte for byte, line ends included, but for a byte order
    mark. `tell` is called with what was read and checked of a folder. Raises Mistake if the corpus is missing, empty,
    not UTF-8, damaged, or prepared for another tokenizer.
    """
    if data not in CORPORA and shards.are_in(Path(data)):
        ids = shards.read(Path(data), tokenizer)
        tell(f"{len(ids.files):,} files of {len(ids) * ids.dtype.itemsize:,} bytes, {ids.checked:,} of them checked")
        return ids
    documents = CORPORA[data]() if data in CORPORA else _read(data, tell)
    separator = np.array(tokenizer.separator, dtype=tokenizer.dtype)
    parts = [part for document in documents for part in (separator, tokenizer.encode(document))]
    return np.concatenate(parts[1:])


def digest(ids: np.ndarray | shards.Shards) -> str:
    """A checksum that tells one corpus, as ids, from another."""
    return ids.digest if isinstance(ids, shards.Shards) else hashlib.sha256(ids.data).hexdigest()


def resolve(data: str) -> str:
    """`data` with a path made absolute: the same corpus in whatever folder a run is continued."""
    return data if data in CORPORA else str(Path(data).absolute())


def name(data: str) -> str:
    """A short name for a corpus, fit for a folder's name."""
    return data if data in CORPORA else Path(os.path.abspath(data)).stem[:50] or "corpus"


def find(name: str, suffixes: tuple[str, ...], passed: Passed, others: Iterable[str] = ()) -> list[Path]:
    """The text file of this name; or, of a folder, the files in it and below whose names end in one of `suffixes`,
    sorted by path. Links are followed. What is passed over is added to `passed`. Raises Mistake, which offers the
    `others` that might be meant, if something is missing or cannot be read, rather than leave it out."""
    path, kinds = Path(name), " or ".join(suffixes)
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError) as error:
        place = f"{path.absolute() if name else repr(name)}: {getattr(error, 'strerror', error)}"
        remedy = ", ".join(["Give a text file", f"a folder of {kinds} files", *others])
        raise Mistake(f"no such file or folder ({place}). {remedy}.") from None
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):  # it may have no end, and can be read once only
        raise Mistake(f"neither a file nor a folder ({path.absolute()}). Save the text as a file.")
    files, met = [], {os.path.realpath(path)}
    try:
        for folder, folders, names in os.walk(path, onerror=_stop, followlinks=True):
            inside, folders[:] = [*folders, *names], []  # os.walk goes into those that are put back
            for each in sorted(inside):
                here = Path(folder, each)
                if reason := _reason(here, suffixes, met):
                    passed.setdefault(reason, []).append(here)
                elif here.is_dir():
                    folders.append(each)
                else:
                    files.append(here)
    except OSError as error:
        raise Mistake(f"cannot read a text ({error.filename}: {error.strerror}). Mend it or move it away.") from None
    if not files:
        place = f"{path.absolute()}{passed_over(passed)}"
        raise Mistake(f"no {kinds} file in the folder ({place}). Put the texts there.")
    return sorted(files)


def _stop(error: OSError):
    raise error


def _reason(path: Path, suffixes: tuple[str, ...], met: set[str]) -> str | None:
    """Why a file or folder within a corpus is passed over, if it is; `met` are the real paths of those that are not."""
    if path.name.startswith("."):  # programs keep copies in such
        return "hidden"
    if not path.is_dir() and not (path.name.endswith(suffixes) and stat.S_ISREG(path.stat().st_mode)):
        return "of another kind"
    real = os.path.realpath(path)
    if real in met:  # by a link, perhaps of a folder above
        return "linked twice"
    met.add(real)
    return None


def passed_over(passed: Passed) -> str:
    """How many files and folders were not read, with the name of one: "; passed over: 2 hidden ('.x'), 1 empty ..."."""
    parts = [f"{len(paths):,} {reason} ({paths[0].name!r})" for reason, paths in passed.items()]
    return f"; passed over: {', '.join(parts)}" if parts else ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file of UTF-8 text, unpacked and behind its byte order mark, and the file itself. Raises Mistake, also for
    those errors of the `with` block that mean that it cannot be read."""
    try:
        with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else contextlib.nullcontext(raw) as file:
            start = file.read(4096)
            marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
            halves = start[::2], start[1::2]
            if marked or any(2 * len(half.translate(None, CONTROLS)) + 1 < len(half) for half in halves):
                raise ValueError("it is no text, or UTF-16 or UTF-32 and not UTF-8")
            file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
            yield cast(BinaryIO, file), raw
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = f"{path.absolute()}: {getattr(error, 'strerror', None) or error}"
        raise Mistake(f"cannot read the text ({reason}). Mend it, convert it to UTF-8, or remove it.") from None


def _read(data: str, tell: Callable[[str], object] = lambda text: None) -> list[str]:
    passed: Passed = {}
    files = find(data, (".txt",), passed, CORPORA)
    if files[0].name.endswith((".jsonl", ".gz")):
        path = files[0].absolute()
        raise Mistake(f"not a plain text ({path}). Prepare it first: python data/prepare.py {shlex.quote(data)}")
    texts, size = [], 0
    for file in files:
        text = _text(file)
        if not text or text.isspace():
            passed.setdefault("empty", []).append(file)
        else:
            texts.append(text)
            size += file.stat().st_size
    if not texts:
        raise Mistake(f"the text is empty ({data}). Give a file with text in it.")
    if os.path.isdir(data):
        tell(f"{len(texts):,} files of {size:,} bytes{passed_over(passed)}")
    return texts


def _text(path: Path) -> str:
    with opened(path) as (file, _):
        start, content = file.tell(), file.read()
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"byte {content[error.start]:#04x} at offset {start + error.start}"
            raise ValueError(f"{place} is not UTF-8") from None


def python_docs() -> list[str]:
    """The language reference that every CPython carries for help(), about half a megabyte of English, by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # as in Debian's minimal Python
        remedy = "Use --data shakespeare, or a text file."
        raise Mistake(f"this Python has no python-docs ({sys.executable}: no pydoc_data). {remedy}") from None
    return [topics[topic] for topic in sorted(topics)]


def shakespeare() -> list[str]:
    """Tiny Shakespeare, 1,115,394 bytes, downloaded on first use."""
    path = CACHE / "shakespeare.txt"
    return _read(str(path)) if os.path.exists(path) else [download(*SHAKESPEARE, path).decode("utf-8")]


def download(url: str, sha256: str, path: Path) -> bytes:
    """The content of `url`, kept as `path` as well, if that can be written. Raises Mistake, and leaves nothing, if it
    cannot be fetched or has another checksum."""
    remedy = f"Fetch it another way and save it as {path}."
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read(LARGEST + 1)
    except (OSError, http.client.HTTPException) as error:  # urllib's errors are OSErrors
        reason = getattr(error, "reason", None) or str(error) or repr(error)
        raise Mistake(f"cannot download ({url}: {reason}). {remedy}") from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        values = f"{len(content):,} bytes, sha256 {actual}, not {sha256}"
        raise Mistake(f"not the expected file ({url}: {values}). {remedy}")
    with courtesy(f"keep {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, str(os.getpid())) as new:
            new.write_bytes(content)
    return content


CORPORA = {"python-docs": python_docs, "shakespeare": shakespeare}
