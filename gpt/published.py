"""Facts about the published weights: names, settings, sizes, and results to compare with."""

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from gpt.config import Mistake, ModelConfig, settings_of, typed
from gpt.files import read_json, sha256
from gpt.generate import Sampling, generate, stream_text
from gpt.loss import next_token_loss
from gpt.tokenizer import GPT2BPE

NAMES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt")}
NAMES["distilgpt2"] = "distilbert/distilgpt2"
PLACEMENTS = {"gpt2": "pre", "openai-gpt": "post"}
# Our setting -> that of config.json.
SETTINGS = {
    "context_length": "n_positions",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "norm_eps": "layer_norm_epsilon",
}
ACTIVATIONS = {
    "gpt2": {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
    "openai-gpt": {"gelu": "gelu_tanh", "relu": "relu"},  # GPT-1's "gelu" is the tanh form
}
# Settings that change the computation, and the only value that our model computes. (n_inner may also be 4 n_embd.)
FIXED = {
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# Published module -> ours: outside the blocks, and in each block.
OUTSIDE = {
    "gpt2": {"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "final_norm"},
    "openai-gpt": {"tokens_embed": "token_embedding", "positions_embed": "position_embedding"},
}
BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

# (placement, blocks, heads, width, vocabulary, context): (parameters, those in norms), as in the files.
GPT2_SMALL = ("pre", 12, 12, 768, 50257, 1024)
GPT1 = ("post", 12, 12, 768, 40478, 512)
SIZES = {
    GPT2_SMALL: (124_439_808, 38_400),
    ("pre", 24, 16, 1024, 50257, 1024): (354_823_168, 100_352),
    ("pre", 36, 20, 1280, 50257, 1024): (774_030_080, 186_880),
    ("pre", 48, 25, 1600, 50257, 1024): (1_557_611_200, 310_400),
    GPT1: (116_534_784, 36_864),
}
GPT2_FILE = {
    "bytes of model.safetensors": 548_105_171,
    "its sha256": "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
    "tensors in it": 160,
}
# Of GPT-2 small: some logits after "Hello", the mean logit after "Hello, I am", five numbers of the first norm's output
# for the token embedding of "Hello", and the most likely continuations of two prompts (GPT-1's beside one).
HELLO = 15496
LOGITS = {
    0: -35.2362, 1: -35.3266, 2: -38.9753, 3: -39.3907, 4: -37.6532, 5: -38.6724, 6: -36.0249, 7: -36.4842,
    100: -43.3126, 1000: -40.7498, 10000: -41.9872, 50000: -44.1138,
}  # fmt: skip
MEAN_PROMPT, MEAN_LOGIT = (15496, 11, 314, 716), -111.8947
FIRST_NORM = (-0.114096, -0.146124, -0.052343, -0.206682, -0.284546)
GREEDY = {
    "pre": (
        [464, 3290],
        [373, 1043, 287, 257, 2214, 1474, 262, 16246, 286, 2688, 290, 2688, 27262, 13, 198, 198, 464, 3290],
    ),
    "post": ([481, 4735, 544], [246, 963, 870, 762, 239, 244, 40477, 244, 249, 719, 881, 487, 544, 240, 244, 603, 481]),
}  # fmt: skip
TURING = "Alan Turing theorized that computers would one day become", " the most powerful machines on the planet."
# Losses of ten updates by AdamW at 1e-4 on one batch, by a published C implementation. The batch is the first 4 x 64
# tokens of tiny Shakespeare, with an end-of-text id before every paragraph.
OVERFITTING = (5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080, 0.376511)


def nearest(name: str) -> list[str]:
    """The published names that this one is, or is nearly."""
    names, least = (NAMES.values(), 0.9) if "/" in name else (NAMES.keys(), 0.7)
    return difflib.get_close_matches(name.lower(), names, n=2, cutoff=least)


def table(model_type: str, n_layers: int) -> dict[str, tuple[str, bool]]:
    """Published parameter -> (ours, whether it is transposed), for a "gpt2" or "openai-gpt" of `n_layers` blocks. The
    files have each matrix of a block as [in, out]; of a square one the shape does not show it."""
    blocks = {f"h.{i}.{name}": f"blocks.{i}.{ours}" for i in range(n_layers) for name, ours in BLOCK.items()}
    parameters = {}
    for name, ours in (OUTSIDE[model_type] | blocks).items():
        parameters[f"{name}.weight"] = (f"{ours}.weight", ".c_" in name)
        if "embedding" not in ours:
            parameters[f"{name}.bias"] = (f"{ours}.bias", False)
    return parameters


def read_config(folder: Path) -> ModelConfig:
    """The architecture in a folder's config.json; what files of 2019 leave out is GPT-2's or GPT-1's. Raises Mistake if
    it is neither's, or not as ours."""
    path, fields = folder / "config.json", settings_of(ModelConfig)
    if not path.is_file():
        raise Mistake(f"no weights there ({path}: no such file). Name a folder with config.json and model.safetensors.")
    # null is the default; but where that is true, transformers takes null for false.
    stored = {name: value for name, value in read_json(path).items() if value is not None or FIXED.get(name)}
    try:
        if "model_type" not in stored and "n_embd" in stored:
            stored["model_type"] = "openai-gpt" if "afn" in stored else "gpt2"
        kind = str(stored["model_type"])
        if kind not in PLACEMENTS:
            raise ValueError(f"model_type is {kind}; known are {', '.join(PLACEMENTS)}")
        usual = {"layer_norm_epsilon": 1e-5, "afn": "gelu", "activation_function": "gelu_new"}
        usual["n_positions"] = stored.get("n_ctx", 1024 if kind == "gpt2" else 512)
        for name, value in (usual | stored).items():  # some programs write 12.0 for 12
            stored[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        for name, only in FIXED.items():
            value = 4 * stored["n_embd"] if name == "n_inner" else only
            if stored.get(name, only) not in (only, value):
                raise ValueError(f"{name} is {stored[name]}, and can only be {value}")
        activation = str(stored["afn" if kind == "openai-gpt" else "activation_function"])
        if activation not in ACTIVATIONS[kind]:
            raise ValueError(f"the activation is {activation}; known are {', '.join(ACTIVATIONS[kind])}")
        settings = {name: typed(name, stored[outer], fields[name]) for name, outer in SETTINGS.items()}
        settings |= {"norm": PLACEMENTS[kind], "activation": ACTIVATIONS[kind][activation]}
        return ModelConfig(vocab_size=stored["vocab_size"], **settings)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise Mistake(f"not a GPT-2 or GPT-1 configuration ({path}: {reason:.300}). Name another folder.") from None


class Fact(NamedTuple):
    """A published value beside the measured one, and whether they agree (None: not measured)."""

    name: str
    expected: object
    measured: object
    agrees: bool | None

    def line(self) -> str:
        """As text, with a mark in front where they do not agree."""
        mark = {True: " ", False: "!", None: "?"}[self.agrees]
        return f"{mark} {self.name}: {self.expected}, measured {self.measured}"


def equal(name: str, expected, measured) -> Fact:
    return Fact(name, expected, measured, expected == measured)


def close(name: str, expected, measured, tolerance: float) -> Fact:
    """Of two rows of numbers, which agree if no two differ by more than `tolerance`."""
    agrees = all(abs(a - b) <= tolerance for a, b in zip(expected, measured, strict=True))
    rows = [" ".join(f"{number:.6g}" for number in numbers) for numbers in (expected, measured)]
    return Fact(name, rows[0], rows[1], agrees)


def shape(config) -> tuple:
    """As a key of SIZES."""
    return config.norm, config.n_layers, config.n_heads, config.d_model, config.vocab_size, config.context_length


def file_facts(path: Path) -> list[Fact]:
    """Those of GPT-2 small's file as it was published."""
    with safe_open(path, framework="pt") as tensors:
        measured = path.stat().st_size, sha256(path), len(tensors.keys())
    return [equal(name, expected, value) for (name, expected), value in zip(GPT2_FILE.items(), measured)]


def model_facts(model) -> list[Fact]:
    """Numbers of parameters, as published or as they follow from the architecture, and that the logits are finite."""
    c = model.config
    in_norms = 2 * c.d_model * (2 * c.n_layers + (c.norm == "pre"))
    in_blocks = c.n_layers * (12 * c.d_model**2 + 9 * c.d_model)
    total = (c.vocab_size + c.context_length) * c.d_model + in_blocks + in_norms
    total, in_norms = SIZES.get(shape(c), (total, in_norms))
    with torch.no_grad():
        logits = model(torch.arange(min(c.context_length, 64))[None] % c.vocab_size)
    return [
        equal("parameters", total, model.count_parameters()),
        equal("of them in norms", in_norms, model.count_parameters("norm")),
        equal("logits are finite", True, bool(logits.isfinite().all())),
    ]


def greedy_fact(model) -> Fact:
    """The most likely continuation by GPT-2 small or GPT-1."""
    prompt, expected = GREEDY[model.config.norm]
    ids = generate(model, torch.tensor([prompt]), len(expected), temperature=0.0)[0, len(prompt) :]
    return equal(f"greedy after {prompt}", expected, ids.tolist())


@torch.no_grad()
def gpt2_facts(model, tokenizer) -> list[Fact]:
    """What GPT-2 small gives for a few tokens. `tokenizer` is GPT-2's."""
    logits = model(torch.tensor([MEAN_PROMPT]))[0, :, : tokenizer.vocab_size]
    first_norm = model.blocks[0].attn_norm(model.token_embedding.weight[HELLO])[: len(FIRST_NORM)]
    prompt, expected = TURING
    sampling = Sampling(len(tokenizer.encode(expected)), temperature=0.0)
    return [
        close(f"logits {[*LOGITS]} after {HELLO}", LOGITS.values(), logits[0, [*LOGITS]].tolist(), 1e-3),
        close(f"mean logit of {MEAN_PROMPT}", [MEAN_LOGIT], [logits.mean().item()], 1e-3),
        close(f"first norm of embedding {HELLO}", FIRST_NORM, first_norm.tolist(), 1e-5),
        equal(f"greedy after {prompt!r}", expected, "".join(stream_text(model, tokenizer, prompt, sampling))),
    ]


def overfitting_fact(model, tokenizer, shakespeare: str) -> Fact:
    """The losses of ten updates of GPT-2 small, which change its weights."""
    paragraphs = [tokenizer.encode(paragraph + "\n\n") for paragraph in shakespeare[:4000].split("\n\n")]
    ids = [i for paragraph in paragraphs for i in (tokenizer.end_of_text, *paragraph.tolist())]
    tokens = torch.tensor(ids[: 4 * 64 + 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for _ in OVERFITTING:
        loss = next_token_loss(model(tokens[:-1].view(4, 64)), tokens[1:].view(4, 64))
        losses.append(loss.item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return close("losses of ten updates on one batch", OVERFITTING, losses, 1e-2)


def check(model, folder: Path, shakespeare: Callable[[], list[str]]) -> Iterator[Fact]:
    """All that is known about the `model` loaded from `folder`. GPT-2 small is trained at the end, on the text that
    `shakespeare` returns."""
    small, file = shape(model.config) == GPT2_SMALL, folder / "model.safetensors"
    if small and file.exists():
        yield from file_facts(file)
    yield from model_facts(model)
    if shape(model.config) in (GPT2_SMALL, GPT1):
        yield greedy_fact(model)
    if small:
        yield from gpt2_facts(model, GPT2BPE())
        try:
            yield overfitting_fact(model, GPT2BPE(), shakespeare()[0])
        except Mistake as error:  # no network
            yield Fact("losses of ten updates on one batch", "tiny Shakespeare", str(error), None)
