"""The settings of a run, and where they come from: defaults < TOML file < flags. Imports no torch."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from gpt.config import (
    Mistake,
    ModelConfig,
    lookup,
    nearest_divisors,
    one_of,
    require,
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
        "python-docs", "corpus: python-docs, shakespeare, a text file, a folder of .txt, or one of data/prepare.py"
    )
    tokenizer: str = setting("bytes", "bytes (256 ids) or gpt2 (50,257 ids)")
    val_fraction: float = setting(0.1, "last part of the corpus, held out; 0 turns evaluation off")
    steps: int = setting(2000, "optimizer updates")
    batch_size: int = setting(12, "sequences per step")
    micro_batch_size: int | None = setting(None, "sequences per forward pass; by default the whole batch")
    init: str = setting("scratch", "starting weights: scratch, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder")
    optimizer: str = setting("muon", "muon, on the matrices of the blocks, with AdamW for the rest; or adamw")
    lr: float | None = setting(None, "peak learning rate; by default 0.012 for muon and 0.001 for adamw")
    min_lr: float | None = setting(None, "rate of the last step; by default 0 for muon and a tenth of lr for adamw")
    warmup_steps: int = setting(100, "steps of linear warm-up, then a line (muon) or a cosine (adamw) to min_lr")
    weight_decay: float = setting(0.1, "times the rate, on matrices only")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = setting(0.99, "AdamW's decay of the mean squared gradient")
    adam_eps: float = setting(1e-8, "AdamW's term against division by zero")
    grad_clip: float = setting(1.0, "largest gradient norm; 0 turns clipping off")
    eval_every: int = setting(200, "steps between validation losses")
    log_every: int = setting(20, "steps between lines of metrics.jsonl")
    probe_every: int | None = setting(None, "steps between lines of probe.jsonl, for probe.py; by default none")
    save_every: int | None = setting(None, "steps between checkpoints; by default at each evaluation")
    keep: int = setting(2, "newest checkpoints to keep, beside the best")
    seed: int = setting(1337, "of weights, batches, dropout and the closing sample")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16")
    compile: str = setting("auto", "torch.compile: on, off, or auto (on a CUDA GPU)")
    tensorboard: bool = setting(False, "also write events for TensorBoard into the run's folder")
    shard: bool = setting(False, "with several processes: each keeps a part of the weights and moments (FSDP2)")

    def __post_init__(self):
        for name in ("steps", "batch_size", "eval_every", "log_every", "keep"):
            require(getattr(self, name) >= 1, self, name, "1 or more")
        for name in ("micro_batch_size", "save_every", "probe_every"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, self, name, "1 or more")
        for name in ("weight_decay", "grad_clip"):
            require(0 <= getattr(self, name) < math.inf, self, name, "0 or more")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, self, name, "at least 0 and below 1")
        lookup(RATES, self.optimizer, "optimizer")
        require(self.lr is None or 0 < self.lr < math.inf, self, "lr", "above 0, as 1e-3")
        require(0 < self.adam_eps < math.inf, self, "adam_eps", "above 0, as 1e-8")
        require(0 <= self.val_fraction < 1, self, "val_fraction", "at least 0 and below 1")
        require(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")
        require(0 <= self.seed < 2**63, self, "seed", "at least 0 and below 2**63")
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
        """The learning rate of the last step."""
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


def read_toml(path: str | Path) -> dict:
    """The settings of a TOML file. Raises Mistake if it cannot be read."""
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        for name in settings:
            if isinstance(settings[name], dict):
                raise ValueError(f"a table, [{name}]")
        return settings
    except OSError as error:
        reason = f"{Path(path).absolute()}: {error.strerror}"
        remedy = "Name a .toml file, as configs/tiny.toml; a setting is a flag, as --norm post."
        raise Mistake(f"cannot read the configuration ({reason}). {remedy}") from None
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are both ValueErrors
        remedy = "Write one `key = value` a line. A text to train on is --data FILE."
        raise Mistake(f"{path} is not a TOML file of settings ({error}). {remedy}") from None


def from_weights(source: str) -> TrainConfig:
    """The settings for training published weights further: their architecture and tokenizer, and a low rate."""
    from gpt import pretrained

    model = pretrained.read_config(pretrained.find(source, ["config.json"]))  # the rest may be gigabytes
    return TrainConfig(model=model, tokenizer=tokenizer_of(model), init=source, optimizer="adamw", lr=3e-5)


def tokenizer_of(weights: ModelConfig) -> str:
    """The tokenizer of published weights, as far as the number of their ids tells. Raises Mistake if it is none of
    ours."""
    if weights.norm == "pre" and 50257 <= weights.vocab_size <= 50304:  # some pad the vocabulary with unused ids
        return "gpt2"
    if weights.vocab_size == 256:
        return "bytes"
    raise Mistake(f"no tokenizer for these weights ({weights.vocab_size:,} ids). Use them from Python, with ids.")
