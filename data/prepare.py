"""Text of any size -> token ids in shards: python data/prepare.py texts/ --tokenizer gpt2 --out data/texts.

A .txt file is one document; a .jsonl file has one in the "text" of each line; either may be compressed as .gz. If a
preparation is killed, start it again: it goes on where its last finished shard ends."""

import codecs
import json
import os
import re
import shlex
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt.command_line import CommandLine, installed
from gpt.config import Failure, Mistake
from gpt.screen import is_terminal, tell
from gpt.training.lock import held

with installed():
    from tqdm import tqdm

    from gpt.training import corpus, shards
    from gpt.training.workers import begin, delayed, make_tokenizer, open_pool

MOST_WORKERS = 61  # Windows cannot wait for more processes
BLOCK = 2**20  # bytes read at a time, and about the characters that a worker encodes at a time
JSON_LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (".txt", ".txt.gz", *JSON_LINES)
# A text may be cut before white space that follows another character: there GPT-2's pattern always ends a word,
# whatever comes before or after, and no merge crosses the end of a word. A text without white space is encoded whole.
CUT = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)


def pieces(path: Path, passed: corpus.Passed):
    """The file's documents in pieces: (whether a document begins, text, the file's bytes read since the last piece).
    A file without any is added to `passed`."""
    before, empty, read = 0, True, lines if path.name.endswith(JSON_LINES) else blocks
    with corpus.opened(path) as (file, raw):
        for begins, text in read(file):
            if read is blocks and begins and text.isspace():  # the whole file
                continue
            yield begins, text, raw.tell() - before
            before, empty = raw.tell(), False
    if empty:
        passed.setdefault("empty", []).append(path)


def blocks(file, size: int = BLOCK):
    """One document of any length, read `size` bytes at a time and cut where it changes no id."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    uncut, last, begins, offset = [], "", True, file.tell()
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


def batches(files: list[Path], passed: corpus.Passed):
    """Batches of about BLOCK characters, each for one worker: ([(whether a document begins, text)], the files' bytes
    read for it)."""
    batch, characters, size = [], 0, 0
    for path in files:
        for begins, text, read in pieces(path, passed):
            batch.append((begins, text))
            characters, size = characters + len(text), size + read
            if characters >= BLOCK:
                yield batch, size
                batch, characters, size = [], 0, 0
    if batch:
        yield batch, size


def write_ids(
    files: list[Path], writer: shards.Writer, tokenizer: str, workers: int, passed: corpus.Passed
) -> tuple[int, int]:
    """Encode the files, in worker processes if they are several, and write the ids in order, from the writer's position
    on. Returns how many documents the files have, and how many bytes of text."""
    documents, size, written = 0, 0, writer.position
    total = sum(path.stat().st_size for path in files)
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=not is_terminal(sys.stderr)) as bar,
        open_pool(workers) as pool,
    ):
        jobs = (
            (batch, read, None if number < written else begin(pool, batch, tokenizer, number == 0))
            for number, (batch, read) in enumerate(batches(files, passed))
        )
        for batch, read, ids in delayed(jobs, 2 * workers if pool else 0):
            documents += sum(begins for begins, _ in batch)
            size += sum(len(text.encode("utf-8")) for _, text in batch)
            if ids:
                writer.add(ids())
            bar.update(read)
    return documents, size


def open_folder(out: str, overwrite: bool) -> Path:
    """Make the output folder. Raises Mistake if it has other files, or has a corpus and must not be overwritten."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole, others = shards.whole(folder), [path for path in folder.iterdir() if not path.name.startswith(".")]
        ours = whole or (shards.unfinished(folder) and not os.path.exists(folder / shards.META))
    except OSError as error:
        raise Mistake(f"cannot make the folder ({folder.absolute()}: {error.strerror}). Name another.") from None
    if not ours and (others or os.path.exists(folder / shards.PROGRESS)):
        raise Mistake(f"the output folder is not a prepared corpus ({folder.absolute()}). Name another with --out.")
    ended = whole and shards.unfinished(folder).get("shards") == whole["shards"]  # but for its last lines
    if whole and not (overwrite or ended):
        raise Mistake(f"there is a prepared corpus already ({folder.absolute()}). Use --overwrite or another --out.")
    return folder


def prepare(texts: list[str], out: str, tokenizer: str, workers: int, shard_tokens: int, overwrite: bool) -> str:
    """Write the shards of all files; returns what was read and written. An old corpus is replaced when the new one is
    whole. Raises Mistake for a mistake of the user, and Failure, with the finished shards kept, for a full disk or a
    lost worker."""
    for name, value, most in (("--workers", workers, MOST_WORKERS), ("--shard-tokens", shard_tokens, 2**40)):
        if not 1 <= value <= most:
            raise Mistake(f"{name} is out of range ({value}). It must be from 1 to {most}.")
    passed: corpus.Passed = {}
    made, files = make_tokenizer(tokenizer), [file for each in texts for file in corpus.find(each, SUFFIXES, passed)]
    for file in files:  # many a mistake shows in the first bytes
        with corpus.opened(file):
            pass
    with held(open_folder(out, overwrite)):
        folder = open_folder(out, overwrite)  # again: another process may just have finished
        source = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        try:
            writer = shards.Writer(folder, made, shard_tokens, {"files": source}, overwrite)
            documents, size = write_ids(files, writer, tokenizer, workers, passed)
            if not documents:
                raise Mistake(f"there is no text in the files ({', '.join(texts)}). Name others.")
            meta = writer.finish(documents=documents, bytes=size)
        except (OSError, BrokenProcessPool) as error:
            remedy = "Finished shards are kept: mend the cause and start again"
            raise Failure(f"cannot go on ({error}). {remedy}.") from None
    read = f"{len(files) - len(passed.get('empty', []))} files with {documents:,} documents of {size:,} bytes"
    return f"{read}{corpus.passed_over(passed)}; {meta['tokens']:,} tokens in {out} ({len(meta['shards'])} files)"


def main(argv: list[str]):
    command = CommandLine({"": "Name texts first, then the flags."}, prog="data/prepare.py", description=__doc__)
    command.add_argument("texts", nargs="+", metavar="FOLDER_OR_FILE", help="what to read, in this order")
    command.add_argument("--out", required=True, metavar="FOLDER", help="where to, for train.py --data FOLDER")
    command.add_argument("--tokenizer", default="gpt2", help="bytes or gpt2 (default: %(default)s)")
    workers = {"type": int, "default": min(os.cpu_count() or 1, MOST_WORKERS), "metavar": "N"}
    command.add_argument("--workers", **workers, help="processes (default: one for each core, %(default)s)")
    size = {"type": int, "default": 2**27, "metavar": "N"}
    command.add_argument("--shard-tokens", **size, help="tokens in a shard (default: %(default)s)")
    command.add_argument("--overwrite", action="store_true", help="replace the corpus in --out, at the end")
    arguments = command.parse_args(argv)

    def body():
        tell(prepare(**vars(arguments)))
        tell(f"train on them: python train.py --data {shlex.quote(arguments.out)} --tokenizer {arguments.tokenizer}")

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])
