"""Sampling, with a key-value cache that the model's attention layers hold while they are asked."""

import codecs
import contextlib
import math
from collections.abc import Iterator

import torch

from gpt.config import Mistake


class KVCache:
    """The keys and values of one attention layer for the tokens so far, at most `length` of them; on a CPU in float32,
    since torch's attention of one token is five times slower there in 16 bits."""

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
    """Evaluation mode, no gradients, and each attention layer's cache in it, for the length of a `with` block."""
    training = model.training
    if training:  # asked first, since both walk over all modules, at every token
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


def check(vocab_size, max_new_tokens, temperature, top_k=None, top_p=None, seed=None):
    """Raise Mistake for a sampling setting that is out of range or has no effect."""
    if max_new_tokens < 1:
        raise Mistake(f"max_new_tokens is out of range ({max_new_tokens}). It must be 1 or more.")
    if not 0 <= temperature < math.inf:
        raise Mistake(f"temperature is out of range ({temperature}). It must be 0, which is greedy, or above.")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise Mistake(f"top_k is out of range ({top_k}). It must be from 1 to the vocabulary's size, {vocab_size}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise Mistake(f"top_p is out of range ({top_p}). It must be above 0 and at most 1.")
    if seed is not None and not 0 <= seed < 2**62:
        raise Mistake(f"seed is out of range ({seed}). It must be at least 0 and below 2**62.")
    if temperature == 0 and (top_k, top_p) != (None, None):
        raise Mistake("top_k and top_p have no effect at temperature 0, which is greedy. Leave them out.")


def choose(logits, temperature: float, top_k: int | None, top_p: float | None, generators) -> torch.Tensor:
    """(B, V) logits -> (B,) ids on the CPU: the likeliest at temperature 0, else drawn from
    softmax(logits / temperature) over the `top_k` likeliest ids, and of those the fewest that hold `top_p` of the
    probability (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751). Row b draws from generators[b]."""
    logits = logits.float().cpu()  # random numbers differ between devices
    if temperature == 0:
        return logits.argmax(-1)
    top, order = logits.topk(top_k or logits.size(-1)) if top_k or top_p else (logits, None)
    # Less the largest first, and in float64, since a small temperature would overflow.
    p = ((top - top.amax(-1, keepdim=True)).double() / temperature).softmax(-1)
    if top_p is not None:
        p = p.where(p.cumsum(-1) - p < top_p, 0)
    drawn = torch.stack([row.multinomial(1, generator=generator) for row, generator in zip(p, generators)])
    return (drawn if order is None else order.gather(-1, drawn)).squeeze(-1)


def stream(
    model,
    tokens,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
) -> Iterator[torch.Tensor]:
    """Continue (B, T) tokens, T at least 1: yields `max_new_tokens` times the (B,) next ids, on the CPU. Ids from
    `vocab_size` on, those of a padded vocabulary, are never chosen.

    The model sees the last context_length tokens. Row b draws from its own generator, seeded with seed + b. With the
    cache each token is computed once until the context is full; from there on every step moves all positions by
    one, so nothing can be kept and each step costs a whole context, with or without a cache.
    Raises Mistake for settings that are out of range.
    """
    vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
    check(vocab_size, max_new_tokens, temperature, top_k, top_p, seed)
    context = model.config.context_length
    generators = [torch.Generator() for _ in tokens]
    for row, generator in enumerate(generators):
        generator.seed() if seed is None else generator.manual_seed(seed + row)
    caches = {layer: KVCache(context) for layer in model.modules() if use_cache and hasattr(layer, "cache")}
    start = 0
    for _ in range(max_new_tokens):
        if tokens.size(1) > context:
            tokens, caches, start = tokens[:, -context:], {}, 0
        with _inference(model, caches):
            x = model.residual_stream(tokens[:, start:], start)
            logits = model.readout(x[:, -1:])[:, 0, :vocab_size]
        if caches:
            start = tokens.size(1)
        ids = choose(logits, temperature, top_k, top_p, generators)
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
    """(B, T) tokens -> (B, T + max_new_tokens), the tokens and what `stream` continues them with, on their device."""
    new = list(stream(model, tokens, max_new_tokens, temperature, top_k, top_p, seed, use_cache))
    return torch.cat([tokens, torch.stack(new, dim=1).to(tokens.device)], dim=1)


def stream_text(
    model, tokenizer, prompt: str, max_new_tokens: int, stop: str | None = None, **settings
) -> Iterator[str]:
    """Continue a text: yields pieces of whole characters until max_new_tokens, an end-of-text id or the text `stop`,
    which is left out; nothing but max_new_tokens ends it if `stop` is "". An empty prompt is the tokenizer's own start.
    The other settings are those of `stream`."""
    held = ""  # what may turn out to be the beginning of `stop`
    for piece in _pieces(model, tokenizer, prompt, max_new_tokens, stop == "", settings):
        held += piece
        if stop and stop in held:
            yield held.partition(stop)[0]
            return
        waiting = max((n for n in range(1, len(stop or "")) if held.endswith(stop[:n])), default=0)
        yield held[: len(held) - waiting]
        held = held[len(held) - waiting :]
    if held:
        yield held


def _pieces(model, tokenizer, prompt, max_new_tokens, endless, settings):
    device = model.token_embedding.weight.device
    tokens = torch.tensor([tokenizer.encode_prompt(prompt or tokenizer.start).tolist()], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for ids in stream(model, tokens, max_new_tokens, vocab_size=tokenizer.vocab_size, **settings):
        if ids[0] == tokenizer.end_of_text and not endless:
            break
        yield decoder.decode(tokenizer.decode_bytes(ids.tolist()))
    yield decoder.decode(b"", final=True)
