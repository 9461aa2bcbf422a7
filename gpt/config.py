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


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """The message for a name that is not in `known`: it offers the nearest names, or else all of them."""
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f"Did you mean {one_of(near)}?" if near else f"Known: {', '.join(known)}."
    return f"unknown {kind} ({name}). {hint}"


def lookup(table: dict, name: str, kind: str):
    """table[name]. Raises Mistake, with the nearest names, if there is no such key."""
    if name not in table:
        raise Mistake(unknown(kind, name, table))
    return table[name]


def setting(default, text: str):
    """A field of a settings dataclass: a flag on the command line, with this text as its help."""
    return field(default=default, metadata={"help": text})


def settings_of(settings_class) -> dict[str, dataclasses.Field]:
    """The fields of a settings dataclass that are flags and keys of a TOML file, by name."""
    return {f.name: f for f in dataclasses.fields(settings_class) if f.metadata}


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def type_of(setting: dataclasses.Field) -> type:
    """The type of a setting, ignoring `| None`."""
    return next(each for each in (setting.type, *typing.get_args(setting.type)) if each in TYPES)


def typed(name: str, value, setting: dataclasses.Field):
    """`value`, as the type that the setting of this name is declared with; a whole number will do for a number. Raises
    Mistake for another type."""
    if value is None and setting.default is None:
        return None
    wanted = type_of(setting)
    if type(value) is int and wanted is float and abs(value) < 2**53:
        return float(value)
    if type(value) is not wanted:
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
    `branch_init` and `activation` are looked up, and refused if unknown, when the model is made."""

    vocab_size: int = 256  # comes with the tokenizer, so it is neither a flag nor a key of a TOML file
    norm: str = setting("pre", "placement of the norms: pre, post, none, ... (BLOCKS in gpt/blocks.py)")
    norm_layer: str = setting("layernorm", "normalization layer (NORMS in gpt/norms.py)")
    norm_eps: float = setting(1e-5, "added to the variance, inside the root")
    final_norm: bool | None = setting(None, "a norm before the head; by default as the placement asks")
    branch_init: str | None = setting(None, "branch outputs: gpt2, plain, zero; by default as the placement asks")
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


def require_same(stored: ModelConfig, wanted: ModelConfig, owner: str):
    """Raise Mistake if the `owner` of weights has them for another architecture; another dropout will do. Names and
    shapes alone do not tell: pre and post have the same."""
    for name in (each.name for each in dataclasses.fields(ModelConfig) if each.name != "dropout"):
        if getattr(stored, name) != getattr(wanted, name):
            origin = ", that of the tokenizer" if name == "vocab_size" else ""
            values = f"{getattr(stored, name)}, not {getattr(wanted, name)}"
            raise Mistake(f"{owner} has another {name}{origin} ({values}). Leave it as it was.")
