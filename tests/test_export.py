"""To transformers and back: what it saves is loaded, and what is exported it opens."""

import errno
import os
import re
import shutil
from pathlib import Path

import golden
import pytest
import torch
from safetensors import SafetensorError
from toys import call, toy_config, toy_model, toy_tokens

import train
from gpt import BLOCKS, NORMS, pretrained
from gpt.config import Failure, Mistake
from gpt.generate import generate
from gpt.pretrained import export, load, recognizes
from gpt.tokenizer import TOKENIZERS, Bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", golden.CONFIGS)
def test_a_model_saved_by_transformers_gives_the_same(tmp_path, model_type):
    """Logits and greedy tokens of random weights."""
    size = {"vocab_size": 101, "n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 4}
    size |= {"bos_token_id": 0, "eos_token_id": 0} if model_type == "gpt2" else {}
    library = golden.transformers()
    peer = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(model_type, **size)).eval()
    for parameter in peer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    peer.save_pretrained(tmp_path)
    ours, tokens = load(tmp_path), toy_tokens(2, 40, vocab_size=101)
    with torch.no_grad():
        assert torch.allclose(ours(tokens), peer(tokens).logits, atol=1e-4)
        greedy = tokens[:, :10]
        for _ in range(10):
            greedy = torch.cat([greedy, peer(greedy).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(ours, tokens[:, :10], 10, temperature=0.0), greedy)


VARIANTS = [{}, {"bias": False}, {"activation": "gelu"}, {"activation": "relu", "final_norm": True}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_transformers_opens_the_model(tmp_path, settings):
    model, tokens = toy_model(norm_eps=1e-3, dropout=0.1, **settings).eval(), toy_tokens()
    export(model, tmp_path / "out")
    peer = golden.transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.allclose(peer(tokens).logits, model(tokens), atol=1e-4)
    config = peer.config
    assert (config.resid_pdrop, config.attn_pdrop, config.embd_pdrop) == (0.1, 0, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_opens_the_tokenizer(tmp_path, name):
    tokenizer = TOKENIZERS[name]()
    export(toy_model(vocab_size=tokenizer.vocab_size), tmp_path / "out", tokenizer)
    peer = golden.transformers().AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizers = pytest.importorskip("tokenizers")
    by_file = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in ("Hello wörld 😀\n\n  it's 12345\t", "<|endoftext|>a", " "):
        ids = tokenizer.encode_prompt(text).tolist()
        assert peer(text)["input_ids"] == by_file.encode(text).ids == ids and peer.decode(ids) == text
    assert len(peer) == tokenizer.vocab_size and peer.eos_token_id == tokenizer.end_of_text


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_what_is_exported_loads_to_the_same_logits(tmp_path, settings):
    model, tokens = toy_model(norm_eps=1e-3, **settings), toy_tokens()
    export(model, tmp_path / "a" / "out")
    assert torch.equal(load(tmp_path / "a" / "out")(tokens), model(tokens))
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["config.json", "model.safetensors", "out"]
    assert len({path.stat().st_mode for path in (tmp_path / "a" / "out").iterdir()}) == 1


@pytest.mark.parametrize(
    "settings",
    [{"norm": name} for name in BLOCKS if name != "pre"]
    + [{"norm_layer": name} for name in NORMS if name != "layernorm"]
    + [{"final_norm": False}, {"qk_norm": True}],
)
def test_a_model_that_gpt2s_code_does_not_compute_is_refused(tmp_path, settings):
    ((name, value),) = settings.items()
    with pytest.raises(Mistake, match=rf"\({name} {value}\)"):
        export(toy_model(**settings), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_only_a_new_or_empty_folder_is_taken(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder in (tmp_path / "full", tmp_path / "full" / "file", tmp_path / "full" / "file" / "sub"):
        with pytest.raises(Mistake, match=re.escape(str(folder))):
            export(toy_model(), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
    (tmp_path / "empty").mkdir()
    export(toy_model(), tmp_path / "empty")
    assert recognizes(tmp_path / "empty") and not recognizes(tmp_path / "full")


def test_a_mode_is_a_courtesy(tmp_path, monkeypatch):
    """On a file system that has none."""

    def refuse(*arguments, **settings):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for place, name in ((os, "chmod"), (os, "fchmod"), (Path, "chmod"), (shutil, "copymode")):
        monkeypatch.setattr(place, name, refuse, raising=False)
    export(toy_model(), tmp_path / "out")
    assert torch.equal(load(tmp_path / "out")(toy_tokens()), toy_model()(toy_tokens()))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")], ids=repr)
def test_a_disk_that_does_not_take_it_keeps_nothing(tmp_path, monkeypatch, error):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(pretrained, "save_file", fail)
    (tmp_path / "empty").mkdir()
    for name in ("out", "empty"):
        with pytest.raises(Failure, match=rf"\b{name} \(.*No space left"):
            export(toy_model(), tmp_path / name, Bytes())
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_the_command_that_exports(here, quick, capsys):
    for norm, run in (("pre", "r"), ("post", "post")):
        train.train(toy_config(data="text.txt", steps=1, norm=norm), run)
    assert call(pretrained, "export", "r", "out", capsys=capsys)[0] == 0
    for path in here.rglob("step-*/model.safetensors"):
        path.write_bytes(b"")  # what is refused is refused before these are read
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for arguments, pattern in (
        (["export", "r", "out"], "out.*new folder"),
        (["export", "r"], r"\(export\)"),
        (["check", "r", "x"], r"\(check\)"),
        (["check", "r"], r"\(r\).* export r "),
        (["chekc", "gpt2"], "'chekc'.*check.*export"),
        (["export", "post", "new"], "norm post"),
    ):
        status, _, err = call(pretrained, *arguments, capsys=capsys)
        assert status == 2 and re.search(pattern, err) and err.count("\n") == 1, err
    assert not (here / "new").exists()


def test_the_help_has_a_line_for_each_command(capsys):
    assert (
        len(re.findall("(?m)^python -m gpt.pretrained (check|export) ", call(pretrained, "-h", capsys=capsys)[1])) == 2
    )
