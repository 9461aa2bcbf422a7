"""The speed of this code and of transformers, if that is installed: python benchmarks/speed.py decode train norm.

Prints a Markdown table. Each number is a median; the candidates of a comparison run in turns, on the same machine."""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from gpt import GPT, LayerNorm, ModelConfig  # noqa: E402
from gpt.generate import generate  # noqa: E402
from gpt.loss import NextToken  # noqa: E402
from gpt.pretrained import export  # noqa: E402
from gpt.training.device import Compute, compiled, for_sampling  # noqa: E402
from gpt.training.optim import make_optimizer  # noqa: E402
from gpt.training.settings import configure, read_toml  # noqa: E402

SMALL = configure(read_toml(ROOT / "configs" / "gpt2.toml"))
TINY = configure({})
VOCABULARY = 50257
ROUNDS = 1000  # the most rounds of a comparison
PEER = importlib.util.find_spec("transformers") is not None


def new_model(config=None) -> GPT:
    """A new model of this shape, by default GPT-2 small's."""
    torch.manual_seed(0)
    vocab_size = 256 if config is TINY else VOCABULARY
    return GPT(ModelConfig(**vars((config or SMALL).model) | {"vocab_size": vocab_size}))


def peer(model: GPT):
    """The same weights in transformers."""
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        export(model, folder)
        return GPT2LMHeadModel.from_pretrained(folder).train()


def medians(rounds: int, **actions) -> dict[str, float]:
    """Median seconds of each action. They are called in turns, and the first round is not counted."""
    times = {name: [] for name in actions}
    for turn in range(min(rounds, ROUNDS) + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def row(name: str, ours: str, peers: str = "", ratio: float | None = None, limit: str = ""):
    print(f"| {name} | {ours} | {peers} | {'' if ratio is None else f'{ratio:.2f}'} | {limit} |", flush=True)


def limits() -> tuple[float, float]:
    """This machine's operations a second in a float32 matrix product, and the bytes a second that it reads."""
    a, large = torch.randn(2048, 2048), torch.ones(2**27)
    times = medians(5, product=lambda: a @ a, read=lambda: large.sum())
    return 2 * 2048**3 / times["product"], large.nbytes / times["read"]


@torch.no_grad()
def decode():
    """100 tokens after a prompt of 32, GPT-2 small."""
    reading, prompt, new = limits()[1], torch.randint(VOCABULARY, (1, 32)), 100
    actions, bytes_read = {}, {}
    if PEER:
        other = peer(new_model()).eval()
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        actions["transformers"] = lambda: other.generate(prompt, **settings)
    for dtype in ("float32", "bfloat16", "float16"):
        ours = for_sampling(new_model(), Compute("cpu", dtype, "off"))
        bytes_read[dtype] = sum(p.nbytes for p in ours.parameters())
        actions[dtype] = lambda ours=ours: generate(ours, prompt, new, temperature=0)
        actions[dtype + ", 8 at a time"] = lambda ours=ours: generate(ours, prompt.repeat(8, 1), new, temperature=0)
    times = medians(3, **actions)
    peers = f"{new / times['transformers']:.1f} tokens/s" if PEER else ""
    for name, seconds in times.items():
        if name != "transformers":
            rows, dtype = 8 if "8" in name else 1, name.partition(",")[0]
            most = f"{rows * reading / bytes_read[dtype]:.0f} tokens/s reading the weights once for each token"
            ratio = rows * times["transformers"] / seconds if PEER else None
            row(f"decode, {name}", f"{rows * new / seconds:.1f} tokens/s", peers, ratio, most if rows == 1 else "")
    long = torch.randint(VOCABULARY, (1, 512))
    ours = for_sampling(new_model(), Compute("cpu", "float32", "off")).eval()
    actions = {"ours": lambda: ours(long)} | ({"peer": lambda: other(long)} if PEER else {})
    times = medians(3, **actions)
    speed = {name: 512 / seconds for name, seconds in times.items()}
    ratio = times["peer"] / times["ours"] if PEER else None
    row("prefill of 512, float32", f"{speed['ours']:.0f} tokens/s", f"{speed['peer']:.0f}" if PEER else "", ratio)


def stepper(model, config, tokens, loss):
    """A function that does one training step."""
    ours = isinstance(model, GPT)
    optimizer = make_optimizer(model, config) if ours else torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_loss(model, tokens):
    return NextToken(model)(tokens)


def peer_loss(model, tokens):
    return model(tokens[:, :-1].contiguous(), labels=tokens[:, :-1].contiguous()).loss


def small_stepper(name: str):
    """A training step of GPT-2 small on 2 x 512 tokens, "ours" or that of the "peer"."""
    model, loss = (new_model(), our_loss) if name == "ours" else (peer(new_model()), peer_loss)
    return stepper(model, SMALL, torch.randint(VOCABULARY, (2, 513)), loss)


def peak_memory(name: str) -> float:
    """Peak memory in GiB of a process that does two training steps."""
    command = [sys.executable, __file__, "--memory", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def memory(name: str):
    """What that process does: it prints its peak. Linux only."""
    step = small_stepper(name)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of making the model
    for _ in range(2):
        step()
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # getrusage's peak includes the parent's
    print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20)


def train():
    """A training step of GPT-2 small on 2 x 512 tokens: its time and its memory."""
    product, names = limits()[0], ["ours", "peer"] if PEER else ["ours"]
    times = medians(3, **{name: small_stepper(name) for name in names})
    operations = 6 * new_model().count_parameters() * 1024
    share = f"{operations / times['ours'] / product:.0%} of the float32 matrix product's rate, counted as 6 N a token"
    peers = f"{times['peer']:.2f} s" if PEER else ""
    ratio = times["ours"] / times["peer"] if PEER else None
    row("training step, GPT-2 small, 2 x 512", f"{times['ours']:.2f} s", peers, ratio, share)
    peaks = {name: peak_memory(name) for name in names}
    ratio = peaks["ours"] / peaks["peer"] if PEER else None
    row("its peak memory", f"{peaks['ours']:.2f} GiB", f"{peaks['peer']:.2f} GiB" if PEER else "", ratio)


class LibraryNorm(LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def norm():
    """The hand-written norm beside the library's: alone, forward and backward, and in a training step."""
    for shape in ((768, 128), (1024, 768)):
        layers = {"ours": LayerNorm(shape[-1]), "library": LibraryNorm(shape[-1])}
        x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
        actions = {name: lambda layer=layer, x=x, g=g: layer(x).backward(g) for name, layer in layers.items()}
        times = medians(300, **actions)
        row(f"norm of {shape}", *(f"{times[n] * 1e6:.0f} us" for n in times), times["ours"] / times["library"])
    for size, config, rows, rounds in (("default", TINY, 12, 60), ("GPT-2 small", SMALL, 1, 5)):
        steps = {}
        for name, layer in (("ours", LayerNorm), ("library", LibraryNorm)):
            model = new_model(config)
            for module in model.modules():
                if isinstance(module, LayerNorm):
                    module.__class__ = layer
            tokens = torch.randint(256, (rows, config.model.context_length + 1))
            steps[name] = stepper(model, config, tokens, our_loss)
        times = medians(rounds, **steps)
        texts = [f"{seconds * 1e3:.1f} ms" for seconds in times.values()]
        row(f"step, {size}, with either", *texts, times["ours"] / times["library"])


def start():
    """From the command to its first output."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "r"
        tiny = ["--steps", "1", "--eval-every", "1", "--out", run]
        subprocess.run([sys.executable, ROOT / "train.py", *tiny], check=True, capture_output=True)

        def first(*arguments):
            process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process.stdout.read(1)
            process.kill()
            process.communicate()

        sampling = [ROOT / "sample.py", run, "--max-new-tokens", "200"]
        times = medians(
            5,
            torch=lambda: first("-c", "import torch; print(1)"),
            help=lambda: first(ROOT / "train.py", "--help"),
            sample=lambda: first(*sampling),
        )
    row("train.py --help", f"{times['help']:.2f} s")
    beyond = f"{times['sample'] - times['torch']:.2f} s after importing torch"
    row("sample.py, first token", f"{times['sample']:.2f} s", "", None, beyond)


def loss():
    """Seconds, evaluation left out, to a validation loss of 1.874 on tiny Shakespeare: Muon's recipe and AdamW's."""
    ends = {"fast": [], "adamw": []}
    for seed in (1337, 1338, 1339):
        for name, config in (("fast", "shakespeare-fast.toml"), ("adamw", "shakespeare.toml")):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--out", f"{folder}/r", "--seed", seed, "--eval-every", 10**6, "--log-every", 1]
                command = [sys.executable, ROOT / "train.py", ROOT / "configs" / config, *flags]
                subprocess.run(list(map(str, command)), check=True, capture_output=True)
                records = [json.loads(line) for line in open(f"{folder}/r/metrics.jsonl", encoding="utf-8")]
                tokens = 12 * 64
                ends[name].append((records[-1]["val_loss"], sum(tokens / r["tokens_per_s"] for r in records[:-1])))
    seconds = {name: statistics.median(s for _, s in values) for name, values in ends.items()}
    texts = {n: f"{seconds[n]:.0f} s to {', '.join(f'{v:.3f}' for v, _ in ends[n])}" for n in ends}
    row("tiny Shakespeare, 3 seeds", texts["fast"], texts["adamw"] + " (AdamW)", seconds["fast"] / seconds["adamw"])


PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}


def gpu():
    """GPT-2 small trained on one GPU: 16 x 1,024 tokens in bfloat16, compiled, as configs/gpt2.toml does it."""
    if not torch.cuda.is_available():
        return row("GPU", "none here")
    name, tokens = torch.cuda.get_device_name(), torch.randint(VOCABULARY, (16, 1025))
    compute, model = Compute("cuda", "bfloat16", "on"), new_model().cuda()
    net, _ = compiled(NextToken(model), compute.put(tokens), compute)

    def loss(model, tokens):
        with compute.autocast():
            return net(compute.put(tokens))

    step = stepper(model, SMALL, tokens, loss)

    def steps():
        for _ in range(20):
            step()
        torch.cuda.synchronize()

    speed = 20 * tokens[:, 1:].numel() / medians(3, steps=steps)["steps"]
    m = SMALL.model
    operations = 6 * model.count_parameters() + 12 * m.n_layers * m.d_model * m.context_length
    peak = next((value for key, value in PEAKS.items() if key in name), None)
    share = f"{speed * operations / peak:.0%} of {peak / 1e12:.0f} x 10^12 operations a second" if peak else ""
    row(f"training on {name}", f"{speed:,.0f} tokens/s", "", None, share)


PARTS = {part.__name__: part for part in (decode, train, norm, start, gpu, loss)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
        sys.exit()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores\n")
    print("| | ours | transformers | ratio | limit |\n|---|---|---|---|---|")
    for part in arguments.parts or PARTS:
        PARTS[part]()
