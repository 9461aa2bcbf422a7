"""Text of any size -> token ids in shards: python data/prepare.py texts/ --tokenizer gpt2 --out data/texts.

A .txt file is one document; a .jsonl file has one in the "text" of each line; either may be compressed as .gz. If a
preparation is killed, start it again: it goes on where its last finished shard ends."""

import codecs
import collections
import concurrent.futures
import contextlib
import functools
import gzip
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt.command_line import CommandLine  # noqa: E402
from gpt.config import Failure, Mistake, lookup  # noqa: E402
from gpt.tokenizer import TOKENIZERS  # noqa: E402
from gpt.training import shards  # noqa: E402
from gpt.training.files import held  # noqa: E402

MOST_WORKERS = 61  # Windows cannot wait for more processes
BLOCK = 2**20  # bytes read at a time, and about the characters that a worker encodes at a time
JSON_LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (".txt", ".txt.gz", *JSON_LINES)
# A text may be cut before white space that follows another character: there GPT-2's pattern always ends a word,
# whatever comes before or after, and no merge crosses the end of a word. A text without white space is encoded whole.
CUT = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)


def find(names: list[str]) -> list[Path]:
    """The files of these names; of a folder, the files in it, sorted by path."""
    files, suffixes = [], ", ".join(SUFFIXES)
    for path in map(Path, names):
        if not path.exists():
            raise Mistake(f"no such file or folder ({path.absolute()}). Name {suffixes} files.")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
            if not inside:
                raise Mistake(f"no {suffixes} file in the folder ({path.absolute()}). Put the texts there.")
            files += inside
        else:
            files.append(path)
    return files


def pieces(path: Path):
    """The file's documents in pieces: (whether a document begins, text, the file's bytes read since the last piece)."""
    try:
        raw = open(path, "rb")
    except OSError as error:
        raise Mistake(f"cannot read the text ({path.absolute()}: {error.strerror}). Mend or remove it.") from None
    before = 0
    with raw, gzip.open(raw) if path.suffix == ".gz" else contextlib.nullcontext(raw) as file:
        try:
            for begins, text in (lines if path.name.endswith(JSON_LINES) else blocks)(file):
                yield begins, text, raw.tell() - before
                before = raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise Mistake(f"cannot read the text ({path.absolute()}: {error}). Mend or remove the file.") from None


def blocks(file, size: int = BLOCK):
    """One document of any length, read `size` bytes at a time and cut where it changes no id."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    uncut, last, begins, offset = [], "", True, 0
    for block in iter(lambda: file.read(size), b""):
        waiting = len(decoder.getstate()[0])
        try:
            new = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {offset - waiting + error.start} is not UTF-8") from None
        offset += len(block)
        match = CUT.match(last + new)
        if match:
            cut = match.end() - len(last)
            yield begins, "".join([*uncut, new[:cut]])
            uncut, begins = [new[cut:]], False
        else:
            uncut.append(new)
        last = new[-1:] or last
    if decoder.getstate()[0]:
        raise ValueError("it ends within a character")
    rest = "".join(uncut)
    if rest:
        yield begins, rest


def lines(file):
    """The documents of a .jsonl file."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            # JSON can write half of a surrogate pair, UTF-8 cannot: it becomes a replacement character.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f'line {number} is no JSON object with a "text"') from None
        if text:
            yield True, text


def batches(files: list[Path]):
    """Batches of about BLOCK characters, each for one worker: ([(whether a document begins, text)], the files' bytes
    read for it)."""
    batch, characters, size = [], 0, 0
    for path in files:
        for begins, text, read in pieces(path):
            batch.append((begins, text))
            characters, size = characters + len(text), size + read
            if characters >= BLOCK:
                yield batch, size
                batch, characters, size = [], 0, 0
    if batch:
        yield batch, size


@functools.cache
def make_tokenizer(name: str):
    """The tokenizer of this name, made once in each process."""
    return lookup(TOKENIZERS, name, "tokenizer")()


def start_worker():
    """Let a worker process leave Ctrl-C to its parent, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode(batch: list[tuple[bool, str]], name: str, first: bool) -> np.ndarray:
    """The ids of a batch, with a separator before each document, except before the `first` batch."""
    tokenizer = make_tokenizer(name)
    separator = np.array(tokenizer.separator, dtype=tokenizer.dtype)
    parts = []
    for begins, text in batch:
        parts += [separator, tokenizer.encode(text)] if begins else [tokenizer.encode(text)]
    return np.concatenate(parts[1:] if first else parts)


def delayed(items, count: int):
    """The same items, each one only after `count` more have been taken: workers encode those in the meantime."""
    waiting = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def write_ids(files: list[Path], writer: shards.Writer, tokenizer: str, workers: int) -> tuple[int, int]:
    """Encode the files in worker processes and write the ids in order, from the writer's position on. Returns how many
    documents the files have, and how many bytes of text."""
    documents, size, written = 0, 0, writer.position
    total = sum(path.stat().st_size for path in files)
    context = multiprocessing.get_context("spawn")
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar,
        concurrent.futures.ProcessPoolExecutor(workers, context, start_worker) as pool,
    ):
        jobs = (
            (batch, read, None if number < written else pool.submit(encode, batch, tokenizer, number == 0))
            for number, (batch, read) in enumerate(batches(files))
        )
        for batch, read, ids in delayed(jobs, 2 * workers):
            documents += sum(begins for begins, _ in batch)
            size += sum(len(text.encode("utf-8")) for _, text in batch)
            if ids:
                writer.add(ids.result())
            bar.update(read)
    return documents, size


def open_folder(out: str, overwrite: bool) -> Path:
    """Make the output folder. Raises Mistake if it has other files, or has a corpus and must not be overwritten."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = not shards.are_in(folder) and any(not path.name.startswith(".") for path in folder.iterdir())
    except OSError as error:
        raise Mistake(f"cannot make the folder ({folder.absolute()}: {error.strerror}). Name another.") from None
    if foreign:
        raise Mistake(f"the output folder is not a prepared corpus ({folder.absolute()}). Name another with --out.")
    if (folder / shards.META).exists() and not overwrite:
        raise Mistake(f"there is a prepared corpus already ({folder.absolute()}). Use --overwrite or another --out.")
    return folder


def prepare(texts: list[str], out: str, tokenizer: str, workers: int, shard_tokens: int, overwrite: bool) -> dict:
    """Write the shards of all files; returns their meta.json. Raises Mistake for a mistake of the user, and Failure,
    with the finished shards kept, for a full disk or a lost worker."""
    for name, value, most in (("--workers", workers, MOST_WORKERS), ("--shard-tokens", shard_tokens, 2**40)):
        if not 1 <= value <= most:
            raise Mistake(f"{name} is out of range ({value}). It must be from 1 to {most}.")
    made, files, folder = make_tokenizer(tokenizer), find(texts), open_folder(out, overwrite)
    with held(folder):
        if overwrite:
            shards.clear(folder)
        source = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        writer = shards.Writer(folder, made, shard_tokens, {"files": source})
        try:
            documents, size = write_ids(files, writer, tokenizer, workers)
            if not documents:
                raise Mistake(f"there is no text in the files ({', '.join(texts)}). Name others.")
            return writer.finish(documents=documents, bytes=size)
        except (OSError, concurrent.futures.process.BrokenProcessPool) as error:
            raise Failure(
                f"cannot go on ({error}). Finished shards are kept: mend the cause and start again."
            ) from None


def main(argv: list[str]):
    command = CommandLine({"": "Name texts first, then the flags."}, prog="data/prepare.py", description=__doc__)
    command.add_argument("texts", nargs="+", metavar="FOLDER_OR_FILE", help="what to read, in this order")
    command.add_argument("--out", required=True, metavar="FOLDER", help="where to, for train.py --data FOLDER")
    command.add_argument("--tokenizer", default="gpt2", help="bytes or gpt2 (default: %(default)s)")
    workers = {"type": int, "default": min(os.cpu_count() or 1, MOST_WORKERS), "metavar": "N"}
    command.add_argument("--workers", **workers, help="processes (default: one for each core, %(default)s)")
    size = {"type": int, "default": 2**27, "metavar": "N"}
    command.add_argument("--shard-tokens", **size, help="tokens in a shard (default: %(default)s)")
    command.add_argument("--overwrite", action="store_true", help="delete the prepared corpus in --out first")
    arguments = command.parse_args(argv)

    def body():
        meta = prepare(**vars(arguments))
        counts = f"{meta['documents']:,} documents, {meta['bytes']:,} bytes, {meta['tokens']:,} tokens"
        print(f"{counts} in {arguments.out} ({len(meta['shards'])} files)")
        print(f"train on them: python train.py --data {arguments.out} --tokenizer {arguments.tokenizer}")

    command.run(body, "nobody reads the output any more (broken pipe). The corpus is prepared.")


if __name__ == "__main__":
    main(sys.argv[1:])
