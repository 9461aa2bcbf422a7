"""Sampling: which id comes next, keys and values kept from token to token, and text in whole characters."""

import codecs
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpt.config import SEEDS, Mistake, require


@dataclass(frozen=True)
class Sampling:
    """How a text is continued, checked when it is made; raises Mistake.

    At temperature 0 the likeliest id is taken. Above, an id is drawn from softmax(logits / temperature). `top_k` limits
    the draw to that many likeliest ids, and `top_p` to the fewest likeliest ids that hold this share of the probability
    (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751). Row b of a batch draws from its own generator, seeded
    with seed + b. Ids from `vocab_size` on, which only pad the vocabulary, are never chosen.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    use_cache: bool = True
    vocab_size: int = 2**24

    def __post_init__(self):
        require(self.max_new_tokens >= 1, self, "max_new_tokens", "1 or more")
        require(0 <= self.temperature < math.inf, self, "temperature", "0, which is greedy, or above")
        known = f"from 1 to the vocabulary's size, {self.vocab_size}; left out, it limits nothing"
        require(self.top_k is None or 1 <= self.top_k <= self.vocab_size, self, "top_k", known)
        require(self.top_p is None or 0 < self.top_p <= 1, self, "top_p", "above 0 and at most 1")
        require(self.seed is None or 0 <= self.seed < SEEDS, self, "seed", "at least 0 and below 2**63")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise Mistake("top_k and top_p have no effect at temperature 0, which is greedy. Leave them out.")

    def generators(self, rows: int) -> list[torch.Generator]:
        """One for each row of a batch."""
        generators = [torch.Generator() for _ in range(rows)]
        for row, generator in enumerate(generators):
            generator.seed() if self.seed is None else generator.manual_seed(self.seed + row)
        return generators

    def choose(self, logits, generators) -> torch.Tensor:
        """(B, V) logits -> (B,) ids on the CPU."""
        logits = logits[:, : self.vocab_size].float().cpu()  # random numbers differ between devices
        if self.temperature == 0:
            return logits.argmax(-1)
        top, order = logits, None
        if self.top_k or self.top_p:
            top, order = logits.topk(self.top_k or logits.size(-1))
        # The largest is subtracted first, and all is in float64: a small temperature would overflow.
        p = ((top - top.amax(-1, keepdim=True)).double() / self.temperature).softmax(-1)
        if self.top_p is not None:
            p = p.where(p.cumsum(-1) - p < self.top_p, 0)
        drawn = torch.stack([row.multinomial(1, generator=generator) for row, generator in zip(p, generators)])
        return (drawn if order is None else order.gather(-1, drawn)).squeeze(-1)


class KVCache:
    """The keys and values of one attention layer for at most `length` tokens. On a CPU they are float32: there torch's
    attention for one token is five times slower in 16 bits."""

    def __init__(self, length: int):
        self.length, self.used = length, 0

    def append(self, k, v):
        """Add the (B, H, T, D) keys and values of T tokens; returns those of all tokens."""
        if self.used == 0:
            B, H, _, D = k.shape
            dtype = torch.promote_types(k.dtype, torch.float32) if k.device.type == "cpu" else k.dtype
            self.k, self.v = (x.new_empty(B, H, self.length, D, dtype=dtype) for x in (k, v))
        start, self.used = self.used, self.used + k.size(2)
        self.k[:, :, start : self.used] = k
        self.v[:, :, start : self.used] = v
        return self.k[:, :, : self.used], self.v[:, :, : self.used]


@contextlib.contextmanager
def _inference(model, caches):
    """For the length of a `with` block: evaluation mode, no gradients, and its cache in each attention layer."""
    training = model.training
    if training:  # a change of mode visits every module: avoid it per token
        model.eval()
    for layer, cache in caches.items():
        layer.cache = cache
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in caches:
            layer.cache = None
        if training:
            model.train()


def stream(model, tokens, sampling: Sampling) -> Iterator[torch.Tensor]:
    """Continue (B, T) tokens, T at least 1: yields max_new_tokens times the (B,) next ids, on the CPU.

    The model sees the last context_length tokens. With the cache each token is computed once until the context is full;
    then the window slides, every position changes, and the cache is useless: each step computes the whole context.
    """
    vocab_size = min(sampling.vocab_size, model.config.vocab_size)
    sampling = dataclasses.replace(sampling, vocab_size=vocab_size)  # checks top_k
    context, generators = model.config.context_length, sampling.generators(len(tokens))
    layers = [layer for layer in model.modules() if sampling.use_cache and hasattr(layer, "cache")]
    caches, start = {layer: KVCache(context) for layer in layers}, 0
    for _ in range(sampling.max_new_tokens):
        if tokens.size(1) > context:
            tokens, caches, start = tokens[:, -context:], {}, 0
        with _inference(model, caches):
            x = model.residual_stream(tokens[:, start:], start)
            logits = model.readout(x[:, -1:])[:, 0]
        if caches:
            start = tokens.size(1)
        ids = sampling.choose(logits, generators)
        yield ids
        tokens = torch.cat([tokens, ids[:, None].to(tokens.device)], dim=1)


def generate(
    model,
    tokens,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    use_cache: bool = True,
) -> torch.Tensor:
    """(B, T) tokens -> (B, T + max_new_tokens), the tokens and what follows, on the same device. The settings are those
    of Sampling. The model keeps its mode. Raises Mistake for a setting that is out of range."""
    vocab_size = model.config.vocab_size
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, use_cache, vocab_size)
    ids = list(stream(model, tokens, sampling))
    return torch.cat([tokens, torch.stack(ids, dim=1).to(tokens.device)], dim=1)


def stream_text(model, tokenizer, prompt: str, sampling: Sampling, stop: str | None = None) -> Iterator[str]:
    """Continue a text: yields pieces of whole characters. The text ends after max_new_tokens, at an end-of-text id, or
    before the text `stop`; `stop=""` ignores end-of-text as well. An empty prompt stands for the tokenizer's start."""
    pieces = _pieces(model, tokenizer, prompt or tokenizer.start, sampling, endless=stop == "")
    return until(stop, pieces) if stop else pieces


def _pieces(model, tokenizer, prompt, sampling, endless):
    device = model.token_embedding.weight.device
    tokens = torch.tensor([tokenizer.encode_prompt(prompt).tolist()], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for ids in stream(model, tokens, sampling):
        if ids[0] == tokenizer.end_of_text and not endless:
            break
        yield decoder.decode(tokenizer.decode_bytes(ids.tolist()))
    yield decoder.decode(b"", final=True)


def until(stop: str, pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text up to the text `stop`, which is left out."""
    held = ""  # the end of the text so far, if it may be the beginning of `stop`
    for piece in pieces:
        held += piece
        if stop in held:
            yield held.partition(stop)[0]
            return
        waiting = max((n for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - waiting]
        held = held[len(held) - waiting :]
    if held:
        yield held
