"""What a reader of a comparison's tables (gpt/study/tables.py) needs to know, in sentences."""

from collections.abc import Iterable

from gpt.study.comparison import NEAR, limit_of_t
from gpt.study.tables import CHANCE

COMMON = ("optimizer", "batch_size", "context_length", "n_layers", "d_model", "n_heads", "warmup_steps")
# What a row has beside its settings, and the settings that the tables show.
SHOWN = "run entry depth part seed lr min_lr code corpus parameters in_norms tokens_per_s stuck diverged val_loss "
SHOWN += "best_val_loss best_step loss_spikes grad_norm_spikes unrecovered largest_rate"


def about(rows: list[dict], title: str) -> str:
    """How the runs were made, from their rows, in a few lines that begin with the `title`: what all have in common, and
    the settings in which entries differ."""
    seeds = sorted({row["seed"] for row in rows if row["part"] != "rate"})
    span = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    choosing = {row["seed"] for row in rows if row["part"] == "rate"}
    choice = [f"rates chosen on seed {_values(choosing)}, which is not counted"] if choosing else []
    by_entry = {row["entry"]: row for row in reversed(rows)}
    hidden = {*SHOWN.split(), *(["n_layers"] if rows[0]["depth"] else [])}
    settings = [name for name in rows[0] if name not in hidden]
    differ = [name for name in settings if len({row[name] for row in by_entry.values()}) > 1]
    common = [f"{name} {rows[0][name]}" for name in COMMON if name in settings and name not in differ]
    lines = [f"{'; '.join([title, span, *choice, *common])}; corpus {_values(row['corpus'][:8] for row in rows)}."]
    for entry in dict.fromkeys(row["entry"] for row in rows):
        own = ", ".join(f"{name} {by_entry[entry][name]}" for name in differ)
        code = _values(row["code"][:8] for row in rows if row["entry"] == entry)
        lines.append(f"- `{entry}`: {own}{'; ' if own else ''}code {code}.")
    return "\n".join(lines)


def legend(summary: list[dict]) -> str:
    """What a reader of these tables needs to know, and nothing else: a list in Markdown."""
    return "\n".join(f"- {text}" for applies, text in [*_of_losses(summary), *_of_rates(summary)] if applies)


def _of_losses(summary: list[dict]) -> list[tuple[bool, str]]:
    """What there is to know on losses and failures, each with whether it applies."""
    runs = max(entry["runs"] for entry in summary)
    differences = [entry["difference"] for entry in summary if entry["difference"]]
    seeds = [difference["seeds"] for difference in differences if difference["p"] is not None]
    return [
        (runs == 1, "Losses and differences: one seed; how much they vary from seed to seed is not known."),
        (
            runs > 1,
            "Losses: mean ± standard deviation (divisor n - 1) over the seeds in which the run did not diverge.",
        ),
        (
            _any(summary, "diverged"),
            "Diverged: a loss, a gradient norm or a weight is no finite number. Where a run diverged, losses and "
            "differences are those of the seeds that ended. These may be the easier "
            "ones, and nothing is tested. Two losses may then be over different seeds. Spikes and tokens/s include the "
            "diverged runs.",
        ),
        (
            any(difference["seeds"] > 1 for difference in differences),
            "Differences: mean ± standard error (standard deviation of the differences by seed, divided by √n) over "
            "the seeds in which neither run diverged.",
        ),
        (bool(seeds), _of_p(seeds, summary[0]["entry"])),
        (runs > 0, "Seeds: the runs that ended without diverging, of all."),
        (
            runs > 0,
            "Lowest on the way: the lowest validation loss of a run, at whatever step; mean over seeds. The best of "
            "several evaluations is too low. Do not compare entries by it.",
        ),
        (bool(differences), f"Lower than {summary[0]['entry']}: in how many of the seeds."),
        (
            runs > 0,
            "Spike: from a step whose loss (or gradient norm) is not finite, or more than 6 standard deviations above "
            "the mean of the 128 steps before, until one is back at that mean. Steps 1 to 128 are not judged. "
            "Unrecovered: a spike of the loss not back within 128 steps or before the end. Sums over the seeds; "
            "diverged runs count.",
        ),
        (
            _any(summary, "stuck") or not all(entry["judged_stuck"] for entry in summary),
            "Stuck: the run has learned hardly more than how often each token comes. The entropy of single tokens of "
            "the training text is the loss of a model that knows just that. A stuck run ends with a validation loss "
            "above that entropy less 0.1 nats, and with a training loss above that entropy less 0.5. Runs of fewer "
            "steps than the warm-up and 100 more are not judged. Stuck runs count in the means. Where some "
            "runs of an entry are stuck and others are not, nothing is tested.",
        ),
        (_any(summary, "tokens_per_s"), "tokens/s: median over seeds; other work on the machine lowers it."),
    ]


def _of_p(seeds: list[int], first: str) -> str:
    """What p means, for the numbers of seeds of the differences that are tested."""
    if not seeds:
        return ""
    tests, count = len(seeds), min(seeds)
    limit = limit_of_t(CHANCE / tests, count - 1)
    several = tests > 1
    holm = (
        f", corrected by Holm's method for the {tests} differences tested here; p, uncorrected: without that" * several
    )
    which = f"and {tests} differences the clearest" if several else "the difference"
    return (
        f"p: two-sided paired t-test{holm}. The test takes differences to be normally distributed, which so few seeds "
        f"cannot show. Lower or higher: p < {CHANCE}. If no entry truly differed from {first} at these rates, any "
        f"would be called lower or higher with a probability of at most {CHANCE}. With {count} seeds {which} must be "
        f"{limit:.1f} standard errors from 0 to be called lower or higher. Not told apart: these seeds show no "
        "difference, which does not mean that there is none."
    )


def _of_rates(summary: list[dict]) -> list[tuple[bool, str]]:
    """What there is to know on learning rates, each with whether it applies."""
    chosen = [entry["rates"].values() for entry in summary if entry["rates"]]
    return [
        (
            not chosen and any(entry["runs"] for entry in summary),
            "All runs of an entry at one depth had one learning rate, which need not be its best.",
        ),
        (
            bool(chosen),
            "Chosen rate: of the rates tried, the one with the lowest validation loss in one run, for each entry and "
            "depth, on a seed that is not counted. p compares the entries at these rates, not at their best: one run "
            "chose each, so equal placements may get unequal rates and be called different. More seeds make this "
            "more frequent, since they show smaller differences. In parentheses: the rates around the chosen one, "
            "without a gap, whose loss was within "
            f"{NEAR} nats of its loss.",
        ),
        (
            _any(summary, "edge"),
            "Not bounded: these rates reach the largest (above) or the smallest (below) that was tried. A better one "
            "may lie beyond.",
        ),
        (any(None in losses for losses in chosen), "Failed: the run with this rate diverged."),
        (
            any(all(loss is None for loss in losses) for losses in chosen),
            "All tried diverged: the entry has the smallest of the rates tried.",
        ),
        (
            _any(summary, "ramps"),
            "Largest rate that holds: the rate of a run rises linearly from 0. The run leaves its path at the first "
            "step from which on it is off its path for 50 steps, or to the end. It is off its path if the mean loss of "
            "10 steps is more than 0.5 nats above its least value so far, or if it was below the entropy of single "
            "tokens of the training text less 0.1 nats and is above that again, or if a loss is no number. Shown is "
            "the rate of that step: geometric mean, times or divided by (×/÷) the geometric standard deviation over "
            "the seeds. The ratios are paired by seed. Where a run held to the end, only a bound is known (> or <). "
            "The rate is reached in passing: a whole run at it need not hold. It depends on --steps and on the highest "
            "rate; compare only entries that have both in common.",
        ),
        (
            _any(summary, "learned_nothing"),
            "Learned nothing: that mean was never below that entropy less 0.1 nats. Such a run is left out of means "
            "and ratios.",
        ),
    ]


def _values(values: Iterable) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _any(summary: list[dict], *keys: str) -> bool:
    return any(entry[key] for entry in summary for key in keys)
