"""The statistics of a comparison, its tables and its words."""

import csv
import math
import re

import pytest
import torch

from gpt.study import results
from gpt.study.comparison import best_rate, holm, limit_of_t, paired, rates_of, students_p, summarize
from gpt.study.formats import as_csv, comment, latex, markdown
from gpt.study.legend import about, legend
from gpt.study.tables import CHANCE, SHORT, depth_table, joined_table, ramps_table, rates_table


def row(entry, seed, loss, **changes) -> dict:
    """A run's row; a loss of None has diverged."""
    return {
        "run": f"{entry}-{seed}",
        "entry": entry,
        "depth": 4,
        "n_layers": 4,
        "lr": 0.01,
        "seed": seed,
        "part": "counted",
        "val_loss": loss,
        "best_val_loss": loss,
        "diverged": 3 if loss is None else None,
        "stuck": False,
        "loss_spikes": 0,
        "grad_norm_spikes": 0,
        "unrecovered": 0,
        "largest_rate": None,
        "parameters": 9,
        "in_norms": 0,
        "tokens_per_s": 5,
        "steps": 300,
        "warmup_steps": 100,
        "optimizer": "muon",
        "batch_size": 12,
        "context_length": 64,
        "d_model": 128,
        "code": "0123456789",
        "corpus": "9876543210",
    } | changes


def summary_of(*losses, depths=(4,), **changes) -> list[dict]:
    """The summary of the entries a, b, ... from their losses, seed by seed, which are the same at each depth."""
    entries, seeds = "abcdef"[: len(losses)], range(len(losses[0]))
    rows = [
        row(entry, seed, column[seed], depth=depth, n_layers=depth, **changes)
        for depth in depths
        for entry, column in zip(entries, losses)
        for seed in seeds
    ]
    return summarize(rows, [*entries], depths, [*seeds])


def by_head(cells) -> list[dict]:
    return [dict(zip(cells[0], cells_of_row)) for cells_of_row in cells[1:]]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30])
def test_students_p_is_the_integral_of_its_density(freedom):
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    for t in (0.0, 0.3, 1.0, 2.5, 8.0):
        x = torch.linspace(0, t, 20_001, dtype=torch.float64)
        inside = 2 * torch.trapezoid(constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
        assert students_p(t, freedom) == pytest.approx(1 - float(inside), abs=1e-7)
        assert students_p(-t, freedom) == students_p(t, freedom)
    assert 0 <= students_p(1e9, freedom) < 1e-8
    for p in (0.5, 0.05, 0.001):
        assert students_p(limit_of_t(p, freedom), freedom) == pytest.approx(p)


def test_paired_differences_are_tested_and_not_the_two_groups():
    """Seeds differ by 1, placements by 0.01: a difference that only pairing finds."""
    test = paired([-0.010, -0.011, -0.009])
    assert test["p"] < 0.005 and test["lower"] == test["seeds"] == 3
    assert test["error"] == pytest.approx(0.001 / math.sqrt(3))


@pytest.mark.parametrize("differences", [[0.5], [0.0, 0.0], [1.1 - 1, 2.1 - 2, 3.1 - 3]])
def test_one_difference_or_equal_ones_have_no_p(differences):
    """Of the last, rounding alone makes a spread, which is no evidence."""
    assert paired(differences)["p"] is None and holm([None, None]) == [None, None]


def test_holms_correction_is_that_of_his_paper():
    """Step down: the least p times the number of tests, the next one times one less, and never below one before."""
    assert holm([0.01, None, 0.04, 0.03, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1] and holm([0.03]) == [0.03]


def test_differences_of_all_depths_and_entries_are_corrected_together():
    losses = (1, 2, 3), (1.11, 2.1, 3.09), (1.2, 2.0, 3.1)
    (_, b, c), table = summary_of(*losses), summary_of(*losses, depths=(4, 8))
    p, other = b["difference"]["p"], c["difference"]["p"]
    cells = by_head(depth_table(summary_of(*losses), 4, "byte"))[1]
    assert cells["p, uncorrected"] == f"{p:.4f}" and f"{2 * p:.4f}" in cells["result"]
    assert p < 0.05 < other and b["difference"]["holm"] == pytest.approx(2 * p)
    assert [entry["difference"] and entry["difference"]["holm"] for entry in table] == [
        None,
        pytest.approx(4 * p),
        pytest.approx(2 * other),
        None,
        pytest.approx(4 * p),
        pytest.approx(2 * other),
    ]


@pytest.mark.parametrize(
    "one, other, words",
    [
        ((1, 2, 3), (0.91, 1.89, 2.9), ["lower than a", "0.0033"]),
        ((1, 2, 3), (1.11, 2.1, 3.09), ["higher than a", "0.0033"]),
        ((1, 2, 3), (0.9, 1.9, 2.9001), ["lower than a", "< 0.001"]),
        ((1, 2, 3), (1.1, 1.9, 3.01), ["not told apart by 3 seeds", "p = 0.959"]),
        ((1, 2), (1, 2), ["same loss as a"]),
        ((1, 2, 3), (1.1, 2.1, 3.1), ["higher than a", "same amount", "no test"]),
        ((1,), (1.2,), ["one seed", "noise"]),
        ((1,), (1,), ["same loss as a"]),
        ((1, 2, 3), (0.91, None, 2.9), ["diverged in 1 of 3", "seen by step 3", "not tested"]),
        ((1, None, 3), (0.91, 1.89, 2.9), ["not tested"]),
        ((1, 2), (None, None), ["diverged in 2 of 2"]),
        ((None, 1), (1, None), ["diverged in 1 of 2", "no seed", "both"]),
    ],
)
def test_the_words_say_whether_a_difference_was_shown(one, other, words):
    _, cells = by_head(depth_table(summary_of(one, other), 4, "byte"))
    assert all(word in cells["result"] for word in words), cells["result"]
    assert ("higher" in cells["result"] or "lower" in cells["result"]) == any("er than a" in word for word in words)


def test_the_corrected_p_decides():
    """A p of 0.033 alone is a difference; as one of two tests it is not."""
    losses = (1, 2), (0.91, 1.9), (1.1, 1.9)
    alone, among = (by_head(depth_table(summary_of(*some), 4, "byte"))[1]["result"] for some in (losses[:2], losses))
    assert "lower" in alone and "not told apart" in among


def test_a_diverged_run_takes_its_differences_out_of_the_test():
    """Those of its entry, or all if it is the first entry's; the others are corrected for their own number."""
    losses = (1, 2, 3), (1.11, 2.1, 3.09), (1.2, 2.0, None)
    _, b, c = summary_of(*losses)
    assert b["difference"]["holm"] == b["difference"]["p"] < 0.05 and b["difference"]["untested"] is None
    assert c["difference"]["p"] is c["difference"]["holm"] is None and c["difference"]["untested"]
    assert c["difference"]["mean"] == pytest.approx(0.1) and c["difference"]["seeds"] == 2
    _, *others = summary_of(losses[2], *losses[:2])
    assert all(entry["difference"]["p"] is None and entry["difference"]["untested"] for entry in others)
    cells = by_head(joined_table(summary_of(*losses)))
    assert cells[2]["p (Holm)"] == "" and cells[1]["p (Holm)"] == "0.0033"


@pytest.mark.parametrize("stuck, tested", [([0, 0, 0], True), ([1, 0, 0], False), ([1, 1, 0], False), ([1] * 3, True)])
@pytest.mark.parametrize("which", ["a", "b"])
def test_a_mixture_of_stuck_runs_and_others_is_not_tested(which, stuck, tested):
    losses = {"a": (1, 2, 3), "b": (1.11, 2.1, 3.09)}
    rows = [
        row(entry, seed, loss, stuck=bool(stuck[seed]) and entry == which)
        for entry in losses
        for seed, loss in enumerate(losses[entry])
    ]
    summary = summarize(rows, ["a", "b"], [4], [0, 1, 2])
    result = by_head(depth_table(summary, 4, "byte"))[1]["result"]
    assert (summary[1]["difference"]["p"] is not None) == tested == ("higher" in result) == ("not tested" not in result)


def test_a_printed_p_is_on_the_side_of_its_verdict():
    """0.04999 and 0.0504 would both be 0.050."""
    for p in (0.0004, 0.0032, 0.012, 0.0494, 0.04951, 0.049999, 0.05, 0.0504, 0.38, 1.0):
        summary = summary_of((1, 2, 3), (1.11, 2.1, 3.09))
        summary[1]["difference"] |= {"p": p, "holm": p}
        cells, joined = by_head(depth_table(summary, 4, "byte"))[1], by_head(joined_table(summary))[1]
        text = cells["p, uncorrected"]
        assert text == joined["p (Holm)"] and text in cells["result"]
        assert (float(text.strip("< ")) < CHANCE) == (p < CHANCE) == ("higher" in cells["result"])
        assert len(text) >= 5


def test_a_stuck_run_counts_and_is_named():
    rows = [row("a", seed, 2.0) for seed in (1, 2)] + [row("b", 1, 3.0, stuck=True), row("b", 2, 2.5)]
    summary = summarize(rows, ["a", "b"], [4], [1, 2])
    assert summary[1]["stuck"] == 1 and summary[1]["val_loss"] == 2.75 and "Stuck" in legend(summary)
    assert "stuck in 1 of 2" in by_head(depth_table(summary, 4, "byte"))[1]["result"]
    assert "1 of 2 stuck" in by_head(joined_table(summary))[1]["4 blocks: loss"]


def test_runs_that_are_missing_are_left_out():
    rows = [row("a", 1, 2.0), row("a", 2, 3.0), row("b", 2, 3.5), row("b", 3, 9.0), row("b", 9, 0.0)]
    a, b, c = summarize(rows, ["a", "b", "c"], [4], [1, 2, 3])
    assert (a["runs"], b["runs"], c["runs"]) == (2, 2, 0) and b["difference"]["seeds"] == 1
    assert b["difference"]["mean"] == 0.5 and c["val_loss"] is c["difference"] is None
    assert len(depth_table([a, b, c], 4, "byte")) == len(joined_table([a, b, c])) == 4


RATES = {0.001: 2.0, 0.002: 1.51, 0.004: 1.5, 0.008: 1.519, 0.016: 1.521, 0.032: 1.51, 0.064: None}


@pytest.mark.parametrize(
    "tried, best, near, edge",
    [
        (RATES, 0.004, [0.002, 0.008], None),
        ({0.01: 1.5, 0.02: 1.4}, 0.02, [0.02, 0.02], "above"),
        ({0.01: 1.4, 0.02: 1.5}, 0.01, [0.01, 0.01], "below"),
        ({0.01: 1.4, 0.02: 1.4}, 0.01, [0.01, 0.02], "above or below"),
        ({0.01: 1.41, 0.02: 1.4, 0.04: 1.5}, 0.02, [0.01, 0.02], "below"),
        ({0.01: 1.4}, 0.01, [0.01, 0.01], "above or below"),
        ({0.01: None, 0.02: None}, None, None, None),
    ],
)
def test_rates_as_good_as_the_best_stand_around_it_without_a_gap(tried, best, near, edge):
    rows = [row("a", 99, loss, part="rate", lr=rate) for rate, loss in reversed(tried.items())]
    rows += [row("a", 99, 1.0, part="rate", lr=5.0, depth=8), row("b", 99, 1.0, part="rate", lr=5.0)]
    (summary,) = summarize(rows, ["a"], [4], [1])
    assert summary["rates"] == tried == rates_of(rows, "a", 4) and [*summary["rates"]] == sorted(tried)
    assert (best_rate(tried), summary["near"], summary["edge"]) == (best, near, edge)
    assert summary["val_loss"] is None and summary["runs"] == 0  # a run that chooses is not counted


def test_a_stuck_run_has_its_loss_among_the_rates():
    """A rate may be stuck because it is too small, and is no failure."""
    rows = [row("a", 99, 3.0, part="rate", stuck=True), row("a", 99, None, part="rate", lr=0.02)]
    assert rates_of(rows, "a", 4) == {0.01: 3.0, 0.02: None}


def test_the_chosen_rate_is_marked_and_a_failed_one_named():
    rows = [row("a", 99, loss, part="rate", lr=rate) for rate, loss in RATES.items()] + [row("a", 1, 1.5, lr=0.004)]
    summary = summarize(rows, ["a"], [4], [1])
    (cells,) = by_head(rates_table(summary))
    assert (cells["0.004"], cells["0.002"], cells["0.064"]) == ("**1.5000**", "1.5100", "failed")
    (column,) = (head for head in depth_table(summary, 4, "byte")[0] if "chosen rate" in head)
    assert by_head(depth_table(summary, 4, "byte"))[0][column] == "0.004 (0.002 to 0.008)"
    assert by_head(joined_table(summary))[0]["rate"] == "0.004"


def test_a_rate_that_is_not_bounded_or_not_chosen_says_so():
    for tried, words in (
        ({0.01: 1.4}, "above or below"),
        ({0.01: 1.4, 0.02: 1.5}, "below"),
        ({0.01: None}, "diverged"),
    ):
        rows = [row("a", 99, loss, part="rate", lr=rate) for rate, loss in tried.items()] + [row("a", 1, 1.5)]
        cells = depth_table(summarize(rows, ["a"], [4], [1]), 4, "byte")
        assert [text.startswith("0.01 (") and words in text for text in cells[1]].count(True) == 1, words
    assert by_head(depth_table(summary_of((1, 2)), 4, "byte"))[0]["rate"] == "0.01"


def test_the_seeds_that_ended_are_counted():
    a, b = by_head(depth_table(summary_of((1, 2, 3), (1, None, None)), 4, "byte"))
    assert (a["seeds"], b["seeds"]) == ("3 of 3", "1 of 3")


@pytest.mark.parametrize("steps, losses, judged", [(128, (1, 2), False), (129, (1, 2), True), (300, (None,), False)])
def test_spikes_are_counted_where_a_step_was_judged(steps, losses, judged):
    (cells,) = by_head(depth_table(summary_of(losses, steps=steps), 4, "byte"))
    assert (cells["spikes (loss, gradient)"], cells["unrecovered"]) == (("0, 0", "0") if judged else ("", ""))


def test_the_largest_rates_are_compared_by_their_ratios():
    largest = {"a": [0.01, 0.04], "b": [0.04, 0.16], "c": [0.04, None], "d": [None, None]}
    rows = [
        row(entry, seed, 2.0, part="ramp", lr=0.5, largest_rate=rate)
        for entry, rates in largest.items()
        for seed, rate in enumerate(rates)
    ]
    for entries, ratios in (("abcd", ["", "4 ×/÷ 1.00", "> 7.1", "> 25"]), ("dab", ["", "< 0.04", "< 0.16"])):
        table = by_head(ramps_table(summarize(rows, [*entries], [4], [0, 1])))
        assert [cells[f"times {entries[0]}'s"] for cells in table] == ratios
    a, _, c, d = (cells["largest rate that holds"] for cells in by_head(ramps_table(summarize(rows, "abcd", [4], [0]))))
    assert a.startswith("0.02 ×/÷ 2.67") and c.startswith("> 0.141 (1 of 2") and d == "> 0.5"


def test_a_run_that_learned_nothing_is_no_largest_rate():
    """Neither in the mean nor in the ratio, which is paired by seed."""
    largest = {"a": [None, 0.04, 0.01], "b": [None, 0.16, 0.02], "c": [None] * 3}
    rows = [
        row(entry, seed, 2.0, part="ramp", lr=0.5, largest_rate=rate, stuck=entry == "c" or entry + str(seed) == "b0")
        for entry, rates in largest.items()
        for seed, rate in enumerate(rates)
    ]
    summary = summarize(rows, [*"abc"], [4], [0, 1, 2])
    _, b, c = (
        (cells["largest rate that holds"], cells["times a's"], cells["runs"]) for cells in by_head(ramps_table(summary))
    )
    assert b[0].startswith("0.0566 ×/÷") and "learned nothing in 1 of 3" in b[0] and b[1].startswith("2.8 ×/÷ 1.63")
    assert c == ("learned nothing in 3 of 3", "", "3") and "Learned nothing" in legend(summary)
    rows[-1]["diverged"] = 100
    assert by_head(ramps_table(summarize(rows, [*"abc"], [4], [0, 1, 2])))[2]["largest rate that holds"].endswith(
        "(1 diverged)"
    )
    by_other = by_head(ramps_table(summarize(rows, [*"cb"], [4], [0, 1, 2])))
    assert by_other[1]["times c's"] == ""


def test_the_table_in_short_fits_a_terminal():
    cells = depth_table(summary_of((1, 2, 3), (1.1, 2.1, 3.2)), 4, "byte")
    lines = markdown([cells_of_row[:SHORT] for cells_of_row in cells]).splitlines()
    assert len(lines) == 4 and len({*map(len, lines)}) == 1 and len(lines[0]) < 125
    assert "2.1333 ± 1.0504" in lines[3] and "+0.1333 ± 0.0333" in lines[3] and "not told apart" in lines[3]


def test_the_joined_table_has_the_depths_side_by_side():
    head, _, cells = joined_table(summary_of((1, 2, 3), (1.11, 2.1, 3.09), depths=(4, 12)))
    assert [name for name in head if "blocks" in name] == ["4 blocks: loss", "12 blocks: loss"]
    assert cells == ["`b`", *2 * ["2.1000 ± 0.9900", "+0.1000 ± 0.0058", "0.0066"]] and head.count("p (Holm)") == 2


def test_entries_of_depths_of_their_own_are_one_group():
    rows = [row(entry, 1, 2.0, depth=None, n_layers=blocks) for entry, blocks in (("a", 4), ("b", 8))]
    summary = summarize(rows, ["a", "b"], [None], [1])
    assert [entry["n_layers"] for entry in summary] == [4, 8] and summary[1]["difference"]["mean"] == 0
    assert len(depth_table(summary, None, "byte")) == 3 and joined_table(summary)[0][1] == "loss"


def test_the_legend_says_what_applies_and_nothing_else():
    runs, one = {"Seeds:", "Spike:", "one learning rate"}, {"one seed;"}
    plain = runs | {"Losses:", "Differences:", "p:", "With 3 seeds"}
    losses = (1, 2, 3), (1.11, 2.1, 3.09)
    tries = [row("a", 9, 1.0, part="rate"), row("a", 9, None, part="rate", lr=0.02), row("a", 1, 1.0)]
    ramps = [row("a", 1, 1.0, part="ramp", largest_rate=0.1), row("a", 2, 1.0, part="ramp", stuck=True)]
    cases = (
        (summary_of((1.0,), (1.1,)), runs | one),
        (summary_of(*losses), plain),
        (summary_of((1, 2), (1.11, 2.1)), plain - {"With 3 seeds"} | {"With 2 seeds"}),
        (summary_of(*losses, depths=(4, 8)), plain | {"Holm's", "uncorrected:"}),
        (summary_of((1, 2, 3), (1.11, 2.1, None)), runs | {"Losses:", "Differences:", "Where a run diverged"}),
        (summary_of(*losses, warmup_steps=201), plain | {"Stuck:"}),
        (
            summarize(tries, ["a"], [4], [1]),
            (runs | one | {"Chosen rate:", "Not bounded:", "Failed:"}) - {"one learning rate"},
        ),
        (
            summarize(tries[1:], ["a"], [4], [1]),
            (runs | one | {"Chosen rate:", "Failed:", "All tried diverged:"}) - {"one learning rate"},
        ),
        (summarize(ramps[:1], ["a"], [4], [1]), {"Largest rate that holds:"}),
        (summarize(ramps, ["a"], [4], [1, 2]), {"Largest rate that holds:", "Learned nothing:"}),
    )
    every = set.union(*(words for _, words in cases))
    for summary, words in cases:
        text = f" {legend(summary)}"
        assert {word for word in every if f" {word}" in text} == words


@pytest.mark.parametrize("entries, depths, limit", [(2, 1, "4.3"), (4, 1, "7.6"), (4, 2, "10.9"), (4, 3, "13.4")])
def test_the_legend_tells_how_clear_a_difference_must_be(entries, depths, limit):
    """The t of p < 0.05 with 2 degrees of freedom, over the number of differences."""
    losses = [(1 + 0.1 * number, 2, 3 + 0.01 * number) for number in range(entries)]
    assert f" {limit} standard errors" in legend(summary_of(*losses, depths=range(1, depths + 1)))


def test_the_results_begin_with_how_the_runs_were_made(tmp_path, monkeypatch):
    """And results.tex has that and the legend as comments."""
    for name in ("_draw", "_measured"):
        monkeypatch.setattr(results, name, lambda *arguments: {})
    rows = [row("a", 99, 1.0, part="rate"), *(row("a", seed, 1.0 + seed, n_heads=2) for seed in (1, 2, 3))]
    rows.append(row("b", 1, 1.0, optimizer="adamw", code="abcdefghij"))
    results.write_results(tmp_path, rows, "byte", 3.0, "300 steps on x_y", latex=True)
    text, tex = ((tmp_path / name).read_text(encoding="utf-8") for name in ("results.md", "results.tex"))
    opening = about(rows, "300 steps on x_y")
    assert text.startswith(f"{opening}\n\n| 4 blocks")
    common, *entries = opening.splitlines()
    for words in ("300 steps on x_y", "seeds 1 to 3", "seed 99", "batch_size 12", "d_model 128", "98765432."):
        assert words in common and "optimizer" not in common
    assert [("a", "muon", "01234567"), ("b", "adamw", "abcdefgh")] == [
        tuple(re.fullmatch(r"- `(.)`: .*optimizer (\w+).*; code (\w+)\.", line).groups()) for line in entries
    ]
    first, *_, last = tex.split("\n\n")
    assert {line[:2] for part in (first, last) for line in part.split("\n") if line} == {"% "}
    assert "".join(comment(opening).split()) == "".join(first.split()) and "Losses" in last


def test_latex_has_no_sign_that_latex_reads():
    table = latex([["", "a_b & 5%"], ["`pre:norm_layer=rmsnorm`", "-1.5 ± 0.1"], ["#{$}~^\\", "**< 2 ×/÷ 1**"]])
    assert r"a\_b \& 5\% \\" in table and r"\texttt{pre:norm\_layer=rmsnorm} & $-$1.5 $\pm$ 0.1 \\" in table
    assert r"\#\{\$\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in table
    assert r"\textbf{$<$ 2 $\times/\div$ 1}" in table and table.isascii()
    assert (
        table.startswith(r"\begin{tabular}{lr}") and [table.count(rule) for rule in ("top", "mid", "bottom")] == [1] * 3
    )


def test_csv_has_all_columns_and_reads_back():
    text = as_csv(
        [{"entry": "pre:lr=0.1,n_layers=2", "val_loss": 0.1 + 0.2}, {"entry": "b", "diverged": 3, "val_loss": None}]
    )
    one, other = csv.DictReader(text.splitlines())
    assert [*one] == ["entry", "val_loss", "diverged"] and float(one["val_loss"]) == 0.1 + 0.2
    assert one["entry"] == "pre:lr=0.1,n_layers=2" and (one["diverged"], other["val_loss"]) == ("", "")
