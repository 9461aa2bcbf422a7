"""The settings of a run, and where they come from: defaults < TOML file < flags. Imports no torch."""

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt.config import (
    MOST,
    SEEDS,
    Mistake,
    ModelConfig,
    lookup,
    nearest_divisors,
    one_of,
    require,
    require_same,
    setting,
    settings_of,
    typed,
)

RATES = {"muon": (0.012, 0.0), "adamw": (1e-3, 0.1)}  # the default peak, and the last rate as a share of the peak


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on, checked when it is made; raises Mistake. `TrainConfig()` is configs/tiny.toml,
    the default run."""

    model: ModelConfig = ModelConfig()
    data: str = setting(
        "python-docs",
        "corpus: python-docs, shakespeare, a text file, a folder of .txt, or one of data/prepare.py",
        "data",
    )
    tokenizer: str = setting("bytes", "bytes (256 ids) or gpt2 (50,257 ids)")
    val_fraction: float = setting(0.1, "last part of the corpus, held out; 0 turns evaluation off")
    steps: int = setting(2000, "optimizer updates", "training")
    batch_size: int = setting(12, "sequences per step")
    micro_batch_size: int | None = setting(None, "sequences per forward pass; by default the whole batch")
    init: str = setting("scratch", "starting weights: scratch, a run, a folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl")
    optimizer: str = setting("muon", "muon, on the matrices of the blocks, with AdamW for the rest; or adamw")
    lr: float | None = setting(None, "peak learning rate; by default 0.012 for muon and 0.001 for adamw")
    min_lr: float | None = setting(None, "rate after the last step; by default 0 for muon and a tenth of lr for adamw")
    warmup_steps: int = setting(100, "steps of linear warm-up, then a line (muon) or a cosine (adamw) to min_lr")
    weight_decay: float = setting(0.1, "times the rate, on matrices only")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = setting(0.99, "AdamW's decay of the mean squared gradient")
    adam_eps: float = setting(1e-8, "AdamW's term against division by zero")
    grad_clip: float = setting(1.0, "largest gradient norm; 0 turns clipping off")
    eval_every: int = setting(200, "steps between validation losses", "run")
    eval_tokens: int = setting(2**18, "at most so many targets at each, evenly spaced over the validation split")
    log_every: int = setting(20, "steps between lines of metrics.jsonl")
    probe_every: int | None = setting(None, "steps between lines of probe.jsonl, for probe.py; by default none")
    save_every: int | None = setting(None, "steps between checkpoints; by default at each evaluation")
    keep: int = setting(2, "newest checkpoints to keep, beside the best")
    seed: int = setting(1337, "of weights, batches, dropout and the closing sample")
    tensorboard: bool = setting(False, "also write events for TensorBoard into the run's folder")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", "machine")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")
    compile: str = setting("auto", "torch.compile: on, off, or auto (on a CUDA GPU)")
    shard: bool = setting(False, "with several processes: each keeps a part of the weights and moments (FSDP2)")

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "eval_tokens", "log_every", "keep"):
            require(1 <= getattr(self, name) <= MOST, self, name, f"from 1 to {MOST}")
        for name in ("micro_batch_size", "save_every", "probe_every"):
            require(getattr(self, name) is None or 1 <= getattr(self, name) <= MOST, self, name, f"from 1 to {MOST}")
        for name in ("weight_decay", "grad_clip"):
            require(0 <= getattr(self, name) < math.inf, self, name, "0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, self, name, "at least 0 and below 1")
        lookup(RATES, self.optimizer, "optimizer")
        require(self.lr is None or 0 < self.lr < math.inf, self, "lr", "above 0, as 1e-3")
        require(0 < self.adam_eps < math.inf, self, "adam_eps", "above 0, as 1e-8")
        require(0 <= self.val_fraction < 1, self, "val_fraction", "at least 0 and below 1")
        require(0 <= self.warmup_steps <= MOST, self, "warmup_steps", f"from 0 to {MOST}")
        require(0 <= self.seed < SEEDS, self, "seed", "at least 0 and below 2**63")
        require(self.init != "", self, "init", "scratch, a name or a folder")
        require(self.data != "", self, "data", "a name, a file or a folder")
        require(self.compile in ("auto", "on", "off"), self, "compile", "auto, on or off")
        require(0 <= self.last_lr <= self.peak_lr, self, "min_lr", f"at least 0 and at most lr, {self.peak_lr}")
        self.micro_size()

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        return RATES[self.optimizer][0] if self.lr is None else self.lr

    @property
    def last_lr(self) -> float:
        """The learning rate that a step after the last would have."""
        return self.peak_lr * RATES[self.optimizer][1] if self.min_lr is None else self.min_lr

    def micro_size(self, processes: int = 1) -> int:
        """Sequences in one forward pass of one process. Raises Mistake if they do not divide the batch."""
        share, rest = divmod(self.batch_size, processes)
        if rest:
            near = one_of(n * processes for n in (share, share + 1) if n)
            raise Mistake(
                f"batch_size must be a multiple of the {processes} processes ({self.batch_size}). Use {near}."
            )
        micro = self.micro_batch_size or share
        if share % micro:
            whole = f"batch_size / {processes}" if processes > 1 else "batch_size"
            near = nearest_divisors(share, micro)
            raise Mistake(f"micro_batch_size must divide {whole} ({micro} and {share}). Use {near}.")
        return micro


MODEL_SETTINGS = settings_of(ModelConfig)
SETTINGS = MODEL_SETTINGS | settings_of(TrainConfig)


def configure(settings: dict, base: TrainConfig = TrainConfig()) -> TrainConfig:
    """`base` with `settings` of both dataclasses, by name, laid over it. Raises Mistake for an unknown name or a value
    that will not do."""
    settings = {name: typed(name, value, lookup(SETTINGS, name, "setting")) for name, value in settings.items()}
    model = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    rest = {name: value for name, value in settings.items() if name not in MODEL_SETTINGS}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **rest)


def flat(config: TrainConfig) -> dict:
    """The opposite of `configure`: every setting of both dataclasses in one dict."""
    return {name: getattr(config.model if name in MODEL_SETTINGS else config, name) for name in SETTINGS}


def read_toml(path: str | Path, tables=()) -> dict:
    """The settings of a TOML file, and those of its tables whose names are in `tables`. Raises Mistake if it cannot be
    read, or has other tables."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        str(settings)  # raises a ValueError for a whole number of more than 4,300 digits
        for name in settings:
            if isinstance(settings[name], dict) != (name in tables):
                known = "".join(f", and no [{each}.NAME]" for each in tables)
                raise ValueError(f"a table, [{name}]{known}" if name not in tables else f"{name} is no [{name}.NAME]")
        return settings
    except OSError as error:
        reason = f"{Path(path).absolute()}: {error.strerror}"
        remedy = "Name a .toml file, as configs/tiny.toml; a setting is a flag, as --norm post."
        raise Mistake(f"cannot read the configuration ({reason}). {remedy}") from None
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are both ValueErrors
        remedy = "Write one `key = value` a line. A text to train on is --data FILE."
        raise Mistake(f"{path} is not a TOML file of settings ({error}). {remedy}") from None


def from_weights(source: str) -> TrainConfig:
    """The settings for training weights further: their architecture, their tokenizer and a rate. A run or a checkpoint
    of one goes on by its optimizer, at its rate; published weights by AdamW, at a low rate. All else is as by default.
    Raises Mistake if there are no such weights, or no tokenizer for them."""
    from gpt import pretrained
    from gpt.training import checkpoint

    place = located(source)
    if pretrained.recognizes(source):
        model = pretrained.read_config(pretrained.find(source, ["config.json"]))  # the rest may be gigabytes
        return TrainConfig(model, tokenizer=tokenizer_of(model, source), init=place, optimizer="adamw", lr=3e-5)
    run = checkpoint.read_state(checkpoint.find(source, hint=hint(source)))[1]
    lr = None if run.lr == RATES[run.optimizer][0] else run.lr  # so that another optimizer has its own default
    return TrainConfig(run.model, tokenizer=run.tokenizer, init=place, optimizer=run.optimizer, lr=lr)


def hint(source: str) -> str:
    """Where weights come from, for a `source` that is neither a run nor published weights."""
    from gpt.published import NAMES

    owner, _, name = source.partition("/")
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) and owner != "runs" and not os.path.exists(owner):
        return f"If it is the hub's: hf download {source} --local-dir {name}, and name that folder."
    return "" if "/" in source else f"Published weights: {', '.join(NAMES)}."


def located(source: str) -> str:
    """`source`, a name or a folder of weights, with a folder made absolute: the same wherever a run is continued."""
    from gpt.published import NAMES

    named = source in (*NAMES, *NAMES.values()) and not os.path.isdir(source)
    return source if named or source == "scratch" else str(Path(source).absolute())


def tokenizer_of(weights: ModelConfig, source: str = "") -> str:
    """The tokenizer of published weights: the one of ours that has their number of ids. Raises Mistake if there is
    none, or if `source` is a folder that has another one."""
    from gpt import tokenizer

    if weights.norm == "pre" and 50257 <= weights.vocab_size <= 50304:  # some pad the vocabulary with unused ids
        name = "gpt2"
    elif weights.vocab_size == 256:
        name = "bytes"
    else:
        raise Mistake(f"no tokenizer for these weights ({weights.vocab_size:,} ids). Use them from Python, with ids.")
    if os.path.isdir(source):
        tokenizer.require_stored(tokenizer.TOKENIZERS[name](), Path(source))
    return name


def assumed(config: TrainConfig) -> list[str]:
    """That nothing but the number of ids tells the tokenizer of the weights in the folder `config.init`, if so."""
    from gpt import pretrained, tokenizer

    folder = Path(config.init)
    if config.init == "scratch" or not folder.is_dir() or not pretrained.recognizes(folder):
        return []
    return [] if tokenizer.stored_in(folder) else [f"tokenizer {config.tokenizer} is assumed, as {folder} has none"]


def weights_of(config: TrainConfig) -> Callable:
    """The function that makes the model with the weights `config.init`. Raises Mistake if they are of another
    architecture or tokenizer than the `config`."""
    from gpt import pretrained
    from gpt.training import checkpoint

    base = from_weights(config.init)
    require_same(base.model, config.model, config.init, shorter=True)
    if config.tokenizer != base.tokenizer:
        values = f"{base.tokenizer}, not {config.tokenizer}"
        raise Mistake(f"the weights are for another tokenizer ({values}). Leave it out.")
    load = pretrained.load if pretrained.recognizes(config.init) else checkpoint.load_model
    return lambda: load(config.init, config.model)
