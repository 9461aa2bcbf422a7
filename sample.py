"""Continue a text with a trained model: python sample.py --prompt "The ". Text goes to stdout, the rest to stderr."""

import contextlib
import dataclasses
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `python -P` leaves it out

from gpt.command_line import CommandLine
from gpt.config import SEEDS, Mistake, lookup
from gpt.screen import say
from gpt.training.settings import assumed, from_weights, hint


def sample(words, stack):
    """Write the samples that the command line asks for. Raises Mistake if what it names is not there."""
    from gpt import pretrained
    from gpt.generate import Sampling, stream_text
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, device
    from gpt.training.run import newest_run

    compute = device.choose(words.device, words.dtype, "off", device.look(words.device), training=False)
    source = newest_run() if words.run is None else words.run
    try:
        published = pretrained.recognizes(source)
        if not published:
            source, config, stored = checkpoint.load_run(source, words.checkpoint, hint(str(source)))
    except (Mistake, OSError) as error:
        if os.path.exists(source):
            raise
        reason = error if isinstance(error, Mistake) else f"no run can have this name ({str(source)[:100]}...)."
        raise Mistake(f"{reason} A prompt is --prompt TEXT.") from None
    if published:
        if words.checkpoint is not None:
            raise Mistake(f"published weights have one checkpoint only ({words.checkpoint}). Leave it out.")
        config = from_weights(source)
        origin = ", ".join(["published weights", *assumed(config)])
    else:
        origin = config.data
    if words.num_samples < 1:
        raise Mistake(f"num_samples is out of range ({words.num_samples}). It must be 1 or more.")
    if words.temperature == 0 and (words.seed is not None or words.num_samples > 1):
        raise Mistake("seed and num_samples have no effect at temperature 0, which is greedy. Leave them out.")
    tokenizer = lookup(TOKENIZERS, config.tokenizer, "tokenizer")()
    settings = {name: getattr(words, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    sampling = Sampling(**settings, vocab_size=tokenizer.vocab_size)
    seed = secrets.randbelow(2**31) if words.seed is None else words.seed
    if seed + words.num_samples > SEEDS:
        raise Mistake(
            f"num_samples is out of range ({words.num_samples}). Use at most {SEEDS - seed} from seed {seed} on."
        )
    prompt = read_prompt(words)
    model = device.for_sampling(pretrained.load(source) if published else stored, compute)
    written = None if words.out is None else stack.enter_context(open_new(words.out))
    drawn = f"seed {seed}" if words.temperature else "greedy"
    say(f"{source}: {config.model.norm}, {origin}; {drawn}")

    def write(text):
        print(text, end="", flush=True)
        if written:
            written.write(text)

    context = config.model.context_length
    if len(tokenizer.encode_prompt(prompt)) > context:
        say(f"warning: the model sees only the last {context} tokens of the prompt")
    for number in range(words.num_samples):
        if words.num_samples > 1:
            head = f"--- sample {number + 1}, seed {seed + number}"
            say(head)
            if written:
                written.write(head + "\n")
        write(prompt)
        for piece in stream_text(
            model, tokenizer, prompt, dataclasses.replace(sampling, seed=seed + number), words.stop
        ):
            write(piece)
        write("\n")


def open_new(path: str):
    """A text file, opened; a file that is there is left alone."""
    try:
        return open(path, "x", encoding="utf-8", newline="")
    except OSError as error:
        raise Mistake(f"cannot write the samples ({path}: {error.strerror}). Name a new file.") from None


def read_prompt(words) -> str:
    if words.prompt is not None and words.prompt_file is not None:
        raise Mistake("two prompts (--prompt and --prompt-file). Give one of them.")
    try:
        # fsencode: the bytes that were typed, whatever the locale made of them.
        typed = words.prompt_file is None
        raw = os.fsencode(words.prompt or "") if typed else Path(words.prompt_file).read_bytes()
        return raw.decode("utf-8" if typed else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"cannot read the prompt ({error}). Give UTF-8 text, or the name of a file with it.") from None


def main(argv: list[str]):
    hints = {"": "A prompt is --prompt TEXT."}
    command = CommandLine(hints, prog="sample.py", description=__doc__)
    command.add_argument(
        "run",
        nargs="?",
        metavar="RUN|gpt2|FOLDER",
        help="a run, a checkpoint or published weights (default: newest in runs/)",
    )
    command.add_argument("--prompt", metavar="TEXT", help="text to continue (default: none)")
    command.add_argument("--prompt-file", metavar="FILE", help="the same, from a UTF-8 file")
    command.add_argument("--max-new-tokens", type=int, default=500, metavar="N", help="(default: %(default)s)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: greedy (default: %(default)s)")
    command.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens (default: from all)")
    command.add_argument("--top-p", type=float, metavar="P", help="from the fewest that hold P of the probability")
    command.add_argument("--stop", metavar="TEXT", help="end where this text comes, before it; '': nowhere")
    command.add_argument("--num-samples", type=int, default=1, metavar="N", help="(default: %(default)s)")
    command.add_argument("--seed", type=int, metavar="N", help="repeats a sample (default: a new one, which is shown)")
    command.add_argument("--checkpoint", metavar="best|last|STEP", help="(default: best)")
    command.add_argument("--out", metavar="FILE", help="write the samples into a new file too")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    words = command.parse_args(argv)

    def body():
        with contextlib.ExitStack() as stack:
            sample(words, stack)

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])
