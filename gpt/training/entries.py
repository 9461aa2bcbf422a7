"""The entries of a comparison: placements with settings of their own."""

import argparse
import re
from collections.abc import Iterable, Mapping

from gpt.command_line import reader
from gpt.config import Mistake, lookup
from gpt.training.settings import SETTINGS, TrainConfig, configure, flat, read_toml

# What all entries share: with others the losses could not be subtracted, or the seeds not be paired. A run's seed is
# the comparison's.
SHARED = (
    "data",
    "device",
    "tokenizer",
    "val_fraction",
    "context_length",
    "eval_tokens",
    "eval_every",
    "seed",
    "shard",
)
FLAGS = ("seeds", "depths", "rates", "max_rate", "jobs", "out", "overwrite", "latex")  # that are no settings
EQUAL = ("steps", "batch_size")  # an entry may have them if all entries have the same


def folder_name(text: str) -> str:
    """A text as the name of a folder, also on Windows."""
    return re.sub(r"[^\w=.,+-]+", "-", text).strip("-.")[:80] or "entry"


def read_entries(words: list[str]) -> tuple[dict[str, dict], dict]:
    """The settings of each entry by its name, and those that all have, from a command line: entries, and a TOML file
    with settings and with a table [entries.NAME] for each of more entries. Raises Mistake for what cannot be read."""
    files = [word for word in words if word.endswith(".toml")]
    if len(files) > 1:
        raise Mistake(f"two configurations ({', '.join(files)}). Name one.")
    common = read_toml(files[0], tables=["entries"]) if files else {}
    entries = _read_words(word for word in words if word not in files)
    for name, settings in common.pop("entries", {}).items():
        if name in entries:
            raise Mistake(f"an entry is named twice ({name}). Name each once.")
        entries[name] = settings
    for name in common.keys() & {*FLAGS}:
        raise Mistake(f"that is a flag and no setting ({name} in {files[0]}). Give --{name.replace('_', '-')}.")
    return entries, common


def _read_words(words: Iterable[str]) -> dict[str, dict]:
    """The entries on a command line, PLACEMENT[:SETTING=VALUE,...] with spaces or commas between: settings by name."""
    parts: list[list[str]] = []  # of each entry: the placement, and its settings as lr=0.003
    for word in (word for each in words for word in each.replace(",", " ").split()):
        placement, colon, rest = word.partition(":")
        if "=" not in placement:
            parts.append([placement, rest] if colon else [placement])
        elif parts and len(parts[-1]) > 1:
            parts[-1].append(word)
        else:
            raise Mistake(f"a setting without a placement ({word}). Write it behind one, as pre:{word}.")
    entries: dict[str, dict] = {}
    for placement, *own in parts:
        name = ":".join([placement, *filter(None, [",".join(own)])])
        if name in entries:
            raise Mistake(f"an entry is named twice ({name}). Name each once.")
        entries[name] = {"norm": placement}
        for text in own:
            _add(entries[name], text, name)
    return entries


def _add(settings: dict, text: str, entry: str):
    """Add the setting in a text as lr=0.003 to an entry's."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals:
        raise Mistake(f"a setting of an entry has no value ({entry}). Write PLACEMENT:SETTING=VALUE, as pre:lr=0.003.")
    if name in settings:
        raise Mistake(f"a setting is there twice ({name} in {entry}). Give it once.")
    try:
        settings[name] = reader(lookup(SETTINGS, name, "setting"))(value)
    except argparse.ArgumentTypeError as error:
        raise Mistake(f"a setting of an entry has the wrong type ({entry}: {name}={value}): {error}.") from None


def make_entries(
    entries: Mapping[str, dict], common: dict, depths: list[int], elsewhere: dict[str, str]
) -> dict[str, dict[int | None, TrainConfig]]:
    """{name: {depth: configuration}} for entries' own settings by name, over the settings that are `common`; without
    `depths`, {name: {None: configuration}}. Raises Mistake for settings that would make the losses incomparable, and
    for those that the flags `elsewhere`, by setting, give."""
    made: dict[str, dict[int | None, TrainConfig]] = {}
    for name, own in entries.items():
        if not name.strip() or not name.isprintable():
            raise Mistake(f"an entry has no name that can be printed ({name!r}). Write it as [entries.NAME].")
        if not isinstance(own, dict):
            raise Mistake(f"an entry is a table ({name} = {own!r}). Write [entries.{name}] and its settings below.")
        for setting in own:
            lookup(SETTINGS, setting, "setting")
            if setting in elsewhere:
                raise Mistake(
                    f"{elsewhere[setting]} sets {setting} itself ({name}: {own[setting]}). Leave one of the two out."
                )
            if setting == "init":
                raise Mistake(f"a comparison starts from scratch ({name}: init {own[setting]}). Leave it out.")
            if setting in SHARED:
                raise Mistake(f"{setting} is the same for all entries ({name}: {own[setting]}). Give it as a flag.")
        try:
            config = configure(common | own)
            made[name] = {depth: configure({"n_layers": depth}, config) for depth in depths} or {None: config}
        except Mistake as error:
            raise Mistake(f"entry {name}: {error}") from None
    _check(made)
    return made


def _check(entries: dict[str, dict[int | None, TrainConfig]]):
    first_name, first = next((name, [*by_depth.values()][0]) for name, by_depth in entries.items())
    seen: dict[tuple, str] = {}
    for name, by_depth in entries.items():
        config = [*by_depth.values()][0]
        for setting in EQUAL:
            mine, other = getattr(config, setting), getattr(first, setting)
            if mine != other:
                raise Mistake(f"entries differ in {setting} ({first_name} {other}, {name} {mine}). Give all the same.")
        folder = folder_name(name).lower()
        for key, words in ((resolved(config).values(), "two entries are the same"), (folder, "two names are alike")):
            if tuple(key) in seen:
                raise Mistake(f"{words} ({seen[tuple(key)]}, {name}). Leave one out, or name it otherwise.")
            seen[tuple(key)] = name


def resolved(config: TrainConfig) -> dict:
    """Every setting, with what None stands for, so that a default that is typed is the same."""
    rates = {"lr": config.peak_lr, "min_lr": config.last_lr, "micro_batch_size": config.micro_size()}
    return flat(config) | rates | {"save_every": config.save_every or config.eval_every}
