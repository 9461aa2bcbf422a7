"""The architecture, and the error for a user's mistake. Imports no torch, so that --help is quick."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


class Mistake(ValueError):
    """A mistake that the user can mend: the message has the value and the remedy. It is the only exception that a
    script turns into one line and status 2."""


class Failure(Exception):
    """What ends a run and is no mistake of the user: a loss that is not finite, a full disk, a lost process. A script
    turns it into one line and status 1; all other exceptions keep their traceback."""


def one_of(values: Iterable) -> str:
    """The values as text: "1", "1 or 2", "1, 2 or 3"."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


# Our names, and those of other programs.
SYNONYMS = {
    "lr": "learning_rate max_lr rate",
    "steps": "iters iterations max_iters max_steps num_steps epochs num_epochs",
    "batch_size": "batch bs",
    "context_length": "block_size seq_len seq_length sequence_length max_length max_seq_len n_ctx n_positions",
    "n_layers": "n_layer num_layers depth",
    "n_heads": "n_head num_heads",
    "d_model": "n_embd hidden_size dim width",
    "warmup_steps": "warmup warmup_iters",
    "weight_decay": "wd",
    "grad_clip": "clip max_grad_norm",
    "eval_every": "eval_interval",
    "log_every": "log_interval",
    "temperature": "temp",
    "max_new_tokens": "max_tokens max_length length",
    "data": "dataset corpus",
    "out": "out_dir output output_dir",
    "dtype": "precision",
    "device": "gpu cuda",
    "tensorboard": "wandb",
}


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """The message for a name that is not in `known`: it offers ours for another program's name, or the nearest ones, or
    else all; but not all flags, which --help explains."""
    bare = {each.lstrip("-").replace("-", "_"): each for each in known}
    word = name.lower().lstrip("-").replace("-", "_")
    near = [ours for ours, names in SYNONYMS.items() if ours in bare and word in names.split()]
    near = [f"{word}s"] if f"{word}s" in bare else near
    if not near and difflib.get_close_matches(word, bare, cutoff=0.7):
        near = difflib.get_close_matches(word, bare, n=2, cutoff=0.5)
    rest = "See --help." if kind == "flag" else f"Known: {', '.join(known)}."
    return f"unknown {kind} ({name}). " + (f"Did you mean {one_of(bare[each] for each in near)}?" if near else rest)


def lookup(table: dict, name: str, kind: str):
    """table[name]. Raises Mistake, with the nearest names, if there is no such key."""
    if name not in table:
        raise Mistake(unknown(kind, name, table))
    return table[name]


def setting(default, text: str, group: str | None = None):
    """A field of a settings dataclass: a flag on the command line, with this text as its help. A `group` begins with
    it, under which --help lists the flags."""
    return field(default=default, metadata={"help": text, "group": group})


def settings_of(settings_class) -> dict[str, dataclasses.Field]:
    """The fields of a settings dataclass that are flags and keys of a TOML file, by name."""
    return {f.name: f for f in dataclasses.fields(settings_class) if f.metadata}


MOST = 2**53  # up to which float64 holds every whole number
SEEDS = 2**63  # the number of seeds: torch takes no more
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes, without NUL"}


def type_of(setting: dataclasses.Field) -> type:
    """The type of a setting, ignoring `| None`."""
    return next(each for each in (setting.type, *typing.get_args(setting.type)) if each in TYPES)


def typed(name: str, value, setting: dataclasses.Field):
    """`value`, as the type that the setting of this name is declared with; a whole number will do for a number, and
    "none" for None where that is the default. Raises Mistake for another type."""
    if value in (None, "none") and setting.default is None:
        return None
    wanted = type_of(setting)
    if type(value) is int and wanted is float and abs(value) < MOST:
        return float(value)
    if type(value) is not wanted or (isinstance(value, str) and "\0" in value):
        raise Mistake(f"{name} has the wrong type ({value!r}). It must be {TYPES[wanted]}.")
    return value


def require(ok: bool, settings, name: str, wanted: str):
    """Raise Mistake, with the setting's value and what is wanted, unless `ok`."""
    if not ok:
        raise Mistake(f"{name} is out of range ({getattr(settings, name)}). It must be {wanted}.")


def nearest_divisors(number: int, wanted: int) -> str:
    """The three divisors of a number that are nearest to the one wanted, as text."""
    divisors = {each for n in range(1, math.isqrt(number) + 1) if number % n == 0 for each in (n, number // n)}
    return one_of(sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:3]))


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, checked when it is made; raises Mistake. The names of `norm` (the placement), `norm_layer`,
    `start`, `branch_init` and `activation` are looked up, and refused if unknown, when the model is made."""

    vocab_size: int = 256  # comes with the tokenizer, so it is neither a flag nor a key of a TOML file
    norm: str = setting("pre", "placement of the norms (BLOCKS in gpt/blocks.py)", "model")
    norm_layer: str = setting("layernorm", "normalization layer (NORMS in gpt/norms.py)")
    norm_eps: float = setting(1e-5, "added to the variance, inside the root")
    final_norm: bool | None = setting(None, "a norm before the head; by default as the placement asks")
    start: str = setting("gpt2", "weights: gpt2 (or as the placement's source has them), fan_in (the same for all)")
    branch_init: str | None = setting(None, "branch outputs: gpt2, gptj, plain, zero; by default as the placement asks")
    qk_norm: bool | None = setting(None, "norms of queries and keys, per head; by default as the placement asks")
    n_layers: int = setting(4, "number of blocks")
    n_heads: int = setting(4, "attention heads; must divide d_model")
    d_model: int = setting(128, "width of the residual stream")
    context_length: int = setting(64, "tokens that the model can look back on")
    dropout: float = setting(0.0, "on each branch, before it is added to the stream")
    bias: bool = setting(True, "biases in linear layers and norms")
    activation: str = setting("gelu_tanh", "of the MLP: gelu_tanh (GPT-2's), gelu, relu")

    def __post_init__(self):
        for name in ("vocab_size", "n_layers", "n_heads", "d_model", "context_length"):
            value = getattr(self, name)  # bounded: config files may be untrusted
            require(type(value) is int and 1 <= value <= 2**24, self, name, f"a whole number from 1 to {2**24}")
        require(0 < self.norm_eps < math.inf, self, "norm_eps", "above 0, as 1e-5")
        require(0 <= self.dropout < 1, self, "dropout", "at least 0 and below 1")
        if self.d_model % self.n_heads:
            raise Mistake(
                f"n_heads must divide d_model ({self.n_heads} heads, width {self.d_model}). "
                f"Use {nearest_divisors(self.d_model, self.n_heads)} heads, or another width."
            )


def require_same(stored: ModelConfig, wanted: ModelConfig, owner: str, shorter: bool = False):
    """Raise Mistake if the `owner` of weights has them for another architecture; another dropout will do, and with
    `shorter` a shorter context. Names and shapes alone do not tell: pre and post have the same."""
    for name in (each.name for each in dataclasses.fields(ModelConfig) if each.name != "dropout"):
        old, new = getattr(stored, name), getattr(wanted, name)
        limit = shorter and name == "context_length"
        if old != new and not (limit and new < old):
            origin = ", that of the tokenizer" if name == "vocab_size" else ""
            remedy = f"Give at most {old}." if limit else "Leave it as it was."
            raise Mistake(f"{owner} has another {name}{origin} ({old}, not {new}). {remedy}")
