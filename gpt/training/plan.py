"""The plan of a comparison: which runs there are, of which entries, at which depths, rates and seeds."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpt.config import SEEDS, Mistake
from gpt.training import distributed
from gpt.training.entries import folder_name, make_entries, read_entries
from gpt.training.settings import TrainConfig, configure

MOST_SEEDS = 1000
MOST_RATES = 9  # that "auto" tries for an entry
NEAR = 0.02  # nats: a worse loss than the best one's by less does not end the search


class Run(NamedTuple):
    """One run of a comparison. Its `part` is "counted"; "rate", which helps to choose a rate and is not counted; or
    "ramp", whose rate rises until the loss leaves its path."""

    name: str  # of its folder in the comparison's folder
    entry: str
    depth: int | None
    part: str
    config: TrainConfig


@dataclass(frozen=True)
class Plan:
    """What runs there are. `entries` are {name: {depth: configuration}}; the depth None stands for the configuration's.
    `rates` are those to try for each entry, "auto", or None: each has the one rate of its configuration. `ramp`, if not
    None, asks for ramps in place of all else, up to so many times that rate."""

    entries: dict[str, dict[int | None, TrainConfig]]
    seeds: list[int]
    rates: tuple[float, ...] | str | None = None
    ramp: float | None = None

    @property
    def depths(self) -> list[int | None]:
        return [*next(iter(self.entries.values()))]

    @property
    def runs_of_each(self) -> int:
        """How many runs each entry has at each depth; with "auto" rates about so many."""
        tries = len(self.rates) if isinstance(self.rates, tuple) else 5 if self.rates else 0
        return tries + len(self.seeds)

    def expected(self, runs: list[Run]) -> int:
        """How many runs there will be, of which so many are known; with "auto" rates about."""
        return max(len(runs), sum(map(len, self.entries.values())) * self.runs_of_each)

    def runs(self, loss_of: Callable[[Run], float | None]) -> list[Run]:
        """The runs that are wanted as far as is known: those that choose rates, then the counted ones, seed by seed.
        `loss_of` tells the loss of a run, infinite if it diverged, and None before its end. The list grows
        as runs end; when all of it has ended, all is done."""
        choosing: list[Run] = []
        counted: list[Run] = []
        for entry, depth, config in self.configurations():
            if self.ramp is not None:
                top = at_rate(config, self.ramp * config.peak_lr)
                top = dataclasses.replace(top, warmup_steps=config.steps)
                counted += [self._run(entry, depth, "ramp", top, seed) for seed in self.seeds]
                continue
            rate: float | None = config.peak_lr
            if self.rates:
                tries, rate = self._tries(entry, depth, config, loss_of)
                choosing += tries
            if rate is not None:
                config = at_rate(config, rate)
                counted += [self._run(entry, depth, "counted", config, seed) for seed in self.seeds]
        return choosing + sorted(counted, key=lambda run: run.config.seed)

    def configurations(self) -> Iterator[tuple[str, int | None, TrainConfig]]:
        """The name, the depth and the configuration of each entry at each depth."""
        for entry, by_depth in self.entries.items():
            for depth, config in by_depth.items():
                yield entry, depth, config

    def _tries(self, entry: str, depth: int | None, config: TrainConfig, loss_of) -> tuple[list[Run], float | None]:
        """The runs that choose an entry's rate, as far as is known, and the rate."""
        seed = self.seeds[0] + MOST_SEEDS  # which no number of seeds makes a counted one

        def run_at(rate: float) -> Run:
            return self._run(entry, depth, "rate", at_rate(config, rate), seed)

        rates, chosen = search(self.rates, config.peak_lr, lambda rate: loss_of(run_at(rate)))
        return [*map(run_at, rates)], chosen

    def _run(self, entry: str, depth: int | None, part: str, config: TrainConfig, seed: int) -> Run:
        words = [folder_name(entry)]
        words += [f"{depth}-blocks"] * (depth is not None) + [f"lr-{config.peak_lr!r}"] * (self.rates is not None)
        words += [part] * (part != "counted") + [str(seed)]
        return Run("-".join(words), entry, depth, part, dataclasses.replace(config, seed=seed))


def at_rate(config: TrainConfig, rate: float) -> TrainConfig:
    """The same configuration at another peak rate; the last rate keeps its share of the peak."""
    last = None if config.min_lr is None else rate * (config.min_lr / config.peak_lr)
    return dataclasses.replace(config, lr=rate, min_lr=last)


def search(
    rates: tuple[float, ...] | str | None, first: float, loss_at: Callable[[float], float | None]
) -> tuple[list[float], float | None]:
    """The rates to try as far as is known, and the one with the least loss; None while a loss is missing. "auto" goes
    from the `first` rate by factors of 2 in both directions until the smallest and the largest rate are clearly worse
    than the best, by more than NEAR, or MOST_RATES are tried. A rate that fails, with an infinite loss, bounds it too:
    a larger one would not hold either."""
    losses: dict[float, float] = {}
    wanted = {*rates} if isinstance(rates, tuple) else {first}
    while True:
        new = {rate: loss_at(rate) for rate in sorted(wanted)}
        losses |= {rate: loss for rate, loss in new.items() if loss is not None}
        if not new.keys() <= losses.keys():
            return [*dict.fromkeys([*losses, *new])], None
        best = min(losses, key=lambda rate: (losses[rate], rate))
        near = [rate for rate in (min(losses), max(losses)) if losses[rate] <= losses[best] + NEAR]
        wanted = {min(losses) / 2} if min(losses) in near else set()
        wanted |= {2 * max(losses)} if max(losses) in near and losses[best] < math.inf else set()
        if rates != "auto" or not wanted or len(losses) + len(wanted) > MOST_RATES:
            return [*losses], best


def read_plan(
    words: list[str], flags: dict, seeds: int, depths: list[int] | None, rates: list[str] | None, ramp: float | None
) -> Plan:
    """The plan that a command line asks for, by its entries with a file among them, its settings, and the values of
    --seeds, --depths, --rates and --max-rate. Raises Mistake if the runs cannot be compared."""
    own, common = read_entries(words)
    common |= flags
    config = configure(common)
    if not own:
        raise Mistake("nothing to compare (0 entries). Name placements before the flags, as in compare.py pre post.")
    if config.init != "scratch" or config.val_fraction == 0:
        values = f"init {config.init}, val_fraction {config.val_fraction:g}"
        raise Mistake(f"a comparison starts from scratch and needs a validation split ({values}). Leave them out.")
    if (size := distributed.world().size) > 1:
        raise Mistake(f"a comparison needs no torchrun ({size} processes). Start it with python, as often as you like.")
    if ramp is not None and not 0 < ramp < 1e9:
        raise Mistake(f"--max-rate is a factor above 0 ({ramp:g}). Give one, as --max-rate 16.")
    if ramp is not None and rates:
        raise Mistake(f"--max-rate chooses no rate (--rates {' '.join(rates)}). Leave one of the two out.")
    tried = _read_rates(rates)
    elsewhere = {"n_layers": "--depths"} if depths else {}
    elsewhere |= {"lr": "--rates"} if isinstance(tried, tuple) else {}
    elsewhere |= {"warmup_steps": "--max-rate"} if ramp is not None else {}
    for setting in flags.keys() & elsewhere.keys():
        flag = f"--{setting.replace('_', '-')} {flags[setting]}"
        raise Mistake(f"{elsewhere[setting]} sets {setting} itself ({flag}). Leave one of the two out.")
    entries = make_entries(own, common, _once(depths or [], "--depths"), elsewhere)
    return Plan(entries, _seeds(config, seeds), tried, ramp)


def _read_rates(words: list[str] | None) -> tuple[float, ...] | str | None:
    """The value of --rates: "auto", or rates. Raises Mistake if they are neither."""
    if not words or words == ["auto"]:
        return words[0] if words else None
    try:
        rates = [float(word) for word in words]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise Mistake(f"--rates takes rates above 0, or auto ({' '.join(words)}). Write them as --rates 0.003 0.006.")
    return tuple(sorted(_once(rates, "--rates")))


def _once(values: list, flag: str) -> list:
    """The values of a flag. Raises Mistake if one is there twice."""
    if len({*values}) < len(values):
        raise Mistake(f"a value is there twice ({flag} {' '.join(map(str, values))}). Give each once.")
    return values


def _seeds(config: TrainConfig, count: int) -> list[int]:
    """So many seeds from the configuration's on. Raises Mistake if there are no such seeds."""
    if not 1 <= count <= MOST_SEEDS:
        raise Mistake(f"a comparison has from 1 to {MOST_SEEDS} seeds (--seeds {count}). Give such a number.")
    if config.seed + 2 * MOST_SEEDS > SEEDS:
        raise Mistake(f"the seed is too large to count on from it ({config.seed}). Give a lower --seed.")
    return [config.seed + number for number in range(count)]
