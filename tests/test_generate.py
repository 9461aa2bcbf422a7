"""Sampling: what may be drawn and how often, the cache, and text in whole characters."""

import math

import pytest
import torch
from toys import toy_model, toy_tokens

from gpt import BLOCKS, GPT, ModelConfig
from gpt.blocks import Block
from gpt.config import Mistake
from gpt.generate import KVCache, Sampling, generate, stream, stream_text, until
from gpt.layers import Attention
from gpt.tokenizer import GPT2BPE, Bytes

GREEDY = {"temperature": 0}


@pytest.mark.parametrize("placement, length", [*((name, 1) for name in BLOCKS), ("pre", 16), ("pre", 17)])
def test_the_cache_changes_nothing_also_past_the_context(placement, length):
    model, tokens = toy_model(norm=placement), toy_tokens(2, length)
    cached, plain = (generate(model, tokens, 18, **GREEDY, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain) and torch.equal(cached[:, :length], tokens) and cached.shape == (2, length + 18)


@pytest.mark.parametrize(
    "placement, chunk, dtype",
    [(placement, 5, dtype) for placement in BLOCKS for dtype in ("float64", "float16")]
    + [("pre", chunk, "float64") for chunk in (1, 2, 15)],
)
def test_cached_logits_in_chunks_are_those_of_one_pass(placement, chunk, dtype):
    model, tokens = toy_model(norm=placement).to(getattr(torch, dtype)), toy_tokens()
    for block in model.blocks:
        block.attn.cache = KVCache(16)
    parts = [model.readout(model.residual_stream(tokens[:, s : s + chunk], s)) for s in range(0, 16, chunk)]
    cached = torch.cat(parts, dim=1)
    for block in model.blocks:
        block.attn.cache = None
    assert (cached - model(tokens)).abs().max() < {"float64": 1e-10, "float16": 0.1}[dtype]


def test_a_block_with_two_attentions_has_a_cache_for_each(monkeypatch):
    class Twice(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.attn2 = Attention(config)

        def forward(self, x):
            x = x + self.attn2(x + self.attn(self.attn_norm(x)))
            return x + self.mlp(self.mlp_norm(x))

    monkeypatch.setitem(BLOCKS, "twice", Twice)
    model, tokens = toy_model(norm="twice"), toy_tokens(2, 3)
    cached, plain = (generate(model, tokens, 20, **GREEDY, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


def test_greedy_takes_the_likeliest_of_the_last_contexts_logits():
    model, tokens = toy_model(), toy_tokens(1, 20)
    expected = tokens
    for _ in range(5):
        expected = torch.cat([expected, model(expected[:, -16:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, tokens, 5, **GREEDY), expected)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-8}, {"temperature": 1e-300}])
def test_limits_that_are_greedy(settings):
    model, tokens = toy_model(), toy_tokens(2, 5)
    assert torch.equal(generate(model, tokens, 9, **settings), generate(model, tokens, 9, **GREEDY))


def test_a_sample_is_a_function_of_its_seed_and_not_of_its_company():
    model, tokens = toy_model(), toy_tokens(1, 5).repeat(3, 1)
    rows = generate(model, tokens, 12, seed=7)
    assert torch.equal(rows, generate(model, tokens, 12, seed=7)) and not torch.equal(rows[0], rows[1])
    for row in range(3):
        assert torch.equal(generate(model, tokens[:1], 12, seed=7 + row)[0], rows[row])
    assert not torch.equal(generate(model, tokens, 12), generate(model, tokens, 12))
    before = torch.get_rng_state()
    generate(model, tokens, 3)
    assert torch.equal(before, torch.get_rng_state())


def frequencies(logits, n=2_000, **settings):
    """How often each id is drawn."""
    ids = Sampling(1, **settings).choose(logits.expand(n, -1), [torch.Generator().manual_seed(0)] * n)
    return torch.bincount(ids, minlength=logits.size(-1)) / n


LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, -9.0])


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 100.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [1]),  # softmax: 0.087 0.644 0.032 0.237 0.000
        ({"top_p": 0.7}, [1, 3]),
        ({"top_p": 0.95}, [0, 1, 3]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"top_k": 2, "top_p": 0.9, "temperature": 2.0}, [1, 3]),
    ],
)
def test_draws_follow_the_softmax_over_what_is_kept(settings, kept):
    masked = torch.full_like(LOGITS, -math.inf)
    masked[kept] = LOGITS[kept] / settings.get("temperature", 1.0)
    drawn = frequencies(LOGITS, **settings)
    assert torch.allclose(drawn, masked.softmax(-1), atol=0.04)
    assert (drawn[[i for i in range(5) if i not in kept]] == 0).all()


def test_equal_logits_do_not_widen_top_k():
    assert (frequencies(torch.zeros(6), top_k=2, n=200) > 0).sum() == 2


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = toy_model(dropout=0.9).train(training)
    pieces = stream(model, toy_tokens(1, 5), Sampling(3, **GREEDY))
    next(pieces)  # also in the middle, when nobody will ask for the rest
    assert model.training == training and all(block.attn.cache is None for block in model.blocks)
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
    expected = generate(model.eval(), toy_tokens(1, 5), 3, **GREEDY)
    assert torch.equal(generate(model.train(training), toy_tokens(1, 5), 3, **GREEDY), expected)  # without dropout


@pytest.mark.parametrize(
    "name, value",
    [("max_new_tokens", 0), ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf)]
    + [("top_k", 0), ("top_k", 62), ("top_p", 0.0), ("top_p", 1.1), ("seed", -1), ("seed", 2**63)],
)
def test_a_setting_out_of_range_is_refused(name, value):
    with pytest.raises(Mistake) as error:
        generate(toy_model(), toy_tokens(), **{"max_new_tokens": 1} | {name: value})
    assert name in str(error.value) and f"({value})" in str(error.value)
    assert name != "top_k" or "61" in str(error.value)  # the vocabulary's size


@pytest.mark.parametrize("name, value", [("top_k", 3), ("top_p", 0.5)])
def test_a_setting_without_effect_is_refused(name, value):
    with pytest.raises(Mistake, match=f"{name}.*temperature 0"):
        Sampling(1, temperature=0, **{name: value})


def test_ids_of_a_padded_vocabulary_are_never_sampled():
    model = toy_model(vocab_size=300)
    with torch.no_grad():
        model.token_embedding.weight[256:] *= 100
    assert (generate(model, toy_tokens(1, 8), 20, seed=1) >= 256).any()
    for settings in (GREEDY, {"temperature": 5.0}, {"top_k": 256}, {"top_p": 0.9}):
        sampling = Sampling(30, **settings, seed=1, vocab_size=256)
        assert all(ids < 256 for ids in stream(model, toy_tokens(1, 8), sampling))


def scripted(ids, vocab_size):
    """A GPT that says the given ids: without branches, each position has an axis that points at the next id."""
    shape = {"n_layers": 1, "n_heads": 1, "d_model": len(ids), "context_length": len(ids)}
    model = GPT(ModelConfig(vocab_size=vocab_size, norm="none", branch_init="zero", **shape))
    model.token_embedding.weight.data.zero_()
    model.token_embedding.weight.data[ids, range(len(ids))] = 1.0
    model.position_embedding.weight.data = 100 * torch.eye(len(ids))
    return model


@pytest.mark.parametrize("tokenizer", [Bytes(), GPT2BPE()], ids=lambda tokenizer: tokenizer.name)
def test_text_is_streamed_in_whole_characters(tokenizer):
    text = "héllo 😀 你好!"
    ids = tokenizer.encode(text).tolist()
    pieces = list(stream_text(scripted(ids, tokenizer.vocab_size), tokenizer, "", Sampling(len(ids), **GREEDY)))
    assert "".join(pieces) == text and len(pieces) == len(ids) + 1
    if tokenizer.name == "bytes":  # the second byte alone is half of é
        assert pieces[:3] == ["h", "", "é"]
        assert list(stream_text(scripted(ids, 256), tokenizer, "", Sampling(2, **GREEDY))) == ["h", "", "\ufffd"]


def test_a_text_ends_where_its_end_is_said():
    tokenizer = GPT2BPE()
    model = scripted([*tokenizer.encode("The dog").tolist(), tokenizer.end_of_text, 5], tokenizer.vocab_size)
    texts = {}
    for stop in (None, "", "og", "<|end"):
        pieces = stream_text(model, tokenizer, "<|endoftext|>", Sampling(4, **GREEDY), stop)
        texts[stop] = "".join(pieces)
    endless = "The dog<|endoftext|>" + tokenizer.decode_bytes([5]).decode()
    assert texts == {None: "The dog", "": endless, "og": "The d", "<|end": "The dog"}


@pytest.mark.parametrize("tokenizer", [Bytes(), GPT2BPE()], ids=lambda tokenizer: tokenizer.name)
def test_an_empty_prompt_is_the_tokenizers_start(tokenizer):
    model = toy_model(vocab_size=tokenizer.vocab_size)
    sampling = Sampling(8, seed=0)
    empty, start = ("".join(stream_text(model, tokenizer, prompt, sampling)) for prompt in ("", tokenizer.start))
    assert empty == start and len(empty) > 0


@pytest.mark.parametrize("stop", ["b", "bc", "aab", "ca", "abcabcab", "zz", "cab"])
def test_a_stop_text_is_found_whatever_the_pieces(stop):
    """It may begin in one piece and end in another, or begin twice; it is left out."""
    text = "aaabcabcaabc"
    for pieces in (list(text), [text], [text[:4], text[4:6], "", text[6:]], [text[i : i + 2] for i in range(0, 12, 2)]):
        assert "".join(until(stop, iter(pieces))) == text.partition(stop)[0]


def test_no_piece_waits_longer_than_it_must():
    assert list(until("abc", iter(["x", "ab", "y", "a", "b", "c", "z"]))) == ["x", "", "aby", "", "", ""]


def test_top_k_is_checked_against_the_models_vocabulary():
    with pytest.raises(Mistake, match=r"top_k .*\(1000\).* 61"):
        next(stream(toy_model(), toy_tokens(), Sampling(1, top_k=1000)))
