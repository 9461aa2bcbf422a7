"""Text of any size -> token ids in shards: python data/prepare.py texts/ --tokenizer gpt2 --out data/texts.

Files are .txt, a document each; .jsonl, one in the "text" of each line; or .gz of either. A preparation that was killed
goes on, when it is started again, where its last finished shard ends."""

import codecs
import collections
import concurrent.futures
import contextlib
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
from gpt.config import Mistake, lookup  # noqa: E402
from gpt.tokenizer import TOKENIZERS  # noqa: E402
from gpt.training import shards  # noqa: E402
from gpt.training.run import held  # noqa: E402

MOST_WORKERS = 61  # Windows waits for no more
BLOCK = 2**20  # bytes read at a time, and about the characters that a worker encodes at a time
JSON_LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (".txt", ".txt.gz", *JSON_LINES)
# A text may be cut before white space that follows something else: there GPT-2's pattern always ends a piece, whatever
# comes before or after, and no merge crosses the end of a piece. What has no white space is encoded whole.
CUT = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)


def find(names: list[str]) -> list[Path]:
    """The files that are named, and for a folder those in it, sorted by path."""
    files = []
    for name in names:
        path = Path(name)
        if not path.exists():
            raise Mistake(f"no such file or folder ({path.absolute()}). Name {', '.join(SUFFIXES)} files.")
        inside = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
        if path.is_dir() and not inside:
            raise Mistake(f"no {', '.join(SUFFIXES)} file in the folder ({path.absolute()}). Put the texts there.")
        files += inside if path.is_dir() else [path]
    return files


def pieces(path: Path):
    """The file's documents in pieces: (whether a document begins, text, the file's bytes read since the last piece)."""
    before = 0
    try:
        raw = open(path, "rb")
    except OSError as error:
        raise Mistake(f"cannot read the text ({path.absolute()}: {error.strerror}). Mend or remove it.") from None
    with raw, gzip.open(raw) if path.suffix == ".gz" else contextlib.nullcontext(raw) as file:
        try:
            for begins, text in (lines if path.name.endswith(JSON_LINES) else blocks)(file):
                yield begins, text, raw.tell() - before
                before = raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise Mistake(f"cannot read the text ({path.absolute()}: {error}). Mend or remove the file.") from None


def blocks(file, size: int = BLOCK):
    """One document of any length, cut where it changes no id."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, last, begins, offset = [], "", True, 0
    for block in iter(lambda: file.read(size), b""):
        waiting = len(decoder.getstate()[0])
        try:
            new = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise Mistake(f"byte {offset - waiting + error.start} is not UTF-8") from None
        offset += len(block)
        found = CUT.match(last + new)
        if found:
            cut = found.end() - len(last)
            yield begins, "".join([*held, new[:cut]])
            held, begins = [new[cut:]], False
        else:
            held.append(new)
        last = new[-1:] or last
    if decoder.getstate()[0]:
        raise Mistake("it ends within a character")
    rest = "".join(held)
    if rest:
        yield begins, rest


def lines(file):
    """The documents of a .jsonl file."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            # Half a surrogate pair, which JSON can write and UTF-8 cannot, becomes a replacement mark.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Mistake(f'line {number} is no JSON object with a "text"') from None
        if text:
            yield True, text


def batches(files: list[Path]):
    """A worker's portion at a time: (pieces as (whether a document begins, text), bytes of the files read for them)."""
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


def start_worker(name: str):
    """Make the tokenizer of a worker process, which leaves Ctrl-C to its parent and ends with it."""
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    tokenizer = TOKENIZERS[name]()


def encode(batch, first: bool) -> np.ndarray:
    """The ids of some pieces, in a worker, with a separator before each document but the very first."""
    separator = np.array(tokenizer.separator, dtype=tokenizer.dtype)
    parts = []
    for begins, text in batch:
        parts += [separator, tokenizer.encode(text)] if begins else [tokenizer.encode(text)]
    return np.concatenate(parts[1:] if first else parts)


def prepare(names: list[str], out: str, tokenizer: str, workers: int, shard_tokens: int, overwrite: bool) -> dict:
    """Write the shards of all files; returns their meta.json. Raises Mistake for what a user can mend, OSError,
    with the finished shards kept, for a full disk or a lost worker."""
    for name, value, most in (("workers", workers, MOST_WORKERS), ("shard_tokens", shard_tokens, 2**40)):
        if not 1 <= value <= most:
            raise Mistake(f"{name} is out of range ({value}). It must be from 1 to {most}.")
    made, files, folder = lookup(TOKENIZERS, tokenizer, "tokenizer")(), find(names), Path(out)
    status = [path.stat() for path in files]
    source = {"files": [[str(path.absolute()), s.st_size, s.st_mtime_ns] for path, s in zip(files, status)]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = not shards.are_in(folder) and any(not path.name.startswith(".") for path in folder.iterdir())
    except OSError as error:
        raise Mistake(f"cannot make the folder ({folder.absolute()}: {error.strerror}). Name another.") from None
    if foreign:
        raise Mistake(f"the output folder is not a prepared corpus ({folder.absolute()}). Name another with --out.")
    if (folder / shards.META).exists() and not overwrite:
        raise Mistake(f"there is a prepared corpus already ({folder.absolute()}). Use --overwrite or another --out.")
    documents = size = 0
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(folder))
        if overwrite:
            shards.clear(folder)
        writer = shards.Writer(folder, made, shard_tokens, source)
        stack.callback(lambda: writer.file.close())
        resumed, pending = writer.position, collections.deque()
        bar = stack.enter_context(
            tqdm(total=sum(s.st_size for s in status), unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        )

        def take():
            future, read = pending.popleft()
            writer.add(future.result())
            bar.update(read)

        pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(tokenizer,))
        try:
            stack.enter_context(pool)
            for number, (batch, read) in enumerate(batches(files)):
                documents += sum(begins for begins, _ in batch)
                size += sum(len(text.encode("utf-8")) for _, text in batch)
                if number < resumed:
                    bar.update(read)
                    continue
                pending.append((pool.submit(encode, batch, number == 0), read))
                if len(pending) > 2 * workers:
                    take()
            while pending:
                take()
            if not documents:
                raise Mistake(f"there is no text in the files ({', '.join(names)}). Name others.")
            return writer.close(documents=documents, bytes=size)
        except (OSError, concurrent.futures.process.BrokenProcessPool) as error:
            raise OSError(f"cannot go on ({error}). Finished shards are kept: mend it and start again.") from None


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
    given = command.parse_args(argv)

    def body():
        meta = prepare(given.texts, given.out, given.tokenizer, given.workers, given.shard_tokens, given.overwrite)
        found = f"{meta['documents']:,} documents, {meta['bytes']:,} bytes, {meta['tokens']:,} tokens"
        print(f"{found} in {given.out} ({len(meta['shards'])} files)")
        print(f"train on them: python train.py --data {given.out} --tokenizer {given.tokenizer}")

    command.run(body, "nobody reads the output any more (broken pipe). The corpus is prepared.")


if __name__ == "__main__":
    main(sys.argv[1:])
