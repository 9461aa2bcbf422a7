"""What a reader of a comparison's tables (gpt/study/tables.py) needs to know, in sentences."""

from collections.abc import Iterable

from gpt.study.comparison import NEAR, limit_of_t
from gpt.study.tables import CHANCE


def about(rows: list[dict], title: str) -> str:
    """How the runs were made, from their rows, in two lines that begin with the `title`."""
    seeds = sorted({row["seed"] for row in rows if row["part"] != "rate"})
    span = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    choosing = {row["seed"] for row in rows if row["part"] == "rate"}
    choice = [f"rates chosen on seed {_values(choosing)}, which is not counted"] if choosing else []
    setting = {
        name: _values(row[name] for row in rows) for name in ("optimizer", "batch_size", "context_length", "d_model")
    }
    code, corpus = (_values(row[name][:8] for row in rows) for name in ("code", "corpus"))
    shape = f"batches of {setting['batch_size']} x {setting['context_length']} tokens; width {setting['d_model']}"
    return "\n".join(
        [
            f"{'; '.join([title, span, *choice])}.",
            f"Optimizer {setting['optimizer']}; {shape}; code {code}; corpus {corpus}.",
        ]
    )


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
            "Lowest on the way: the lowest validation loss of a run, at whatever step; mean over seeds. It is chosen "
            "by looking, and so it is rather too low.",
        ),
        (
            runs > 0,
            "Spike: from a step whose loss (or gradient norm) is not finite, or more than 6 standard deviations above "
            "the mean of the 128 steps before, until one is back at that mean. Steps 1 to 128 are not judged. "
            "Unrecovered: a spike of the loss not back within 128 steps or before the end. Sums over the seeds; "
            "diverged runs count.",
        ),
        (
            _any(summary, "stuck") or not all(entry["judged_stuck"] for entry in summary),
            "Stuck: the run ends with a validation loss not 0.1 nats below the entropy of single tokens of the "
            "training text, and a training loss not 0.5 below. It has learned hardly anything from the tokens before. "
            "Runs shorter than the warm-up and 100 steps are not judged. Stuck runs count in the means. Where some "
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
    holm = f", corrected by Holm's method for the {tests} differences tested here; p alone: not corrected" * several
    which = f"and {tests} differences the clearest" if several else "the difference"
    return (
        f"p: two-sided paired t-test{holm}. The test takes differences to be normally distributed, which so few seeds "
        f"cannot show. Lower or higher: p < {CHANCE}. If no entry truly differed from {first} at these rates, any "
        f"would be called so with a probability of at most {CHANCE}. With {count} seeds {which} must be {limit:.1f} "
        "standard errors from 0 to be called so. Not told apart: these seeds show no difference, which does not mean "
        "that there is none."
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
            "Largest rate that holds: the rate rises linearly from 0. This is the first rate from which on, for 50 "
            "steps or to the end, the mean loss of 10 steps is more than 0.5 nats above its least value so far, or "
            "back above the entropy of single tokens of the training text less 0.1 nats; or at which a loss is no "
            "number. Geometric mean ×/÷ geometric standard deviation over the seeds; the ratios are paired by seed. A "
            "bound (> or <) stands where a run held to the end. The rate is reached in passing: a whole run at it need "
            "not hold. It depends on --steps and on the top, to which it rises; compare only entries with the same of "
            "both.",
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
