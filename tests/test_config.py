"""Settings: defaults, a TOML file, flags; what is wrong with them is said with the value and the remedy."""

import dataclasses
import functools
import re
import tomllib

import pytest
from toys import ROOT

from gpt import BLOCKS, NORMS, ModelConfig
from gpt.command_line import CommandLine
from gpt.config import Mistake
from gpt.generate import Sampling
from gpt.training.settings import SETTINGS, TrainConfig, configure, flat, read_toml, tokenizer_of


def test_tiny_toml_writes_out_the_defaults():
    written = tomllib.loads((ROOT / "configs" / "tiny.toml").read_text(encoding="utf-8"))
    assert configure(written) == TrainConfig()
    optional = {name for name, setting in SETTINGS.items() if setting.default is None}
    assert set(written) == set(SETTINGS) - optional


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_committed_configuration_is_valid(path):
    assert isinstance(configure(read_toml(path)), TrainConfig)


def test_flags_go_over_the_file_and_the_file_over_the_defaults():
    from_file = configure({"norm": "post", "steps": 7})
    both = configure({"steps": 9, "d_model": 64}, from_file)
    assert (both.model.norm, both.steps, both.model.d_model) == ("post", 9, 64)
    assert both.lr == TrainConfig().lr


def test_flat_and_configure_are_opposites():
    config = configure({"final_norm": False, "micro_batch_size": 2, "lr": 1})
    assert configure(flat(config)) == config and config.lr == 1.0 and type(config.lr) is float


# The settings, and what the message says: the name, the value and the remedy.
WRONG = [
    ({"n_layer": 3}, r"\(n_layer\).*\bn_layers\b"),
    ({"vocab_size": 300}, r"\(vocab_size\)"),
    ({"model": 3}, r"\(model\)"),
    ({"n_heads": 5}, r"n_heads.*\b5 .*128.*2, 4 or 8"),
    ({"n_layers": 0}, r"n_layers.*\(0\)"),
    ({"context_length": 0}, r"context_length.*\(0\)"),
    ({"dropout": 1.0}, r"dropout.*\(1\.0\)"),
    ({"norm_eps": 0.0}, r"norm_eps.*\(0\.0\)"),
    ({"norm_eps": float("nan")}, r"norm_eps.*\(nan\)"),
    ({"lr": 0}, r"\blr\b.*\(0\.0\)"),
    ({"lr": float("inf")}, r"\blr\b.*\(inf\)"),
    ({"lr": 1e-5, "min_lr": 1e-4}, r"min_lr.*\(0\.0001\).*\b1e-05"),
    ({"min_lr": -1.0}, r"min_lr.*\(-1\.0\)"),
    ({"val_fraction": 1}, r"val_fraction.*\(1\.0\)"),
    ({"val_fraction": -0.1}, r"val_fraction.*\(-0\.1\)"),
    ({"grad_clip": float("nan")}, r"grad_clip.*\(nan\)"),
    ({"beta2": 1.0}, r"beta2.*\(1\.0\)"),
    ({"steps": 0}, r"steps.*\(0\)"),
    ({"save_every": 0}, r"save_every.*\(0\)"),
    ({"seed": -1}, r"seed.*\(-1\)"),
    ({"compile": "yes"}, r"compile.*\(yes\).*auto, on or off"),
    ({"optimizer": "adam"}, r"optimizer.*\(adam\).*\badamw\b"),
    ({"batch_size": 8, "micro_batch_size": 16}, r"micro_batch_size.*16 and 8\).*2, 4 or 8"),
    ({"batch_size": 720720, "micro_batch_size": 17}, r"17 and 720720\).*15, 16 or 18"),
    ({"steps": 1.5}, r"steps.*\(1\.5\).*whole number"),
    ({"steps": True}, r"steps.*\(True\)"),
    ({"bias": 1}, r"bias.*\(1\).*true or false"),
    ({"norm": ["pre"]}, r"norm.*\['pre'\]"),
    ({"lr": 10**400}, r"\blr\b.*1000"),
    ({"data": "a\0b"}, r"data.*NUL"),
    ({"steps": "none"}, r"steps.*'none'"),
    ({"bias": "true"}, r"bias.*true or false"),
    ({"learning_rate": 0.1}, r"\(learning_rate\).*\blr\?"),
    ({"max_iters": 9}, r"\(max_iters\).*\bsteps\?"),
    ({"block_size": 9}, r"\(block_size\).*\bcontext_length\?"),
    ({"colour": 9}, r"\(colour\).*Known: norm,"),
]
WHOLE = ("steps", "batch_size", "micro_batch_size", "eval_every", "log_every", "save_every", "probe_every", "keep")
WRONG += [({name: 10**18}, rf"{name}.*\({10**18}\)") for name in (*WHOLE, "warmup_steps", "n_layers", "eval_tokens")]
WRONG += [({"seed": 2**63}, rf"seed.*\({2**63}\)")]


@pytest.mark.parametrize("settings, pattern", WRONG, ids=lambda value: str(value)[:30])
def test_what_a_user_can_get_wrong(settings, pattern):
    with pytest.raises(Mistake, match=pattern):
        configure(settings)


def test_one_range_of_seeds():
    for seed in (0, 2**63 - 1):
        assert Sampling(1, seed=TrainConfig(seed=seed).seed).generators(2)
    for settings_class in (TrainConfig, functools.partial(Sampling, 1)):
        with pytest.raises(Mistake, match="seed"):
            settings_class(seed=2**63)


def test_none_is_a_value_where_it_is_the_default():
    optional = {name for name, setting in SETTINGS.items() if setting.default is None}
    assert {"final_norm", "branch_init", "lr", "min_lr", "probe_every", "save_every"} <= optional
    base = configure({"lr": 0.1, "probe_every": 3, "final_norm": True, "branch_init": "zero"})
    assert configure(dict.fromkeys(optional, "none"), base) == TrainConfig()
    assert configure(parse(*(f"--{name}=none" for name in optional)), base) == TrainConfig()
    assert parse("--norm", "none", "--data", "none") == {"norm": "none", "data": "none"}


def test_configurations_are_frozen_and_checked_at_construction():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().norm = "post"
    with pytest.raises(Mistake, match="n_heads.*d_model"):
        ModelConfig(d_model=10, n_heads=3)


@pytest.mark.parametrize("content", [b"steps = = 3", b"a = '\xff'", b"[model]\nn_layers = 3", b"[" * 100_000, None])
def test_a_file_that_is_no_toml(tmp_path, content):
    if content is not None:
        (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(Mistake, match=r"bad\.toml"):
        read_toml(tmp_path / "bad.toml")


def test_a_toml_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_text("\ufeffsteps = 3", encoding="utf-8")
    assert read_toml(tmp_path / "a.toml") == {"steps": 3}


def test_the_tokenizer_of_weights_is_known_by_its_number_of_ids():
    names = {50257: "gpt2", 50304: "gpt2", 256: "bytes"}
    assert {size: tokenizer_of(ModelConfig(vocab_size=size)) for size in names} == names
    for size, placement in ((40478, "post"), (50257, "post"), (50305, "pre"), (257, "pre")):
        with pytest.raises(Mistake, match=rf"\({size:,} "):
            tokenizer_of(ModelConfig(vocab_size=size, norm=placement))


def parse(*argv):
    command = CommandLine()
    command.add_settings(SETTINGS)
    return vars(command.parse_args(argv))


def test_flags_are_the_fields_with_underscores_or_dashes():
    words = ["--n_layers", "6", "--n-heads=3", "--no-bias", "--final-norm", "--micro_batch_size=2", "--data", "a_b"]
    assert parse(*words) == {
        "n_layers": 6, "n_heads": 3, "bias": False, "final_norm": True, "micro_batch_size": 2, "data": "a_b",
    }  # fmt: skip
    assert parse() == {}
    assert parse("--data=--my_text", "--tokenizer", "a_b") == {"data": "--my_text", "tokenizer": "a_b"}
    assert parse("--data", "--my_text", "--tokenizer", "-") == {"data": "--my_text", "tokenizer": "-"}


@pytest.mark.parametrize(
    "words, value",
    [
        (["--bias"], True),
        (["--bias", "true"], True),
        (["--bias=True"], True),
        (["--no-bias"], False),
        (["--bias", "false"], False),
        (["--bias=false"], False),
        (["--bias", "--steps", "3"], True),
    ],
)
def test_a_switch_takes_true_and_false_and_no_other_word(words, value):
    assert parse(*words)["bias"] is value
    command = CommandLine()
    command.add_settings(SETTINGS)
    command.add_argument("word", nargs="?")
    assert command.parse_args([*words, "pre"]).word == "pre"


def test_help_has_groups_and_the_names_of_placements_and_norms():
    command = CommandLine()
    groups = command.add_settings(SETTINGS, without=["norm", "steps"], n_layers=99)
    assert [*groups] == ["model", "data", "training", "run", "machine"]
    text = " ".join(command.format_help().split())
    assert "--steps" not in text and ", ".join(NORMS) in text and "(default: 99)" in text
    command = CommandLine()
    command.add_settings(SETTINGS)
    text = " ".join(command.format_help().split())
    assert ", ".join(BLOCKS) in text and "--no-bias" in text
    assert all(f"--{name.replace('_', '-')} " in text for name in SETTINGS)


@pytest.mark.parametrize(
    "argv, pattern",
    [
        (["--n-layer", "3"], r"\(--n-layer\).*--n-layers\b"),
        (["--batchsize=4"], r"\(--batchsize\).*--batch-size"),
        (["--top-k", "3"], r"\(--top-k\)"),
        (["--learning-rate", "3"], r"\(--learning-rate\)\. Did you mean --lr\?$"),
        (["--max_steps", "3"], r"\(--max_steps\)\. Did you mean --steps\?$"),
        (["--batch", "3"], r"\(--batch\)\. Did you mean --batch-size\?$"),
        (["--n-embd", "3"], r"\(--n-embd\)\. Did you mean --d-model\?$"),
        (["--wandb"], r"\(--wandb\)\. Did you mean --tensorboard\?$"),
        (["--temp", "3"], r"\(--temp\)\. See --help\.$"),
        (["--config", "3"], r"\(--config\)\. See --help\.$"),
        (["--verbose"], r"\(--verbose\)\. See --help\.$"),
        (["--bias=maybe"], r"--bias.*true or false.*'maybe'.*--help"),
        (["--bias", "0"], r"--bias.*true or false.*'0'"),
        (["--tensorboard", "no"], r"--tensorboard.*true or false.*'no'"),
        (["--bias", "none"], r"--bias.*true or false.*'none'"),
        (["--steps", "none"], r"--steps.*'none'"),
        (["--steps", "1e3"], r"--steps.*'1e3'"),
        (["--steps", "9" * 5000], r"--steps.*'999.*--help"),
        (["--steps", "--norm", "pre"], r"--steps.*--help"),
        (["--data", "x" * 5000, "--foo"], r"\(--foo\)"),
        (["--steps", "many"], "--steps.*'many'.*--help"),
        (["--steps"], "--steps.*--help"),
        (["pre"], r"\(pre\)"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(argv, pattern, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and re.search(pattern, err), err
