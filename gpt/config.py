"""Settings and where they come from: defaults < TOML file < flags. Imports no torch, so that --help is quick."""

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path

FORMAT = 1  # of config.json, state.json and results.json
RATES = {"muon": (0.012, 0.0), "adamw": (1e-3, 0.1)}  # by default: the peak, and the last as a share of the peak


def _setting(default, text):
    return field(default=default, metadata={"help": text})


def _require(ok, config, name, wanted):
    if not ok:
        raise ValueError(f"{name} is out of range ({getattr(config, name)}). It must be {wanted}.")


def _nearest_divisors(number, wanted):
    divisors = {each for n in range(1, math.isqrt(number) + 1) if number % n == 0 for each in (n, number // n)}
    return sorted(sorted(divisors, key=lambda n: abs(n - wanted))[:3])


def one_of(values):
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. `norm` and `norm_layer` are looked up, and refused if unknown, where the model is built."""

    vocab_size: int = 256  # comes with the tokenizer: neither a flag nor a key of a TOML file
    norm: str = _setting("pre", "placement of the norms: pre, post, none, ... (BLOCKS in gpt/blocks.py)")
    norm_layer: str = _setting("layernorm", "normalization layer (NORMS in gpt/norms.py)")
    norm_eps: float = _setting(1e-5, "added to the variance, inside the root")
    final_norm: bool | None = _setting(None, "a norm before the head; by default as the placement asks")
    branch_init: str | None = _setting(None, "branch outputs: gpt2, plain, zero; by default as the placement asks")
    n_layers: int = _setting(4, "number of blocks")
    n_heads: int = _setting(4, "attention heads; must divide d_model")
    d_model: int = _setting(128, "width of the residual stream")
    context_length: int = _setting(64, "tokens the model can look back on")
    dropout: float = _setting(0.0, "on each branch, before it is added to the stream")
    bias: bool = _setting(True, "biases in linear layers and norms")
    activation: str = _setting("gelu_tanh", "of the MLP: gelu_tanh (GPT-2's), gelu, relu")

    def __post_init__(self):
        for name in ("vocab_size", "n_layers", "n_heads", "d_model", "context_length"):
            value = getattr(self, name)  # with a limit, since the configuration may be a stranger's
            _require(type(value) is int and 1 <= value <= 2**24, self, name, f"a whole number from 1 to {2**24}")
        _require(0 < self.norm_eps < math.inf, self, "norm_eps", "above 0, as 1e-5")
        _require(0 <= self.dropout < 1, self, "dropout", "at least 0 and below 1")
        if self.d_model % self.n_heads:
            near = one_of(_nearest_divisors(self.d_model, self.n_heads))
            found = f"{self.n_heads} heads, width {self.d_model}"
            raise ValueError(f"n_heads must divide d_model ({found}). Use {near} heads, or another width.")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on. `TrainConfig()` is configs/tiny.toml, the default run."""

    model: ModelConfig = ModelConfig()
    data: str = _setting(
        "python-docs", "corpus: python-docs, shakespeare, a text file, a folder of .txt, or one of data/prepare.py"
    )
    tokenizer: str = _setting("bytes", "bytes (256 ids) or gpt2 (50,257 ids)")
    val_fraction: float = _setting(0.1, "last part of the corpus, held out; 0 turns evaluation off")
    steps: int = _setting(2000, "optimizer updates")
    batch_size: int = _setting(12, "sequences per step")
    micro_batch_size: int | None = _setting(None, "sequences per forward pass; by default the whole batch")
    init: str = _setting("scratch", "starting weights: scratch, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder")
    optimizer: str = _setting("muon", "muon, on the matrices of the blocks, with AdamW for the rest; or adamw")
    lr: float | None = _setting(None, "peak learning rate; by default 0.012 for muon and 0.001 for adamw")
    min_lr: float | None = _setting(None, "rate of the last step; by default 0 for muon and a tenth of lr for adamw")
    warmup_steps: int = _setting(100, "steps of linear warm-up, then a line (muon) or a cosine (adamw) to min_lr")
    weight_decay: float = _setting(0.1, "times the rate, on matrices only")
    beta1: float = _setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = _setting(0.99, "AdamW's decay of the mean squared gradient")
    adam_eps: float = _setting(1e-8, "AdamW's term against division by zero")
    grad_clip: float = _setting(1.0, "largest gradient norm; 0 turns clipping off")
    eval_every: int = _setting(200, "steps between validation losses")
    log_every: int = _setting(20, "steps between lines of metrics.jsonl")
    probe_every: int | None = _setting(None, "steps between lines of probe.jsonl, for probe.py; by default none")
    save_every: int | None = _setting(None, "steps between checkpoints; by default at each evaluation")
    keep: int = _setting(2, "newest checkpoints to keep, beside the best")
    seed: int = _setting(1337, "of weights, batches, dropout and the closing sample")
    device: str = _setting("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16")
    compile: str = _setting("auto", "torch.compile: on, off, or auto (on a CUDA GPU)")
    tensorboard: bool = _setting(False, "write events for TensorBoard into the run's folder, too")
    shard: bool = _setting(False, "with several processes: each keeps a part of the weights and moments (FSDP2)")

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "log_every", "keep"):
            _require(getattr(self, name) >= 1, self, name, "1 or more")
        for name in ("micro_batch_size", "save_every", "probe_every"):
            _require(getattr(self, name) is None or getattr(self, name) >= 1, self, name, "1 or more")
        for name in ("weight_decay", "grad_clip"):
            _require(0 <= getattr(self, name) < math.inf, self, name, "0 or more")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, self, name, "at least 0 and below 1")
        lookup(RATES, self.optimizer, "optimizer")
        _require(self.lr is None or 0 < self.lr < math.inf, self, "lr", "above 0, as 1e-3")
        _require(0 < self.adam_eps < math.inf, self, "adam_eps", "above 0, as 1e-8")
        _require(0 <= self.val_fraction < 1, self, "val_fraction", "at least 0 and below 1")
        _require(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")
        _require(0 <= self.seed < 2**63, self, "seed", "at least 0 and below 2**63")
        _require(self.init != "", self, "init", "scratch, a name or a folder")
        _require(self.data != "", self, "data", "a name, a file or a folder")
        _require(self.compile in ("auto", "on", "off"), self, "compile", "auto, on or off")
        _require(0 <= self.last_lr <= self.peak_lr, self, "min_lr", f"at least 0 and at most lr, {self.peak_lr}")
        self.micro_size()

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        return RATES[self.optimizer][0] if self.lr is None else self.lr

    @property
    def last_lr(self) -> float:
        """The learning rate of the last step."""
        return self.peak_lr * RATES[self.optimizer][1] if self.min_lr is None else self.min_lr

    def micro_size(self, processes: int = 1) -> int:
        """Sequences in one forward pass of one process. Raises ValueError if they do not divide the batch."""
        share, rest = divmod(self.batch_size, processes)
        if rest:
            near = one_of(n * processes for n in (share, share + 1) if n)
            raise ValueError(
                f"batch_size must be a multiple of the {processes} processes ({self.batch_size}). Use {near}."
            )
        micro = self.micro_batch_size or share
        if share % micro:
            near = one_of(_nearest_divisors(share, micro))
            of = f"batch_size / {processes}" if processes > 1 else "batch_size"
            raise ValueError(f"micro_batch_size must divide {of} ({micro} and {share}). Use {near}.")
        return micro


def unknown(what: str, name: str, known) -> str:
    """The message for a name that is not in `known`: the nearest ones, or all of them."""
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f"Did you mean {one_of(near)}?" if near else f"Known: {', '.join(known)}."
    return f"unknown {what} ({name}). {hint}"


def lookup(table: dict, name: str, what: str):
    """table[name]; raises ValueError with the nearest names where there is none."""
    if name not in table:
        raise ValueError(unknown(what, name, table))
    return table[name]


def require_same(theirs: ModelConfig, ours: ModelConfig, whose: str):
    """Raise ValueError if the architectures differ in more than dropout. Names and shapes of all tensors may agree all
    the same, as those of pre and post do."""
    for name in (each.name for each in dataclasses.fields(ModelConfig) if each.name != "dropout"):
        if getattr(theirs, name) != getattr(ours, name):
            what = "vocab_size, that of the tokenizer" if name == "vocab_size" else name
            found = f"{getattr(theirs, name)}, not {getattr(ours, name)}"
            raise ValueError(f"{whose} another {what} ({found}). Leave it as it was.")


MODEL_SETTINGS = {f.name: f for f in dataclasses.fields(ModelConfig) if f.metadata}
SETTINGS = MODEL_SETTINGS | {f.name: f for f in dataclasses.fields(TrainConfig) if f.metadata}


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def kind_of(name: str) -> type:
    """The type of a setting, None apart."""
    return next(kind for kind in (SETTINGS[name].type, *typing.get_args(SETTINGS[name].type)) if kind in KINDS)


def _typed(name, value):
    """`value` as the type that the setting is declared with; an integer will do for a float."""
    if value is None and SETTINGS[name].default is None:
        return None
    kind = kind_of(name)
    if type(value) is int and kind is float and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} has the wrong type ({value!r}). It must be {KINDS[kind]}.")
    return value


def configure(settings: dict, base: TrainConfig = TrainConfig()) -> TrainConfig:
    """`base` with the flat `settings` of both dataclasses laid over it; ValueError for an unknown or a bad one."""
    for name in settings:
        if name not in SETTINGS:
            raise ValueError(unknown("setting", name, SETTINGS))
    settings = {name: _typed(name, value) for name, value in settings.items()}
    model = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    rest = {name: value for name, value in settings.items() if name not in MODEL_SETTINGS}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **rest)


def flat(config: TrainConfig) -> dict:
    """The opposite of `configure`: every setting of both dataclasses in one dict."""
    return {name: getattr(config.model if name in MODEL_SETTINGS else config, name) for name in SETTINGS}


def read_json(path: str | Path) -> dict:
    """The object that a JSON file holds; ValueError if it cannot be read."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("no object")
        return stored
    except OSError as error:
        raise ValueError(f"cannot read the file ({path}: {error.strerror}). Get it again.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file ({error}). Get it again.") from None


def read_toml(path: str | Path) -> dict:
    """The settings of a TOML file; ValueError if it cannot be read."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        for name in settings:
            if isinstance(settings[name], dict):
                raise ValueError(f"a table, [{name}]")
        return settings
    except OSError as error:
        found = f"{Path(path).absolute()}: {error.strerror}"
        remedy = "Name a .toml file, as configs/tiny.toml; a setting is a flag, as --norm post."
        raise ValueError(f"cannot read the configuration ({found}). {remedy}") from None
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are both ValueErrors
        remedy = "Write one `key = value` a line. A text to train on is --data FILE."
        raise ValueError(f"{path} is not a TOML file of settings ({error}). {remedy}") from None
