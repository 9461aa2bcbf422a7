"""Published weights: against an oracle in numpy, against logits of transformers, and every file that people have."""

import http.server
import json
import os
import shutil
import socket
import threading
import warnings

import golden
import numpy as np
import pytest
import torch
from gpt.hub import read_config
from safetensors.torch import load_file, save_file
from toys import ROOT, TOY, call, python, toy_config, toy_model, toy_tokens

import probe
import sample
import train
from gpt import BLOCKS, GPT, ModelConfig, hub, pretrained, published
from gpt.generate import generate, stream_text
from gpt.loss import NextToken
from gpt.pretrained import export, load, recognizes, table
from gpt.tokenizer import TOKENIZERS, Bytes
from gpt.training.data import Data
from gpt.training.settings import from_weights, tokenizer_of
from gpt.training.trainer import mean_loss

KINDS = sorted(golden.CONFIGS)
TOKENS = torch.tensor(golden.TOKENS)


def oracle(kind, weights, tokens, n_heads):
    """(T,) tokens -> (T, vocab_size) logits by the equations alone, in float64, from the published names."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x, name):
        deviation = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
        return deviation / scale * w[name + ".weight"] + w[name + ".bias"]

    def linear(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def attention(x, name):
        T, d = x.shape
        q, k, v = (part.reshape(T, n_heads, -1) for part in np.split(linear(x, name + ".c_attn"), 3, axis=-1))
        y = np.empty_like(q)
        for head in range(n_heads):
            scores = q[:, head] @ k[:, head].T / np.sqrt(d / n_heads)
            scores[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head]
        return linear(y.reshape(T, d), name + ".c_proj")

    def mlp(x, name):
        z = linear(x, name + ".c_fc")
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        return linear(z, name + ".c_proj")

    wte, wpe = ("wte", "wpe") if kind == "gpt2" else ("tokens_embed", "positions_embed")
    x = w[wte + ".weight"][tokens] + w[wpe + ".weight"][: len(tokens)]
    for h in (f"h.{i}" for i in range(sum(name.endswith(".ln_1.bias") for name in w))):
        if kind == "gpt2":
            x = x + attention(norm(x, h + ".ln_1"), h + ".attn")
            x = x + mlp(norm(x, h + ".ln_2"), h + ".mlp")
        else:
            x = norm(x + attention(x, h + ".attn"), h + ".ln_1")
            x = norm(x + mlp(x, h + ".mlp"), h + ".ln_2")
    return (norm(x, "ln_f") if kind == "gpt2" else x) @ w[wte + ".weight"].T


def write(folder, kind="gpt2", change=lambda tensors: tensors, **settings):
    """A folder as on the hub, with the golden weights unless `change`d."""
    folder.mkdir(exist_ok=True)
    config = golden.CONFIGS[kind] | settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: torch.from_numpy(array) for name, array in golden.weights(kind).items()}
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_and_transformers_agree(kind):
    for row, tokens in enumerate(golden.TOKENS):
        logits = oracle(kind, golden.weights(kind), tokens, golden.SIZE["n_head"])
        assert np.allclose(logits[[0, 3, 7]], golden.LOGITS[kind][row], atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_give_the_published_logits(tmp_path, kind):
    model = load(write(tmp_path / "w", kind))
    assert (model.config.norm, model.config.final_norm) == ({"gpt2": "pre", "openai-gpt": "post"}[kind], None)
    with torch.no_grad():
        logits = model(TOKENS)
    assert torch.allclose(logits[:, [0, 3, 7]], torch.tensor(golden.LOGITS[kind]), atol=1e-4)
    for row, tokens in enumerate(golden.TOKENS):
        expected = oracle(kind, golden.weights(kind), tokens, golden.SIZE["n_head"])
        assert np.allclose(logits[row], expected, atol=2e-5)


def shard(folder):
    """Split model.safetensors in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")


def embedding(tensors):
    return next(tensors[name] for name in ("wte.weight", "tokens_embed.weight") if name in tensors)


VARIATIONS = {
    "prefix": lambda t: {f"transformer.{name}": tensor for name, tensor in t.items()},
    "prefix and head": lambda t: (
        {f"transformer.{name}": tensor for name, tensor in t.items()} | {"lm_head.weight": embedding(t).clone()}
    ),
    "head": lambda t: t | {"lm_head.weight": embedding(t).clone()},
    "masks": lambda t: (
        t
        | {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
        | {"h.0.attn.masked_bias": torch.tensor(-1e4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    ),
    "positions": lambda t: t | {"position_ids": torch.arange(8)[None]},
    "boolean masks": lambda t: t | {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().bool()},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_files_as_people_have_them(tmp_path, kind, variation, sharded):
    plain = load(write(tmp_path / "plain", kind)).state_dict()
    folder = write(tmp_path / "other", kind, VARIATIONS[variation])
    if sharded:
        shard(folder)
    loaded = load(folder).state_dict()
    assert loaded.keys() == plain.keys() and all(torch.equal(loaded[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_number_formats_become_float32(tmp_path, dtype):
    folder = write(tmp_path / "w", change=lambda t: {name: tensor.to(dtype) for name, tensor in t.items()})
    expected = load(write(tmp_path / "plain")).state_dict()
    for name, tensor in load(folder).state_dict().items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert torch.equal(tensor, expected[name].to(dtype).float())


def test_weights_are_a_copy_that_trains_and_leaves_the_file_alone(tmp_path):
    folder = write(tmp_path / "w")
    before = (folder / "model.safetensors").read_bytes()
    model = load(folder)
    for parameter in model.parameters():
        assert parameter.requires_grad
        parameter.data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def without(name):
    return lambda t: {other: tensor for other, tensor in t.items() if other != name}


def changed(name, tensor):
    return lambda t: t | {name: tensor(t) if callable(tensor) else tensor}


BAD_WEIGHTS = [
    (without("ln_f.weight"), r"no ln_f\.weight"),
    (without("h.1.mlp.c_fc.bias"), r"no h\.1\.mlp\.c_fc\.bias"),
    (without("wte.weight"), r"no wte\.weight"),
    (changed("h.2.ln_1.weight", torch.ones(12)), r"no place for h\.2\.ln_1\.weight"),
    (changed("extra", torch.ones(3)), r"no place for extra"),
    (changed("wpe.weight", torch.ones(9, 12)), r"no place for wpe\.weight \[9, 12\]"),
    (changed("h.0.mlp.c_fc.weight", torch.ones(48, 12)), r"no place for h\.0\.mlp\.c_fc\.weight \[48, 12\]"),
    (changed("h.0.attn.c_attn.weight", torch.ones(36)), r"no place for h\.0\.attn\.c_attn\.weight \[36\]"),
    (changed("ln_f.bias", torch.ones(12).int()), r"no place for ln_f\.bias \[12\] int32"),
    (changed("transformer.ln_f.bias", torch.ones(12)), r"another (transformer\.)?ln_f\.bias"),
    (changed("lm_head.weight", lambda t: t["wte.weight"] + 1), r"another lm_head\.weight"),
    (changed("h.0.attn.bias.weight", torch.ones(1)), r"no place for h\.0\.attn\.bias\.weight"),
    (changed("h.2.attn.bias", torch.ones(1, 1, 8, 8)), r"no place for h\.2\.attn\.bias"),
    (changed("virus.attn.bias", torch.ones(3)), r"no place for virus"),
    (changed("wpe.weight", torch.tensor(1.0)), r"no place for wpe\.weight \[\] float32"),
    (lambda t: {"wte.weight": t["wte.weight"]}, r"the weights are not all there"),
]


@pytest.mark.parametrize("change, message", BAD_WEIGHTS)
def test_every_tensor_has_one_place_or_the_load_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "w", change=change))


BAD_CONFIGS = [
    ({"model_type": "llama"}, r"model_type is llama; known are gpt2, openai-gpt"),
    ({"n_inner": 40}, "n_inner is 40, and can only be 48"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"add_cross_attention": True}, "add_cross_attention is True"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ({"activation_function": "swish"}, "the activation is swish"),
    ({"n_head": 5}, "n_heads must divide d_model"),
    ({"n_layer": "2"}, "n_layers has the wrong type"),
    ({"n_layer": 10**7}, "the weights are not all there"),
    ({"n_layer": -1}, "n_layers is out of range"),
    ({"vocab_size": None}, "not a GPT-2 or GPT-1 configuration"),
    ({"vocab_size": 7.0}, "vocab_size is out of range"),
    ({"vocab_size": 10**30}, "vocab_size is out of range"),
    ({"n_positions": 10**18}, "context_length is out of range"),
    ({"n_embd": 10**11 + 1, "n_head": 2}, "d_model is out of range"),
    ({"n_embd": None}, "not a GPT-2 or GPT-1 configuration"),
    ({"layer_norm_epsilon": "small"}, "norm_eps has the wrong type"),
]


@pytest.mark.parametrize("settings, message", BAD_CONFIGS, ids=lambda value: str(value)[:30])
def test_a_configuration_that_is_not_ours_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "w", **settings))


@pytest.mark.parametrize("missing", ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "model_type"])
def test_a_configuration_with_a_gap_is_refused_by_name(tmp_path, missing):
    folder = write(tmp_path / "w")
    config = {name: value for name, value in golden.CONFIGS["gpt2"].items() if name != missing}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=f"it lacks '{missing}'"):
        load(folder)


def test_settings_that_do_not_change_the_computation_are_taken(tmp_path):
    folder = write(tmp_path / "w", n_inner=48, resid_pdrop=0.1, reorder_and_upcast_attn=True, use_cache=False)
    assert load(folder).config.dropout == 0
    assert load(write(tmp_path / "exact", activation_function="gelu")).config.activation == "gelu"
    assert load(write(tmp_path / "eps", layer_norm_epsilon=1e-3)).blocks[0].attn_norm.eps == 1e-3


def test_files_that_cannot_be_read(tmp_path):
    folder = write(tmp_path / "w")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"", whole[:8], whole[:100], whole[:-1], b"\xff" * 100):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="cannot read the weights"):
            load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot read the weights"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(
        ValueError, match=r"pickled weights may run any code \(.*pytorch_model.bin\)\. .*save_pretrained"
    ):
        load(folder)
    for content in ('{"model_type": "gpt2"', "[" * 100000, "[1]", "3"):
        (folder / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="config.json"):
            load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/../../x", "", None, 3])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, name):
    folder = write(tmp_path / "w")
    shutil.copy(folder / "model.safetensors", tmp_path)  # what the first name leads to would do
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}), encoding="utf-8")
    with pytest.raises(ValueError, match="the index is damaged|cannot read the weights"):
        load(folder)
    for content in ("[]", '{"weight_map": {}}', '{"weight_map": [1]}', "{}"):
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="the index is damaged|index.json is not a JSON file"):
            load(folder)


def test_shards_that_repeat_a_tensor_are_refused(tmp_path):
    folder = write(tmp_path / "w")
    shard(folder)
    first, second = sorted(folder.glob("model-*"))
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)
    with pytest.raises(ValueError, match="two shards have one tensor"):
        load(folder)


def test_a_shorter_context_crops_the_positions_and_nothing_else_may_differ(tmp_path):
    folder = write(tmp_path / "w")
    whole, config = load(folder), read_config(folder)
    short = load(folder, ModelConfig(**vars(config) | {"context_length": 5, "dropout": 0.5}))
    assert torch.equal(short.eval()(TOKENS[:, :5]), whole(TOKENS[:, :5])) and short.config.context_length == 5
    assert short.position_embedding.weight.shape == (5, 12) and short.blocks[0].mlp.dropout.p == 0.5
    for name, value in {"context_length": 9, "n_layers": 1, "norm": "post", "bias": False, "final_norm": False}.items():
        with pytest.raises(ValueError, match=f"has another {name}"):
            load(folder, ModelConfig(**vars(config) | {name: value}))


@pytest.mark.parametrize("shape, counts", published.SIZES.items())
def test_every_published_size_has_its_names_and_numbers(shape, counts):
    norm, n_layers, n_heads, d_model, vocab_size, context_length = shape
    sizes = {"vocab_size": vocab_size, "context_length": context_length}
    with torch.device("meta"):
        model = GPT(ModelConfig(norm=norm, n_layers=n_layers, n_heads=n_heads, d_model=d_model, **sizes))
    assert (model.count_parameters(), model.count_parameters("norm")) == counts
    names = table("gpt2" if norm == "pre" else "openai-gpt", n_layers)
    assert sorted(ours for ours, _ in names.values()) == sorted(name for name, _ in model.named_parameters())
    assert len(names) == 12 * n_layers + (4 if norm == "pre" else 2)
    facts = published.model_facts(model)
    assert next(facts).agrees and next(facts).agrees


def transformers():
    """The library, or a skip; importing it may warn of things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_saved_by_transformers_gives_the_same(tmp_path, kind):
    """Logits and greedy tokens of random weights."""
    size = {"vocab_size": 101, "n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 4}
    size |= {"bos_token_id": 0, "eos_token_id": 0} if kind == "gpt2" else {}
    hf = transformers()
    theirs = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **size)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).eval()
    tokens = toy_tokens(2, 40, vocab_size=101)
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-4)
        greedy = tokens[:, :10]
        for _ in range(20):
            greedy = torch.cat([greedy, theirs(greedy).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(ours, tokens[:, :10], 20, temperature=0.0), greedy)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "bias, activation", [(True, "gelu_tanh"), (False, "gelu_tanh"), (True, "gelu"), (True, "relu")]
)
def test_transformers_opens_what_we_export(tmp_path, name, bias, activation):
    hf, tokenizer = transformers(), TOKENIZERS[name]()
    model = toy_model(vocab_size=tokenizer.vocab_size, bias=bias, activation=activation, norm_eps=1e-3).eval()
    export(model, tmp_path / "out", tokenizer)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    words = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = toy_tokens(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-4)
    for text in ("Hello wörld 😀\n\n  it's 12345\t", "<|endoftext|>a", " "):
        assert words(text)["input_ids"] == tokenizer.encode_prompt(text).tolist()
        assert words.decode(words(text)["input_ids"]) == text
        assert (
            pytest.importorskip("tokenizers")
            .Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
            .encode(text)
            .ids
            == tokenizer.encode_prompt(text).tolist()
        )
    assert len(words) == tokenizer.vocab_size and words.eos_token_id == tokenizer.end_of_text
    assert theirs.config.attn_pdrop == theirs.config.embd_pdrop == 0


@pytest.mark.parametrize(
    "settings", [{}, {"bias": False}, {"activation": "relu", "norm_eps": 1e-3, "final_norm": True}]
)
def test_what_is_exported_loads_to_the_same_logits(tmp_path, settings):
    model = toy_model(**settings)
    export(model, tmp_path / "a" / "out")
    again, tokens = load(tmp_path / "a" / "out"), toy_tokens()
    assert torch.equal(again(tokens), model(tokens))
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["config.json", "model.safetensors", "out"]
    assert len({path.stat().st_mode for path in (tmp_path / "a" / "out").iterdir()}) == 1


@pytest.mark.parametrize("norm", [norm for norm in BLOCKS if norm != "pre"])
def test_no_other_placement_is_exported(tmp_path, norm):
    with pytest.raises(ValueError, match=rf"GPT-2 has no such block \(norm {norm}\)"):
        export(toy_model(norm=norm), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_else_is_not_exported(tmp_path):
    for settings, message in (
        ({"norm_layer": "rmsnorm"}, "norm_layer rmsnorm"),
        ({"final_norm": False}, "no final norm"),
    ):
        with pytest.raises(ValueError, match=message):
            export(toy_model(**settings), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, reason in (
        (tmp_path / "full", "there is something already"),
        (tmp_path / "full" / "file", "Not a directory"),
        (tmp_path / "full" / "file" / "sub", "Not a directory"),
    ):
        with pytest.raises(ValueError, match=rf"cannot export to .*\({reason}\)\. Name a new folder"):
            export(toy_model(), folder)
    (tmp_path / "empty").mkdir()
    export(toy_model(), tmp_path / "empty")
    assert recognizes(tmp_path / "empty") and not recognizes(tmp_path / "full")


def test_a_tokenizer_is_known_by_its_number_of_ids():
    names = {50257: "gpt2", 50304: "gpt2", 256: "bytes"}
    assert {size: tokenizer_of(ModelConfig(vocab_size=size)) for size in names} == names
    for config in (
        ModelConfig(vocab_size=40478, norm="post"),
        ModelConfig(vocab_size=50305),
        ModelConfig(vocab_size=257),
    ):
        with pytest.raises(ValueError, match=f"no tokenizer for these weights \\({config.vocab_size:,} ids"):
            tokenizer_of(config)


def test_ids_of_a_padded_vocabulary_are_never_sampled():
    model = toy_model(vocab_size=300)
    with torch.no_grad():
        model.token_embedding.weight[256:] *= 100
        tokens = generate(model, toy_tokens(1, 8), 20, seed=1)
        assert (tokens >= 256).any()
        for temperature in (0.0, 5.0):
            text = "".join(stream_text(model, Bytes(), "a", 30, temperature=temperature, seed=1))
            assert 0 < len(text) <= 30


class Hub(http.server.SimpleHTTPRequestHandler):
    """As much of huggingface.co as a download needs: /OWNER/NAME/resolve/REVISION/FILE."""

    def do_HEAD(self, body=False):
        path = ROOT_OF_HUB[0] / self.path.split("/")[-1].split("?")[0]
        if not path.is_file() or "openai-community/gpt2/resolve" not in self.path:
            return self.send_error(404)
        self.send_response(200)
        content = path.read_bytes()
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:08x}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_GET(self):
        self.do_HEAD(body=True)

    def log_message(self, *arguments):
        pass


ROOT_OF_HUB = [None]


@pytest.fixture
def hub_here(tmp_path):
    """A hub on this machine that has GPT-2 with the golden weights; the environment that leads there."""
    ROOT_OF_HUB[0] = write(tmp_path / "hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    try:
        socket.create_connection(server.server_address, timeout=5).close()
    except OSError:
        server.server_close()
        pytest.skip("the loopback interface is down")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    }
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_name_is_downloaded_once_and_then_needs_no_network(tmp_path, hub_here):
    pytest.importorskip("huggingface_hub")
    code = "from gpt.pretrained import load; print(load('gpt2').config.d_model)"
    first = python("-c", code, cwd=ROOT, env=hub_here)
    assert first.stdout == "12\n", first.stderr
    offline = hub_here | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    assert python("-c", code, cwd=ROOT, env=offline).stdout == "12\n"
    result = python(ROOT / "sample.py", "gpt2-xl", cwd=tmp_path, env=hub_here)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("error: cannot download gpt2-xl (openai-community/gpt2-xl: ")
    assert "HF_ENDPOINT" in result.stderr


def test_a_folder_is_read_as_a_folder_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ValueError, match=r"cannot read the file \(gpt2.config.json"):
        load("gpt2")
    assert not recognizes("gpt2")
    write(tmp_path / "gpt2")
    assert recognizes("gpt2") and load("gpt2").config.d_model == 12
    with pytest.raises(ValueError, match=r"unknown weights \(gtp2\)\. Did you mean gpt2"):
        load("gtp2")
    assert recognizes("gtp2") and not recognizes("nowhere") and recognizes("openai-gpt")


def test_without_the_hubs_library_a_folder_still_loads_and_a_name_says_how(tmp_path):
    folder = write(tmp_path / "w")
    prelude = "import sys; sys.modules['huggingface_hub'] = sys.modules['transformers'] = None; "
    code = prelude + f"from gpt.pretrained import load; load({str(folder)!r}); load('gpt2')"
    result = python("-c", code, cwd=ROOT, env=os.environ)
    assert "Mistake: gpt2 comes by huggingface-hub (not installed). pip install huggingface-hub" in result.stderr


@pytest.fixture
def bytes_gpt2(tmp_path):
    """An exported toy model of bytes."""
    model = toy_model(vocab_size=256)
    export(model, tmp_path / "toy", Bytes())
    return tmp_path / "toy"


def test_training_starts_from_weights(tmp_path, bytes_gpt2, text_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = from_weights("toy")
    assert (base.tokenizer, base.optimizer, base.model.norm) == ("bytes", "adamw", "pre")
    arguments = ["--init", "toy", "--data", text_file, "--steps", 2, "--batch-size", 4, "--eval-every", 1]
    still = ["--lr", 1e-30, "--context-length", 12, "--out", "r"]
    assert call(train, *arguments, *still, capsys=capsys)[0] == 0
    config = json.loads((tmp_path / "r" / "config.json").read_text(encoding="utf-8"))
    assert (config["init"], config["context_length"], config["n_layers"]) == ("toy", 12, TOY["n_layers"])
    record = json.loads((tmp_path / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    data = Data(Bytes().encode(text_file.read_text(encoding="utf-8")), 12, 4, 0.1, 0)
    assert record["val_loss"] == pytest.approx(mean_loss(NextToken(load("toy")), data.windows(4)), abs=1e-4)
    for flags, message in (
        (["--norm", "post"], "has another norm (pre, not post)"),
        (["--n-layers", 3], f"has another n_layers ({TOY['n_layers']}, not 3)"),
        (["--no-bias"], "has another bias (True, not False)"),
        (["--context-length", 99], "has another context_length (16, not 99)"),
        (["--tokenizer", "gpt2"], "the weights are for another tokenizer (bytes, not gpt2)"),
        (["--init", "gtp2"], "unknown weights (gtp2). Did you mean gpt2"),
        (["--init", "nowhere"], "unknown weights (nowhere)"),
    ):
        status, _, err = call(train, *arguments, *flags, "--out", "bad", capsys=capsys)
        assert status == 2 and message in err and err.count("\n") == 1, err
        assert not (tmp_path / "bad").exists()


def test_a_run_from_weights_resumes_without_them(tmp_path, bytes_gpt2, text_file, monkeypatch):
    base = from_weights(str(bytes_gpt2))
    settings = {"data": str(text_file), "batch_size": 4, "warmup_steps": 0, "eval_every": 2, "log_every": 1}
    config = train.configure(settings | {"steps": 2}, base)
    train.train(config, str(tmp_path / "r"))
    (bytes_gpt2 / "model.safetensors").unlink()
    end = train.train(train.configure({"steps": 4}, config), str(tmp_path / "r"), resume="last")
    assert end["step"] == 4
    with pytest.raises(ValueError, match="the checkpoint has another init"):
        train.train(train.configure({"init": "gpt2"}, config), str(tmp_path / "r"), resume="last")


def test_the_scripts_take_weights(tmp_path, bytes_gpt2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(sample, "toy", "--prompt", "ab", "--seed", 1, capsys=capsys)
    assert status == 0 and out.startswith("ab") and "toy: pre, published weights; seed 1" in err
    status, _, err = call(sample, "toy", "--checkpoint", "best", capsys=capsys)
    assert status == 2 and "published weights have one checkpoint only (best)" in err
    status, out, _ = call(probe, "toy", capsys=capsys)
    assert status == 0 and "\npre\ndepth" in out and (tmp_path / "probe.png").exists()


def test_the_command_that_checks_says_what_differs(bytes_gpt2, capsys):
    status, out, err = call(pretrained, "check", bytes_gpt2, capsys=capsys)
    assert (status, err) == (0, "") and out.count("\n") == 3
    n = load(bytes_gpt2).count_parameters()
    assert f"  parameters: {n}, found {n}\n" in out
    weights = load_file(bytes_gpt2 / "model.safetensors")
    weights["transformer.ln_f.bias"][3] = torch.nan
    save_file(weights, bytes_gpt2 / "model.safetensors")
    status, out, _ = call(pretrained, "check", bytes_gpt2, capsys=capsys)
    assert status == 1 and "! logits are finite: True, found False" in out


def test_the_command_that_exports(tmp_path, text_file, capsys):
    train.train(toy_config(data=str(text_file), steps=2), str(tmp_path / "r"))
    assert call(pretrained, "export", tmp_path / "r", tmp_path / "out", capsys=capsys)[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    for arguments, message in (
        (["export", tmp_path / "r", tmp_path / "out"], "there is something already"),
        (["export", tmp_path / "r"], "export takes a run and a new folder"),
        (["check", tmp_path / "r", "x"], "check takes one source"),
        (["check", tmp_path / "r"], "not a GPT-2 or GPT-1 configuration"),
        (["chekc", "gpt2"], "invalid choice: 'chekc'"),
    ):
        capsys.readouterr()
        status, _, err = call(pretrained, *arguments, capsys=capsys)
        assert status == 2 and message in err and err.count("\n") == 1, err


def test_facts_are_told_from_what_is_not_so(monkeypatch):
    """The facts about GPT-2 small's weights, with the numbers of a toy in their place, and then with one changed."""
    tokenizer = TOKENIZERS["gpt2"]()
    model = toy_model(vocab_size=50257, context_length=64, d_model=8).eval()
    weights = {ours: tensor.numpy() for ours, tensor in model.state_dict().items()}
    weights = {
        theirs: weights[ours].T if turned else weights[ours] for theirs, (ours, turned) in table("gpt2", 2).items()
    }
    logits = oracle("gpt2", weights, list(published.MEAN_PROMPT), 2)
    monkeypatch.setattr(published, "LOGITS", {i: logits[0, i] for i in published.LOGITS})
    monkeypatch.setattr(published, "MEAN_LOGIT", logits.mean())
    embedding = weights["wte.weight"][published.HELLO]
    normalized = (embedding - embedding.mean()) / np.sqrt(embedding.var() + 1e-5)
    monkeypatch.setattr(published, "FIRST_NORM", normalized[:5])
    ids = tokenizer.encode("Alan").tolist()
    while len(ids) < 3 or tokenizer.encode(tokenizer.decode_bytes(ids[1:]).decode("utf-8")).tolist() != ids[1:]:
        ids.append(int(oracle("gpt2", weights, ids, 2)[-1].argmax()))
    text = tokenizer.decode_bytes(ids[1:]).decode("utf-8", "replace")
    monkeypatch.setattr(published, "TURING", ("Alan", text))
    monkeypatch.setattr(published, "GREEDY", {"pre": (ids[:1], ids[1:])})
    facts = [*published.gpt2_facts(model, tokenizer), published.greedy_fact(model)]
    assert [fact.agrees for fact in facts] == [True] * 5, facts
    with torch.no_grad():
        model.token_embedding.weight[published.HELLO] += torch.linspace(-9, 9, 8)
    assert not any(fact.agrees for fact in list(published.gpt2_facts(model, tokenizer))[:3])
    monkeypatch.setattr(published, "TURING", ("Alan", text[:-1] + "?"))
    monkeypatch.setattr(published, "GREEDY", {"pre": (ids[:1], ids[1:][::-1])})
    assert not list(published.gpt2_facts(model, tokenizer))[3].agrees and not published.greedy_fact(model).agrees


WEIGHTS = os.environ.get("GPT_WEIGHTS")


@pytest.mark.weights
@pytest.mark.parametrize("name", hub.NAMES)
def test_the_real_weights_are_as_published(name):
    """From the hub's cache, or from the folders of these names in the folder that GPT_WEIGHTS names."""
    source = f"{WEIGHTS}/{name}" if WEIGHTS else name
    folder = hub.find(source)
    facts = list(published.check(load(source), folder))
    assert len(facts) >= 3 and all(fact.agrees for fact in facts), facts
