"""The pictures: what is drawn is what was measured, and can be read."""

import itertools

import pytest
from matplotlib.figure import Figure

from gpt import BLOCKS
from gpt.study import plots

NEAR = {name: [1.0, 2.0, 4 + number / 1000] for number, name in enumerate(BLOCKS)}


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """The figures that are saved from now on."""
    saved, really = [], Figure.savefig

    def save_and_keep(figure, *arguments, **settings):
        saved.append(figure)
        really(figure, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    return saved


def drawn(figure) -> list[dict]:
    """For each panel, the points of each line by its label."""
    return [{line.get_label(): line.get_xydata().tolist() for line in axis.lines} for axis in figure.axes]


@pytest.mark.parametrize("values", [NEAR, {name: column[::-1] for name, column in NEAR.items()}], ids=["top", "bottom"])
def test_each_line_is_named_at_its_end_and_no_name_hides_another(figures, tmp_path, values):
    plots.depth_lines({"stream": values, "gradient": NEAR}, "t", tmp_path / "p.png")
    (figure,) = figures
    assert drawn(figure)[0] == {name: [[1, a], [2, b], [3, c]] for name, (a, b, c) in values.items()}
    for axis in figure.axes:
        boxes = {text.get_text(): text.get_window_extent() for text in axis.texts}
        assert boxes.keys() == BLOCKS.keys()
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes.values(), 2))
        assert all(axis.bbox.x1 > box.x0 and axis.bbox.y1 > box.y0 for box in boxes.values())
        colours = {line.get_label(): line.get_color() for line in axis.lines}
        assert {text.get_text(): text.get_color() for text in axis.texts} == colours


def test_a_band_is_the_mean_and_the_range_over_the_seeds_at_steps_that_all_have(figures, tmp_path):
    seeds = [{1: 9.0, 5: 3.0, 10: 2.0}, {1: 7.0, 5: 4.0, 10: 1.0, 11: 0.5}]
    plots.bands({"loss": {"pre": seeds, "nothing": [{}]}}, "t", tmp_path / "p.png")
    ((axis,),) = (figure.axes for figure in figures)
    assert drawn(figures[0]) == [{"pre": [[1, 8], [5, 3.5], [10, 1.5]], "nothing": []}]
    corners = axis.collections[0].get_paths()[0].vertices.tolist()
    assert all([step, loss] in corners for step in (1, 5, 10) for loss in (seeds[0][step], seeds[1][step]))
    assert [text.get_text() for text in axis.texts] == ["pre"]
    low, high = axis.get_ylim()
    assert low < 1 and 4 < high < 7  # the first fifth of the steps does not count


def test_depth_by_step_has_a_row_for_each_block_and_a_column_for_each_step(figures, tmp_path):
    plots.depth_by_step({"stream": ([0, 10], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}, "t", tmp_path / "p.png")
    axis, scale = figures[0].axes
    assert axis.collections[0].get_array().tolist() == [[1, 4], [2, 5], [3, 6]]
    assert scale.get_ylabel() == "stream"


def test_a_curve_has_both_losses_where_there_are_both(figures, tmp_path):
    records = [{"step": 1, "loss": 3.0, "lr": 0.1}, {"step": 2, "loss": 2.0, "lr": 0.2, "val_loss": 2.5}]
    plots.training_curve(records, "byte", tmp_path / "r" / "curve.png")
    losses, (rate,) = drawn(figures[0])[0], drawn(figures[0])[1].values()
    assert losses == {"training": [[1, 3], [2, 2]], "validation": [[2, 2.5]]} and rate == [[1, 0.1], [2, 0.2]]
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["curve.png"]


def test_letters_that_the_font_lacks_are_no_error(tmp_path):
    plots.depth_lines({"stream": {"運": [1.0, 2.0]}}, "運 $x", tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()
