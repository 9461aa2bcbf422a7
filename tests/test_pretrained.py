"""Published weights are loaded as they are, or refused by name: every file that people have, and runs that start from
them."""

import dataclasses
import json
import os
import re
import shutil

import golden
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import KINDS, TOY, call, records, toy_config, toy_model, toy_tokens

import probe
import sample
import train
from gpt import BLOCKS, ModelConfig
from gpt.blocks import Block
from gpt.config import Mistake
from gpt.loss import NextToken
from gpt.pretrained import INDEX, export, load, read_config, recognizes
from gpt.tokenizer import Bytes
from gpt.training import checkpoint
from gpt.training.data import Data
from gpt.training.settings import MODEL_SETTINGS, TrainConfig, configure, from_weights, weights_of
from gpt.training.trainer import mean_loss

MODEL_TYPES = sorted(golden.CONFIGS)
TOKENS = torch.tensor(golden.TOKENS)


def refusal(action, *arguments) -> str:
    """The message of the Mistake that the call ends in."""
    with pytest.raises(Mistake) as error:
        action(*arguments)
    return str(error.value)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_oracle_and_transformers_agree(model_type):
    for row, tokens in enumerate(golden.TOKENS):
        logits = golden.oracle(model_type, golden.weights(model_type), tokens, golden.SIZE["n_head"])
        assert np.allclose(logits[[0, 3, 7]], golden.LOGITS[model_type][row], atol=2e-5)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_loaded_weights_give_the_published_logits(tmp_path, model_type):
    model = load(golden.folder(tmp_path / "w", model_type))
    assert model.config.norm == {"gpt2": "pre", "openai-gpt": "post"}[model_type] and not model.training
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.allclose(logits[:, [0, 3, 7]], torch.tensor(golden.LOGITS[model_type]), atol=1e-4)
    for row, tokens in enumerate(golden.TOKENS):
        expected = golden.oracle(model_type, golden.weights(model_type), tokens, golden.SIZE["n_head"])
        assert np.allclose(logits[row], expected, atol=2e-5)


def shard(folder):
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}), encoding="utf-8")


def prefixed(tensors):
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def with_head(tensors):
    (embedding,) = (tensors[name] for name in ("wte.weight", "tokens_embed.weight") if name in tensors)
    return tensors | {"lm_head.weight": embedding.clone()}


MASK = torch.ones(1, 1, 8, 8).tril()
VARIATIONS = {
    "prefix": prefixed,
    "prefix and head": lambda t: prefixed(t) | {"lm_head.weight": with_head(t)["lm_head.weight"]},
    "head": with_head,
    "masks": lambda t: (
        t
        | {"h.0.attn.bias": MASK, "h.1.attn.bias": MASK.bool()}
        | {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    ),
    "positions": lambda t: t | {"position_ids": torch.arange(8)[None]},
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_files_as_people_have_them(tmp_path, model_type, variation, sharded):
    plain = load(golden.folder(tmp_path / "plain", model_type)).state_dict()
    folder = golden.folder(tmp_path / "other", model_type, change=VARIATIONS[variation])
    if sharded:
        shard(folder)
    loaded = load(folder).state_dict()
    assert loaded.keys() == plain.keys() and all(torch.equal(loaded[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_number_formats_become_float32(tmp_path, dtype):
    folder = golden.folder(tmp_path / "w", change=lambda t: {name: tensor.to(dtype) for name, tensor in t.items()})
    expected = load(golden.folder(tmp_path / "plain")).state_dict()
    for name, tensor in load(folder).state_dict().items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert torch.equal(tensor, expected[name].to(dtype).float())


def test_weights_are_a_copy_that_trains_and_leaves_the_file_alone(tmp_path):
    folder = golden.folder(tmp_path / "w")
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    for parameter in model.parameters():
        assert parameter.requires_grad
        parameter.data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def without(name):
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def with_tensor(name, *shape):
    return lambda tensors: tensors | {name: torch.ones(shape)}


HEADS = ["score.weight", "multiple_choice_head.summary.weight", "v_head.summary.bias", "classifier.weight"]
# What is wrong with the file, and what the message names: our parameter, or the stored tensor that we do not have.
BAD_WEIGHTS = [
    (without("ln_f.weight"), ["final_norm.weight"]),
    (without("h.1.mlp.c_fc.bias"), ["blocks.1.mlp.up.bias"]),
    (without("wte.weight"), ["token_embedding.weight"]),
    (with_tensor("h.2.ln_1.weight", 12), ["h.2.ln_1.weight"]),
    (with_tensor("extra", 3), ["extra"]),
    (with_tensor("h.0.attn.bias.weight", 1), ["h.0.attn.bias.weight"]),
    (with_tensor("virus.attn.bias", 3), ["virus.attn.bias"]),
    (with_tensor("wpe.weight", 9, 12), ["position_embedding.weight", "[9, 12]"]),
    (with_tensor("wpe.weight"), ["position_embedding.weight", "[]"]),
    (with_tensor("h.0.mlp.c_fc.weight", 48, 12), ["blocks.0.mlp.up.weight", "[12, 48]"]),
    (with_tensor("h.0.attn.c_attn.weight", 36), ["blocks.0.attn.qkv.weight", "[36]"]),
    (lambda t: t | {"ln_f.bias": torch.ones(12).int()}, ["ln_f.bias", "int32"]),
    (with_tensor("transformer.ln_f.bias", 12), ["final_norm.bias"]),
    (with_tensor("lm_head.weight", 7, 12), ["lm_head.weight"]),
    (with_tensor("lm_head.weight", 3, 12), ["lm_head.weight"]),
    (lambda t: t | {"wte.weight": t["wte.weight"].to(torch.float8_e4m3fn)}, ["wte.weight", "float8"]),
    (lambda t: t | {"h.1.ln_1.bias": torch.full((12,), torch.nan)}, ["h.1.ln_1.bias", "finite"]),
    (lambda t: t | {"wpe.weight": torch.full((8, 12), -torch.inf).half()}, ["wpe.weight", "finite"]),
    *((with_tensor(name, 2, 12), [name, "AutoModelForCausalLM"]) for name in HEADS),
    (lambda t: prefixed(t) | {"score.weight": torch.ones(2, 12)}, ["score.weight", "AutoModelForCausalLM"]),
]


@pytest.mark.parametrize("change, words", BAD_WEIGHTS)
def test_every_tensor_has_one_place_or_the_load_is_refused(tmp_path, change, words):
    folder = golden.folder(tmp_path / "w", change=change)
    message = refusal(load, folder)
    assert "\n" not in message and all(word in message for word in [str(folder), *words])


BAD_CONFIGS = [
    ({"model_type": "llama"}, "model_type.*llama.*gpt2.*openai-gpt"),
    ({"n_inner": 40}, "n_inner.*40.*48"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx.*True.*False"),
    ({"add_cross_attention": True}, "add_cross_attention.*True.*False"),
    ({"scale_attn_weights": False}, "scale_attn_weights.*False.*True"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings.*False.*True"),
    ({"activation_function": "swish"}, "swish.*gelu_new"),
    ({"n_head": 5}, "n_heads.*5.*12"),
    ({"n_layer": "2"}, "n_layers.*'2'"),
    ({"n_layer": 10**7}, r"\b28\b.*\b10000000\b"),
    ({"n_layer": -1}, "n_layers.*-1"),
    ({"vocab_size": None}, "vocab_size"),
    ({"vocab_size": 7.5}, "vocab_size.*7.5"),
    ({"n_layer": True}, "n_layers.*True"),
    ({"n_layer": float("inf")}, "n_layers.*inf"),
    ({"n_embd": 1e300}, "d_model"),
    ({"model_type": ["gpt2"]}, "model_type.*gpt2"),
    ({"activation_function": {}}, "activation.*gelu_new"),
    ({"scale_attn_weights": None}, "scale_attn_weights.*None.*True"),
    ({"vocab_size": 10**30}, "vocab_size"),
    ({"n_positions": 10**18}, "context_length"),
    ({"n_embd": 10**11 + 1, "n_head": 2}, "d_model"),
    ({"n_embd": None}, "config.json"),
    ({"layer_norm_epsilon": "small"}, "norm_eps.*'small'"),
]


@pytest.mark.parametrize("settings, pattern", BAD_CONFIGS, ids=lambda value: str(value)[:30])
def test_a_configuration_that_is_not_ours_is_refused(tmp_path, settings, pattern):
    folder = golden.folder(tmp_path / "w", **settings)
    assert re.search(re.escape(str(folder)) + ".*" + pattern, refusal(load, folder))


@pytest.mark.parametrize(
    "bug", [ValueError("8 heads"), RuntimeError("Error(s)"), KeyError("attn"), OSError("font")], ids=repr
)
def test_a_bug_in_a_block_is_not_taken_for_bad_weights(tmp_path, monkeypatch, bug):
    """It keeps its traceback, although the same kinds of errors from the files are refusals."""

    class Buggy(Block):
        def __init__(self, config, layer):
            raise bug

    monkeypatch.setitem(BLOCKS, "pre", Buggy)
    with pytest.raises(type(bug)) as error:
        load(golden.folder(tmp_path / "w"))
    assert error.value is bug


@pytest.mark.parametrize("missing", ["n_layer", "n_head", "n_embd", "vocab_size"])
def test_a_configuration_with_a_gap_is_refused_by_name(tmp_path, missing):
    folder = golden.folder(tmp_path / "w")
    config = {name: value for name, value in golden.CONFIGS["gpt2"].items() if name != missing}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert f"'{missing}'" in refusal(load, folder)


OLD = {
    "no activation": {"activation_function": None, "afn": None},
    "no epsilon": {"layer_norm_epsilon": None},
    "no model_type": {"model_type": None},
    "n_ctx": {"n_positions": None, "n_ctx": 8},
    "2019": {"activation_function": None, "layer_norm_epsilon": None, "model_type": None, "n_ctx": 8},
    "numbers": {"n_layer": 2.0, "n_embd": 12.0, "vocab_size": 7.0, "n_inner": 48.0, "n_positions": 8.0},
    "others": {"n_ctx": 1024, "torch_dtype": "float16", "n_special": 0, "add_cross_attention": None},
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
@pytest.mark.parametrize("change", OLD)
def test_old_and_odd_configurations_are_what_they_were(tmp_path, model_type, change, absent):
    """A setting that is left out, or null, has the default of GPT-2 or GPT-1."""
    plain = read_config(golden.folder(tmp_path / "plain", model_type))
    config = golden.CONFIGS[model_type] | OLD[change]
    if model_type == "openai-gpt" and OLD[change].get("model_type", "") is None:
        config["afn"] = "gelu"  # by which such a file is told from GPT-2's
    config = {name: value for name, value in config.items() if not (absent and value is None)}
    folder = golden.folder(tmp_path / "w", model_type)
    (folder / "config.json").write_text("\ufeff" + json.dumps(config), encoding="utf-8")
    assert recognizes(folder) and load(folder).config == plain


def test_the_context_is_gpt2s_or_gpt1s_by_default(tmp_path):
    for model_type, length in (("gpt2", 1024), ("openai-gpt", 512)):
        folder = golden.folder(tmp_path / model_type, model_type, n_positions=None)
        assert read_config(folder).context_length == length


def test_settings_that_do_not_change_the_computation_are_taken(tmp_path):
    folder = golden.folder(tmp_path / "w", n_inner=48, resid_pdrop=0.1, reorder_and_upcast_attn=True, use_cache=False)
    assert load(folder).config.dropout == 0
    assert load(golden.folder(tmp_path / "exact", activation_function="gelu")).config.activation == "gelu"
    assert load(golden.folder(tmp_path / "eps", layer_norm_epsilon=1e-3)).blocks[0].attn_norm.eps == 1e-3


def test_files_that_cannot_be_read(tmp_path):
    folder = golden.folder(tmp_path / "w")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"", whole[:8], whole[:100], whole[:-1], b"\xff" * 100):
        (folder / "model.safetensors").write_bytes(content)
        assert str(folder) in refusal(load, folder)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(load, folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    assert all(word in refusal(load, folder) for word in ("pytorch_model.bin", "any code", "save_pretrained"))
    for content in ('{"model_type": "gpt2"', "[" * 100000, "[1]", "3", " " * 2**24 + "3"):
        (folder / "config.json").write_text(content, encoding="utf-8")
        assert "config.json" in refusal(load, folder)


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_weights_may_be_links(tmp_path):
    """As the hub's library keeps them."""
    folder = golden.folder(tmp_path / "w")
    expected = load(folder).state_dict()
    blob = (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(blob)
    loaded = load(folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    blob.unlink()
    assert "model.safetensors" in refusal(load, folder)


def test_weights_are_files_of_the_folder(tmp_path):
    folder = golden.folder(tmp_path / "w")
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").rename(folder / "pytorch_model-00002-of-00002.bin")
    assert all(word in refusal(load, folder) for word in ("-00002-of-00002.bin", "any code", "save_pretrained"))
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(load, folder)
    (folder / "model-00002-of-00002.safetensors").mkdir()
    assert "model-00002-of-00002.safetensors" in refusal(load, folder)
    (folder / "config.json").unlink()
    assert recognizes(folder) and "config.json" in refusal(load, folder)
    assert "file" in refusal(load, folder / INDEX)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/../../x", "..", "", None, 3])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, name):
    folder = golden.folder(tmp_path / "w")
    shutil.copy(folder / "model.safetensors", tmp_path)  # what the first name leads to would do
    shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}), encoding="utf-8")
    assert str(folder) in refusal(load, folder)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": {}}', '{"weight_map": [1]}', "{}", "[" * 100000])
def test_a_damaged_index_is_refused(tmp_path, content):
    folder = golden.folder(tmp_path / "w")
    shard(folder)
    (folder / INDEX).write_text(content, encoding="utf-8")
    assert str(folder) in refusal(load, folder)


def test_shards_that_repeat_a_tensor_are_refused(tmp_path):
    folder = golden.folder(tmp_path / "w")
    shard(folder)
    first, second = (load_file(path) for path in sorted(folder.glob("model-*")))
    save_file(second | {"wpe.weight": (first | second)["wpe.weight"]}, folder / "model-00002-of-00002.safetensors")
    save_file(first | {"wpe.weight": (first | second)["wpe.weight"]}, folder / "model-00001-of-00002.safetensors")
    assert "position_embedding.weight" in refusal(load, folder)


def test_a_shorter_context_crops_the_positions_and_nothing_else_may_differ(tmp_path):
    folder = golden.folder(tmp_path / "w")
    whole, config = load(folder), read_config(folder)
    short = load(folder, ModelConfig(**vars(config) | {"context_length": 5, "dropout": 0.5}))
    assert torch.equal(short(TOKENS[:, :5]), whole(TOKENS[:, :5])) and short.config.context_length == 5
    assert short.position_embedding.weight.shape == (5, 12) and short.blocks[0].mlp.dropout.p == 0.5
    for name, value in {"context_length": 9, "n_layers": 1, "norm": "post", "bias": False, "final_norm": False}.items():
        message = refusal(load, folder, ModelConfig(**vars(config) | {name: value}))
        assert name in message and str(value) in message


@pytest.fixture
def bytes_gpt2(here):
    """The folder `toy`, a model of bytes as GPT-2's files have it, in a folder of its own to work in."""
    export(toy_model(vocab_size=256), here / "toy", Bytes())
    return here / "toy"


def test_training_starts_from_weights(bytes_gpt2, here, quick, capsys):
    base = from_weights("toy")
    assert (base.tokenizer, base.optimizer, base.model.norm) == ("bytes", "adamw", "pre")
    arguments = ["--init", "toy", "--data", "text.txt", "--steps", 2, "--batch-size", 4, "--eval-every", 1]
    still = ["--lr", 1e-30, "--context-length", 12, "--out", "r"]
    assert call(train, *arguments, *still, capsys=capsys)[0] == 0
    config = json.loads((here / "r" / "config.json").read_text(encoding="utf-8"))
    assert (config["init"], config["context_length"]) == (str(here / "toy"), 12)
    assert config["n_layers"] == TOY["n_layers"]
    data = Data(Bytes().encode((here / "text.txt").read_text(encoding="utf-8")), 12, 4, 0.1, 0)
    expected = mean_loss(NextToken(load("toy")), data.windows(4))
    assert records(here / "r")[0]["val_loss"] == pytest.approx(expected, abs=1e-4)
    for flag, value, pattern in (
        ("--norm", "post", "norm.*pre.*post"),
        ("--n-layers", 3, f"n_layers.*{TOY['n_layers']}.*3"),
        ("--no-bias", "", "bias.*True.*False"),
        ("--context-length", 99, "context_length.*16.*99.*at most 16"),
        ("--tokenizer", "gpt2", "tokenizer.*bytes.*gpt2"),
        ("--init", "gtp2", r"\(gtp2\).*gpt2"),
        ("--init", "nowhere", r"nowhere\).* gpt2"),
    ):
        words = [flag, value] if value else [flag]
        status, _, err = call(train, *arguments, *words, "--out", "bad", capsys=capsys)
        assert status == 2 and re.search(pattern, err) and err.count("\n") == 1, err
        assert not (here / "bad").exists()


def test_a_run_from_weights_resumes_without_them(bytes_gpt2, here, quick):
    settings = {"data": "text.txt", "batch_size": 4, "warmup_steps": 0, "eval_every": 2, "steps": 2}
    config = configure(settings, from_weights("toy"))
    train.train(config, "r")
    (bytes_gpt2 / "model.safetensors").unlink()
    assert train.train(configure({"steps": 4}, config), "r", resume="last")["step"] == 4
    assert "init" in refusal(train.train, configure({"init": "gpt2"}, config), "r", "last")


def as_run(run, **settings):
    """A run folder with a model, at its step 7; returns the model and its configuration."""
    config = toy_config(context_length=16, **settings)
    model = toy_model(vocab_size=256, **{name: value for name, value in settings.items() if name in MODEL_SETTINGS})
    config = dataclasses.replace(config, model=model.config)
    run.mkdir()
    state = {"step": 7, "best_step": None, "config": checkpoint.config_to_json(config)}
    checkpoint.save(run, model.state_dict(), {}, state)
    return model.eval(), config


@pytest.mark.parametrize("norm", KINDS)
def test_a_runs_weights_are_weights(here, norm):
    """Of every kind of placement: with a new dropout, a shorter context, a new schedule."""
    model, config = as_run(here / "r", norm=norm, bias=False, steps=9)
    for source in ("r", "r/step-000007"):
        base = from_weights(source)
        assert (base.model, base.tokenizer, base.init) == (config.model, "bytes", str(here / source))
        assert base.steps == TrainConfig().steps and not recognizes(source)
        changed = configure({"context_length": 5, "dropout": 0.5}, base)
        loaded, tokens = weights_of(changed)(), toy_tokens(length=5, vocab_size=256)
        assert loaded.config == changed.model and loaded.position_embedding.weight.shape == (5, 32)
        assert torch.equal(loaded(tokens), model(tokens))
        others = {"context_length": 17, "n_layers": 1, "norm": "mine", "bias": True, "start": "gpt2", "qk_norm": True}
        for name, value in others.items():
            message = refusal(
                weights_of, dataclasses.replace(base, model=dataclasses.replace(base.model, **{name: value}))
            )
            assert name in message and str(value) in message and ("at most 16" in message) == (value == 17)


def test_a_run_goes_on_at_its_rate_unless_that_was_the_default(here):
    as_run(here / "plain")
    as_run(here / "tuned", optimizer="adamw", lr=2e-5)
    assert from_weights("plain") == dataclasses.replace(
        TrainConfig(), model=from_weights("plain").model, init=str(here / "plain")
    )
    tuned = from_weights("tuned")
    assert (tuned.optimizer, tuned.peak_lr, tuned.last_lr) == ("adamw", 2e-5, pytest.approx(2e-6))
    assert configure({"optimizer": "adamw"}, from_weights("plain")).peak_lr == 1e-3


def test_training_starts_from_a_run(here, quick, capsys):
    """The source may move afterwards, and the same command resumes."""
    model, _ = as_run(here / "mine", norm="post")
    words = ["--init", "mine", "--data", "text.txt", "--batch-size", 4, "--warmup-steps", 0, "--out", "r"]
    assert call(train, *words, "--steps", 1, "--lr", 1e-30, capsys=capsys)[0] == 0
    data = Data(Bytes().encode((here / "text.txt").read_text(encoding="utf-8")), 16, 4, 0.1, 0)
    assert records(here / "r")[0]["val_loss"] == pytest.approx(mean_loss(NextToken(model), data.windows(4)), abs=1e-4)
    shutil.rmtree(here / "mine")
    status, out, err = call(train, *words, "--steps", 2, "--lr", 1e-30, "--resume", "auto", capsys=capsys)
    assert status == 0 and "changed init" not in out + err
    config = json.loads((here / "r" / "config.json").read_text(encoding="utf-8"))
    assert (config["init"], config["norm"], config["tokenizer"]) == (str(here / "mine"), "post", "bytes")
    status, _, err = call(train, "--out", "r", "--resume", "--tokenizer", "gpt2", capsys=capsys)
    assert status == 2 and re.search("tokenizer.*bytes.*gpt2", err)


def test_a_tokenizer_is_compared_or_assumed(bytes_gpt2, here, quick, capsys):
    """By every script, in one line on stderr."""
    arguments = {
        sample: ["toy", "--max-new-tokens", 3],
        probe: ["toy"],
        train: ["--init", "toy", "--data", "text.txt", "--steps", 1, "--batch-size", 4],
    }
    for script, words in arguments.items():
        status, _, err = call(script, *words, capsys=capsys)
        assert status == 0 and "assumed" not in err
    path = bytes_gpt2 / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"!": 33', '"!": 34'), encoding="utf-8")
    for script, words in arguments.items():
        status, _, err = call(script, *words, capsys=capsys)
        assert status == 2 and err.count("\n") == 1 and "tokenizer.json" in err and "from Python" in err
    path.unlink()
    for script, words in arguments.items():
        status, _, err = call(script, *words, capsys=capsys)
        (line,) = (line for line in err.splitlines() if "assumed" in line)
        assert status == 0 and "bytes" in line and "toy" in line


def test_the_scripts_take_weights(bytes_gpt2, here, capsys):
    status, out, err = call(sample, "toy", "--prompt", "ab", "--seed", 1, capsys=capsys)
    assert status == 0 and out.startswith("ab") and "toy: pre" in err and "seed 1" in err
    status, _, err = call(sample, "toy", "--checkpoint", "best", capsys=capsys)
    assert status == 2 and "(best)" in err
    status, out, _ = call(probe, "toy", capsys=capsys)
    assert status == 0 and "pre" in out.split() and (here / "probe.png").exists()
