"""Spikes, and the rate at which a run leaves its path: on numbers made by hand, and on runs of a toy."""

import math
import random

import pytest
from toys import records, toy_config

import train
from gpt.study.stability import largest_rate, learned_nothing, spikes, stability
from gpt.training.optim import lr_at
from gpt.training.report import Diverged

WINDOW = 16


def noise(count=400, seed=0, level=3.0, size=0.1) -> list:
    draw = random.Random(seed)
    return [draw.gauss(level, size) for _ in range(count)]


def placed(changes: dict, count=400) -> list:
    """Noise around 3, with other values at some steps."""
    return [changes.get(step, value) for step, value in enumerate(noise(count))]


FALLING = [5 - step / 100 for step in range(400)]


@pytest.mark.parametrize("values", [[], [3.0], [None] * 128, [2.0] * 400, noise(), FALLING, FALLING[::-1]])
def test_a_run_without_spikes(values):
    assert spikes(values) == []


@pytest.mark.parametrize("value", [5.0, 1e30, None, math.nan, math.inf])
@pytest.mark.parametrize("step", [128, 200])
def test_a_spike_is_a_value_far_above_those_before_or_none(value, step):
    assert spikes(placed({step: value})) == [(step, True)]
    assert spikes(placed({step - 128: value})[:140]) == []  # none is judged as early, be it as far off


def test_a_fall_is_no_spike():
    assert spikes(placed({200: -9.0})) == []


def test_the_limit_is_in_standard_deviations_of_the_steps_before():
    values = [1.0, 3.0] * 64  # mean 2, standard deviation 1
    for last, deviations, spiking in ((7.9, 6, False), (8.1, 6, True), (4.9, 3, False), (5.1, 3, True)):
        assert bool(spikes([*values, last], deviations=deviations)) == spiking
        assert bool(spikes([100.0, 0.0, *values, last], deviations=deviations)) == spiking


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_steps_until_the_value_is_back_are_one_spike(length):
    """Also those that are above the mean, and no spike of their own. It has recovered within the window or not."""
    values = [2.0, 4.0] * WINDOW + [50.0] + [3.1] * (length - 1) + [3.0] + [2.0, 4.0] * WINDOW
    assert spikes(values, window=WINDOW) == [(2 * WINDOW, length <= WINDOW)]


def test_a_run_that_ends_before_it_is_back_has_not_recovered():
    values = [2.0, 4.0] * WINDOW + [50.0, 9.0, None]
    assert spikes(values, window=WINDOW) == [(2 * WINDOW, False)]


def test_spikes_far_apart_are_counted_apart():
    assert spikes(placed({150: 9.0, 300: None, 390: 9.0}, 800)) == [(150, True), (300, True), (390, True)]


def test_the_counts_of_a_run():
    losses, norms = placed({150: 9.0, 200: None, **dict.fromkeys(range(390, 400), 9.0)}), placed({130: 1e3})
    lines = [{"step": n, "loss": loss, "grad_norm": norm} for n, (loss, norm) in enumerate(zip(losses, norms), 1)]
    assert stability(lines) == {"loss_spikes": 3, "grad_norm_spikes": 1, "unrecovered": 1}
    assert stability([]) == {"loss_spikes": 0, "grad_norm_spikes": 0, "unrecovered": 0}


FALL = [5 - step / 50 for step in range(100)]  # from 5 down to 3.02
RATES = [step / 1000 for step in range(1, 1001)]
LEVEL = 4.5  # which a fall passes, and no rise from 3 within the margin reaches


@pytest.mark.parametrize("rest", [[], [3.0] * 100, [3.4] * 100, [9.0] * 4 + [3.0] * 90, [9.0] * 30 + [3.0] * 60])
def test_a_run_that_does_not_leave_its_path_has_no_largest_rate(rest):
    """Among them a rise within the margin, and one that ends before the patience does."""
    assert largest_rate([*FALL, *rest], RATES, LEVEL) is None and not learned_nothing([*FALL, *rest], LEVEL)


@pytest.mark.parametrize("length", [1, 10, 40, 49, 50, 200])
def test_a_run_that_is_off_its_path_at_its_end_has_left_it(length):
    assert largest_rate([*FALL, *[9.0] * length], RATES, LEVEL) == RATES[100]


def test_a_run_that_falls_back_to_what_it_knew_at_the_start_has_left_its_path():
    """Though by less than the margin: of 10 losses that rise from 3 to 3.3 the mean is above 3.2 after 7."""
    losses = [*FALL, *[3.0] * 20, *[3.3] * 60]
    assert largest_rate(losses, RATES, 3.2) == RATES[126] and largest_rate(losses, RATES, 3.4) is None


@pytest.mark.parametrize("losses, nothing", [([3.35] * 300, True), ([*FALL, *[3.02] * 20], False), ([None], True)])
def test_a_run_that_never_comes_below_the_level_has_learned_nothing(losses, nothing):
    """It would look the steadiest of all: it has no largest rate."""
    assert learned_nothing(losses, 3.3) == nothing
    if len(losses) > 1:
        assert largest_rate(losses, RATES, 3.3) is None
    assert learned_nothing([3.4, 3.1] * 20, 3.24) and not learned_nothing([3.4, 3.1] * 20, 3.26)


def test_the_largest_rate_is_that_of_the_first_step_off_the_path():
    """The mean of ten steps is more than half a nat above the least once enough of them are high."""
    for value, first in ((9.0, 0), (5.0, 2), (3.8, 6)):
        rate = largest_rate([*FALL, *[3.02] * 20, *[value] * 80], RATES, LEVEL)
        assert rate == RATES[120 + first], value
    back = [*FALL, *[9.0] * 50, *[3.0] * 60]
    assert largest_rate(back, RATES, LEVEL) == RATES[100] and largest_rate(back, RATES, LEVEL, patience=70) is None
    assert largest_rate([*FALL, *[3.02] * 20, *[3.4] * 60], RATES, LEVEL, margin=0.2, patience=20) == RATES[125]


@pytest.mark.parametrize("end", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_path(end):
    """At once, or from where the run had been off its path before."""
    assert largest_rate([*FALL, end], RATES, LEVEL) == RATES[100]
    assert largest_rate([*FALL, *[99.0] * 10, end], RATES, LEVEL) == RATES[100]
    assert largest_rate([*FALL, *[99.0] * 10, *[3.0] * 40, end], RATES, LEVEL) == RATES[150]
    assert largest_rate([end], RATES, LEVEL) == RATES[0]


def test_a_run_that_diverged_has_left_its_path_by_its_last_step():
    """Its weights may be no numbers while its loss is one."""
    assert largest_rate(FALL, RATES, LEVEL, diverged=True) == RATES[99]
    assert largest_rate([*FALL, *[99.0] * 10], RATES, LEVEL, diverged=True) == RATES[100]
    assert largest_rate([*FALL, *[9.0] * 60, *[3.0] * 40], RATES, LEVEL, diverged=True) == RATES[100]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("norm, lr, leaves", [("none", 3.0, True), ("pre", 300.0, True), ("pre", 0.01, False)])
def test_a_run_whose_rate_rises_without_end_leaves_its_path(tmp_path, text_file, norm, lr, leaves):
    """The rate of a run whose warm-up is as long as the run."""
    settings = {"data": str(text_file), "norm": norm, "lr": lr, "min_lr": 0.0, "optimizer": "adamw", "log_every": 5}
    config, diverged = toy_config(steps=150, warmup_steps=150, eval_every=150, **settings), False
    try:
        train.train(config, str(tmp_path / "r"))
    except Diverged:
        diverged = True
    losses = [line["loss"] for line in records(tmp_path / "r", "steps.jsonl")]
    rates = [lr_at(step, config) for step in range(150)]
    rate = largest_rate(losses, rates, -math.inf, diverged=diverged)  # by its rise alone
    assert (rate is None) == (not leaves) and (leaves or len(losses) == 150)
    if leaves:
        step = rates.index(rate)
        assert 0 < step < 149 and losses[step] > min(losses[:step]) + 0.5
