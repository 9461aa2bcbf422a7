"""What is known about the published weights."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from gpt import hub
from gpt.generate import generate
from gpt.model import next_token_loss

# (norm, blocks, heads, width, vocabulary, context): parameters, those of norms.
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
# Of GPT-2 small: the logits at the first position of any prompt that starts with "Hello".
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
# Losses of AdamW at 1e-4 on one batch, the first 4 x 64 tokens of tiny Shakespeare with an end-of-text id before every
# paragraph, by a published C implementation.
OVERFITTING = (5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080, 0.376511)


class Fact(NamedTuple):
    """Something known: what, the value expected and the value found, and whether they agree (None: not found out)."""

    what: str
    expected: object
    found: object
    agrees: bool | None


def shape(config) -> tuple:
    """As a key of SIZES."""
    return config.norm, config.n_layers, config.n_heads, config.d_model, config.vocab_size, config.context_length


def equal(what, expected, found) -> Fact:
    return Fact(what, expected, found, expected == found)


def close(what, expected, found, tolerance) -> Fact:
    """Of two rows of numbers."""
    agrees = all(abs(a - b) <= tolerance for a, b in zip(expected, found, strict=True))
    return Fact(what, *(" ".join(f"{number:.6g}" for number in numbers) for numbers in (expected, found)), agrees)


def file_facts(path: Path, n_tensors: int) -> Iterator[Fact]:
    """Those of GPT-2 small's file as it was published."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    for (what, expected), found in zip(GPT2_FILE.items(), (path.stat().st_size, digest, n_tensors)):
        yield equal(what, expected, found)


def model_facts(model) -> Iterator[Fact]:
    """Numbers of parameters, as published or else as the architecture has them, and that the logits are finite."""
    c = model.config
    in_norms = 2 * c.d_model * (2 * c.n_layers + (c.norm == "pre"))
    in_blocks = c.n_layers * (12 * c.d_model**2 + 9 * c.d_model)
    total = (c.vocab_size + c.context_length) * c.d_model + in_blocks + in_norms
    total, in_norms = SIZES.get(shape(c), (total, in_norms))
    yield equal("parameters", total, model.count_parameters())
    yield equal("of them in norms", in_norms, model.count_parameters("norm"))
    with torch.no_grad():
        logits = model(torch.arange(min(c.context_length, 64))[None] % c.vocab_size)
    yield equal("logits are finite", True, bool(logits.isfinite().all()))


def greedy_fact(model) -> Fact:
    """The most likely continuation by GPT-2 small or GPT-1."""
    given, expected = GREEDY[model.config.norm]
    found = generate(model, torch.tensor([given]), len(expected), temperature=0.0)[0, len(given) :]
    return equal(f"greedy after {given}", expected, found.tolist())


def gpt2_facts(model, tokenizer) -> Iterator[Fact]:
    """What GPT-2 small gives for a few tokens. `tokenizer` is GPT-2's."""
    with torch.no_grad():
        logits = model(torch.tensor([MEAN_PROMPT]))[0, :, : tokenizer.vocab_size]
        embedding = model.token_embedding.weight[HELLO]
        first_norm = model.blocks[0].attn_norm(embedding)[: len(FIRST_NORM)]
    yield close(f"logits {[*LOGITS]} after {HELLO}", LOGITS.values(), logits[0, [*LOGITS]].tolist(), 1e-3)
    yield close(f"mean logit of {MEAN_PROMPT}", [MEAN_LOGIT], [logits.mean().item()], 1e-3)
    yield close(f"first norm of embedding {HELLO}", FIRST_NORM, first_norm.tolist(), 1e-5)
    prompt, expected = TURING
    ids = torch.tensor([tokenizer.encode_prompt(prompt).tolist()])
    new = generate(model, ids, len(tokenizer.encode(expected)), temperature=0.0)[0, ids.size(1) :]
    found = tokenizer.decode_bytes(new.tolist()).decode("utf-8", "replace")
    yield equal(f"greedy after {prompt!r}", expected, found)


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


def check(model, folder: Path) -> Iterator[Fact]:
    """All that is known about the `model` loaded from `folder`; that of GPT-2 small trains it at last."""
    from gpt.tokenizer import GPT2BPE
    from gpt.training import corpus

    stored, small = hub.tensors(folder), shape(model.config) == GPT2_SMALL
    if small and set(stored.values()) == {folder / "model.safetensors"}:
        yield from file_facts(folder / "model.safetensors", len(stored))
    yield from model_facts(model)
    if shape(model.config) in (GPT2_SMALL, GPT1):
        yield greedy_fact(model)
    if small:
        yield from gpt2_facts(model, GPT2BPE())
        try:
            text = corpus.shakespeare()[0]
        except ValueError as error:  # no network
            yield Fact("losses of ten updates on one batch", "tiny Shakespeare", str(error), None)
        else:
            yield overfitting_fact(model, GPT2BPE(), text)
