"""What is known about the published weights is told from what is not so."""

import os

import golden
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import call, toy_model

from gpt import GPT, ModelConfig, pretrained, published
from gpt.pretrained import export, load
from gpt.tokenizer import TOKENIZERS, Bytes
from gpt.training import corpus

WEIGHTS = os.environ.get("GPT_WEIGHTS") and os.path.abspath(os.environ["GPT_WEIGHTS"])  # the tests leave this folder


@pytest.mark.parametrize("shape, counts", published.SIZES.items())
def test_every_published_size_has_its_names_and_numbers(shape, counts):
    placement, n_layers, n_heads, d_model, vocab_size, context_length = shape
    sizes = {"vocab_size": vocab_size, "context_length": context_length}
    with torch.device("meta"):
        model = GPT(ModelConfig(norm=placement, n_layers=n_layers, n_heads=n_heads, d_model=d_model, **sizes))
    assert (model.count_parameters(), model.count_parameters("norm")) == counts
    names = published.table("gpt2" if placement == "pre" else "openai-gpt", n_layers)
    assert sorted(ours for ours, _ in names.values()) == sorted(name for name, _ in model.named_parameters())
    assert len(names) == 12 * n_layers + (4 if placement == "pre" else 2)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_sizes_of_other_models_follow_from_the_architecture(placement):
    facts = published.model_facts(toy_model(norm=placement))
    assert len(facts) == 3 and all(fact.agrees for fact in facts)


def test_the_command_that_checks_says_what_differs(tmp_path, capsys):
    export(toy_model(vocab_size=256), tmp_path / "toy", Bytes())
    status, out, err = call(pretrained, "check", tmp_path / "toy", capsys=capsys)
    assert (status, err) == (0, "") and out.count("\n") == 3 and "!" not in out
    assert out.count(str(load(tmp_path / "toy").count_parameters())) == 2
    weights = load_file(tmp_path / "toy" / "model.safetensors")
    weights["transformer.ln_f.weight"][3] = 3e38
    save_file(weights, tmp_path / "toy" / "model.safetensors")
    status, out, _ = call(pretrained, "check", tmp_path / "toy", capsys=capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("!"))
    assert status == 1 and "finite" in line and "True" in line and "False" in line


def test_facts_are_told_from_what_is_not_so(monkeypatch):
    """The facts about GPT-2 small's weights, with the numbers of a toy in their place, and then with some changed."""
    tokenizer = TOKENIZERS["gpt2"]()
    model = toy_model(vocab_size=50257, context_length=64, d_model=8).eval()
    model.head_scale = 1.0
    ours = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    names = published.table("gpt2", 2)
    arrays = {name: ours[inner].T if turned else ours[inner] for name, (inner, turned) in names.items()}
    logits = golden.oracle("gpt2", arrays, list(published.MEAN_PROMPT), 2)
    monkeypatch.setattr(published, "LOGITS", {i: logits[0, i] for i in published.LOGITS})
    monkeypatch.setattr(published, "MEAN_LOGIT", logits.mean())
    embedding = arrays["wte.weight"][published.HELLO]
    normalized = (embedding - embedding.mean()) / np.sqrt(embedding.var() + 1e-5)
    monkeypatch.setattr(published, "FIRST_NORM", normalized[:5])
    ids = tokenizer.encode("Alan").tolist()
    while len(ids) < 3 or tokenizer.encode(tokenizer.decode_bytes(ids[1:]).decode("utf-8")).tolist() != ids[1:]:
        ids.append(int(golden.oracle("gpt2", arrays, ids, 2)[-1].argmax()))
    text = tokenizer.decode_bytes(ids[1:]).decode("utf-8", "replace")
    monkeypatch.setattr(published, "TURING", ("Alan", text))
    monkeypatch.setattr(published, "GREEDY", {"pre": (ids[:1], ids[1:])})

    def agreement():
        return [fact.agrees for fact in [*published.gpt2_facts(model, tokenizer), published.greedy_fact(model)]]

    assert agreement() == [True] * 5
    monkeypatch.setattr(published, "TURING", ("Alan", text[:-1] + "?"))
    monkeypatch.setattr(published, "GREEDY", {"pre": (ids[:1], [*ids[1:-1], ids[-1] + 1])})
    assert agreement() == [True] * 3 + [False] * 2
    with torch.no_grad():
        model.token_embedding.weight[published.HELLO] += torch.linspace(-9, 9, 8)
    assert agreement()[:3] == [False] * 3


@pytest.mark.weights
@pytest.mark.parametrize("name", published.NAMES)
def test_the_real_weights_are_as_published(name):
    """From the folders of these names in the folder that GPT_WEIGHTS names, or else from the hub."""
    source = f"{WEIGHTS}/{name}" if WEIGHTS else name
    folder = pretrained.find(source)
    facts = list(published.check(load(source), folder, corpus.shakespeare))
    assert len(facts) >= 3 and all(fact.agrees for fact in facts), facts
