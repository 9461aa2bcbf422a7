"""The plan of a comparison: which entries there are, and which rates are tried."""

import math

import pytest

from gpt.study import comparison
from gpt.training.entries import folder_name, read_entries
from gpt.training.plan import MOST_RATES, MOST_SEEDS, NEAR, Plan, at_rate, search
from gpt.training.settings import configure


def searched(rates, first, loss) -> tuple[list[float], float]:
    """All rates that a search asks for, one loss after the other, and the one it takes."""
    losses = {}
    while True:
        tried, chosen = search(rates, first, losses.get)
        if chosen is not None:
            assert sorted(tried) == sorted(losses)
            return sorted(losses), chosen
        missing = [rate for rate in tried if rate not in losses]
        assert missing
        losses[missing[0]] = loss(missing[0])


@pytest.mark.parametrize("power", range(-3, 4))
def test_auto_brackets_the_best_rate_wherever_it_is(power):
    """A loss with one valley: the rate taken is its least power of 2, with a worse one tried on each side."""
    tried, chosen = searched("auto", 0.012, lambda rate: abs(math.log2(rate / 0.012) - power - 0.1))
    assert chosen == pytest.approx(0.012 * 2**power) and tried[0] < chosen < tried[-1]
    assert len(tried) == abs(power) + 3


def test_auto_does_not_stop_at_a_dent_that_noise_may_have_made():
    """The next rate is worse by less than what counts, and beyond it lies the valley."""
    losses = {-1: 2.1, 0: 2.0, 1: 2.01, 2: 1.9, 3: 1.8, 4: 2.0}
    tried, chosen = searched("auto", 1.0, lambda rate: losses[round(math.log2(rate))])
    assert NEAR == comparison.NEAR and chosen == 8.0 and tried == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("slope", [-1, 1])
def test_auto_ends_where_the_best_lies_ever_further(slope):
    tried, chosen = searched("auto", 1.0, lambda rate: slope * rate)
    assert chosen == (tried[-1] if slope < 0 else tried[0]) and MOST_RATES - 1 <= len(tried) <= MOST_RATES


def test_auto_goes_down_from_a_rate_that_fails():
    tried, chosen = searched("auto", 1.0, lambda rate: math.inf if rate > 0.2 else 1 - rate)
    assert chosen == 0.125 and tried == [0.0625, 0.125, 0.25, 0.5, 1.0]
    tried, chosen = searched("auto", 1.0, lambda rate: math.inf)
    assert chosen == tried[0] and len(tried) == MOST_RATES and tried[-1] == 1.0


def test_of_rates_that_the_user_names_all_are_tried():
    assert searched((1.0, 2.0, 4.0), 9.0, lambda rate: (rate - 2) ** 2) == ([1.0, 2.0, 4.0], 2.0)
    assert searched((1.0, 2.0), 9.0, lambda rate: 0.0)[1] == 1.0


def test_another_rate_keeps_the_share_of_the_last_rate():
    assert at_rate(configure({"lr": 0.01, "min_lr": 0.001}), 0.04).last_lr == pytest.approx(0.004)
    assert at_rate(configure({"optimizer": "adamw"}), 0.04).last_lr == pytest.approx(0.004)
    assert at_rate(configure({}), 0.04).last_lr == 0


def test_rates_are_chosen_on_a_seed_that_is_never_counted():
    plan = Plan({"pre": {None: configure({"seed": 7})}}, [7, 8, 9], rates=(0.01, 0.02))
    runs = plan.runs(lambda run: run.config.peak_lr)
    assert [(run.part, run.config.seed, run.config.lr) for run in runs] == [
        *(("rate", 7 + MOST_SEEDS, rate) for rate in (0.01, 0.02)),
        *(("counted", seed, 0.01) for seed in (7, 8, 9)),
    ]
    assert len({run.name for run in runs}) == len(runs)
    assert plan.runs(lambda run: None) == runs[:2]


def test_words_and_commas_make_entries():
    entries, common = read_entries(["pre,post:lr=0.1,bias=false", "peri", "keel:min-lr=none"])
    assert common == {} and entries == {
        "pre": {"norm": "pre"},
        "post:lr=0.1,bias=false": {"norm": "post", "lr": 0.1, "bias": False},
        "peri": {"norm": "peri"},
        "keel:min-lr=none": {"norm": "keel", "min_lr": None},
    }


@pytest.mark.parametrize("name", ["a:b=1", "..", "", "a/b\\c", "CON: x?", "ü" * 300, " . "])
def test_any_name_of_an_entry_is_a_folder(name, tmp_path):
    folder = tmp_path / folder_name(name)
    folder.mkdir()
    assert folder.parent == tmp_path and not set(folder.name) & set(':*?"<>|/\\')
