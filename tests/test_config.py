import dataclasses
import tomllib

import pytest
from toys import ROOT

from gpt import ModelConfig
from gpt.command_line import CommandLine
from gpt.training.settings import SETTINGS, TrainConfig, configure, flat, read_toml


def test_tiny_toml_writes_out_the_defaults():
    given = tomllib.loads((ROOT / "configs" / "tiny.toml").read_text(encoding="utf-8"))
    assert configure(given) == TrainConfig()
    optional = {name for name, setting in SETTINGS.items() if setting.default is None}
    assert set(given) == set(SETTINGS) - optional


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


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"n_layer": 3}, r"unknown setting \(n_layer\)\. Did you mean n_layers"),
        ({"vocab_size": 300}, r"unknown setting \(vocab_size\)"),
        ({"model": 3}, r"unknown setting \(model\)"),
        ({"n_heads": 5}, r"n_heads must divide d_model \(5 heads, width 128\)\. Use 2, 4 or 8"),
        ({"n_layers": 0}, r"n_layers is out of range \(0\)"),
        ({"context_length": 0}, "context_length is out of range"),
        ({"dropout": 1.0}, "dropout is out of range"),
        ({"norm_eps": 0.0}, "norm_eps is out of range"),
        ({"norm_eps": float("nan")}, "norm_eps is out of range"),
        ({"lr": 0}, "lr is out of range"),
        ({"lr": float("inf")}, "lr is out of range"),
        (
            {"lr": 1e-5, "min_lr": 1e-4},
            r"min_lr is out of range \(0.0001\)\. It must be at least 0 and at most lr, 1e-05",
        ),
        ({"min_lr": -1.0}, "min_lr is out of range"),
        ({"val_fraction": 1}, "val_fraction is out of range"),
        ({"val_fraction": -0.1}, "val_fraction is out of range"),
        ({"grad_clip": float("nan")}, "grad_clip is out of range"),
        ({"beta2": 1.0}, "beta2 is out of range"),
        ({"steps": 0}, "steps is out of range"),
        ({"save_every": 0}, "save_every is out of range"),
        ({"seed": -1}, "seed is out of range"),
        ({"compile": "yes"}, "compile is out of range"),
        ({"batch_size": 8, "micro_batch_size": 16}, r"must divide batch_size \(16 and 8\)\. Use 2, 4 or 8"),
        ({"steps": 1.5}, r"steps has the wrong type \(1.5\)\. It must be a whole number"),
        ({"steps": True}, "steps has the wrong type"),
        ({"bias": 1}, "bias has the wrong type"),
        ({"norm": ["pre"]}, "norm has the wrong type"),
        ({"lr": 10**400}, "lr has the wrong type"),
        ({"batch_size": 720720, "micro_batch_size": 17}, r"\(17 and 720720\)\. Use 15, 16 or 18\."),
    ],
)
def test_what_a_user_can_get_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        configure(settings)


def test_configurations_are_frozen_and_checked_at_construction():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().norm = "post"
    with pytest.raises(ValueError, match="n_heads must divide"):
        ModelConfig(d_model=10, n_heads=3)


@pytest.mark.parametrize("content, message", [(b"steps = = 3", "not a TOML file"), (b"a = '\xff'", "not a TOML file")])
def test_a_file_that_is_no_toml(tmp_path, content, message):
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match="cannot read the configuration"):
        read_toml(tmp_path / "missing.toml")


def test_a_toml_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_text("\ufeffsteps = 3", encoding="utf-8")
    assert read_toml(tmp_path / "a.toml") == {"steps": 3}


def parse(*argv):
    command = CommandLine()
    command.add_settings(SETTINGS)
    return vars(command.parse_args(argv))


def test_flags_are_the_fields_with_underscores_or_dashes():
    given = parse(
        "--n_layers", "6", "--n-heads=3", "--no-bias", "--final-norm", "--micro_batch_size=2", "--data", "a_b"
    )
    assert given == {
        "n_layers": 6, "n_heads": 3, "bias": False, "final_norm": True, "micro_batch_size": 2, "data": "a_b",
    }  # fmt: skip
    assert parse() == {}
    assert parse("--data=--my_text", "--tokenizer", "a_b") == {"data": "--my_text", "tokenizer": "a_b"}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--n-layer", "3"], "unknown flag (--n-layer). Did you mean --n-layers"),
        (["--batchsize=4"], "unknown flag (--batchsize). Did you mean --batch-size"),
        (["--top-k", "3"], "unknown flag (--top-k)"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--steps"], "argument --steps: expected one argument"),
        (["pre"], "unexpected argument (pre)"),
        (["--steps", "x"], "See --help."),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and message in err
