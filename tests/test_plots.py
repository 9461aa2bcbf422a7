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


def no_name_hides_another(axis) -> bool:
    boxes = [text.get_window_extent() for text in axis.texts]
    return not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def named(axis) -> dict:
    """The points of each line that has a name."""
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_xydata().tolist() for line in lines}


def crosses(axis) -> list[tuple[float, str, float]]:
    """(x, colour, height as a share of the panel) of the marks at the top."""
    marks = [line for line in axis.lines if line.get_marker() in ("x", "+")]
    return [(line.get_xdata()[0], line.get_color(), line.get_ydata()[0]) for line in marks]


def test_rates_have_a_ring_at_the_chosen_one_and_a_cross_for_each_that_failed(figures, tmp_path):
    lines = {name: ({0.02: None, 0.01: 2.0 + number, 0.005: 3.0}, 0.01) for number, name in enumerate(BLOCKS)}
    lines |= {"failed": ({0.01: None, 0.02: None}, None)}
    plots.rates({"4 blocks": lines, "12 blocks": lines}, "t", tmp_path / "p.png")
    for axis in figures[0].axes:
        points = {name: [[0.005, 3], [0.01, 2 + number]] for number, name in enumerate(BLOCKS)}
        assert named(axis) == points | {"failed": []} and axis.get_xscale() == "log"
        rings = [part.get_offsets().tolist() for part in axis.collections if len(part.get_offsets()) == 1]
        assert all([[0.01, 2 + number]] in rings for number in range(len(BLOCKS)))
        marks = crosses(axis)
        assert len(marks) == len({*marks}) == len(BLOCKS) + 2 and [x for x, *_ in marks].count(0.01) == 1
        low, high = axis.get_ylim()
        assert min(height for *_, height in marks) > (2 + len(BLOCKS) - 1 - low) / (high - low)  # above all lines
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0.005", "0.01", "0.02"]
        assert no_name_hides_another(axis) and {text.get_text() for text in axis.texts} == {*BLOCKS}


def test_depths_have_the_mean_and_the_range_of_the_seeds_that_ended(figures, tmp_path):
    lines = {"pre": {12: [2.0, 4.0, None], 4: [1.0, 1.5, 2.0]}, "none": {4: [3.0, 3.0, 3.0], 12: [None] * 3}}
    plots.depths({"loss": lines}, "t", tmp_path / "p.png")
    (axis,) = figures[0].axes
    assert named(axis) == {"pre": [[4, 1.5], [12, 3]], "none": [[4, 3]]}
    corners = axis.collections[0].get_paths()[0].vertices.tolist()
    assert all(corner in corners for corner in ([4, 1], [4, 2], [12, 2], [12, 4]))
    assert sorted((x, colour) for x, colour, _ in crosses(axis)) == [(12, plots.COLOURS[0]), (12, plots.COLOURS[1])]


def test_ramps_are_smooth_and_marked_where_they_leave_their_path(figures, tmp_path):
    rates, losses = [0.01 * step for step in range(1, 41)], [3.0, 1.0] * 15 + [9.0, None] * 5
    plots.ramps(
        {"loss": {"pre": (rates, losses, rates[29]), "post": (rates, [2.0] * 40, None)}}, "t", tmp_path / "p.png"
    )
    (axis,) = figures[0].axes
    pre, post = named(axis).values()
    assert len(pre) == 30 and len(post) == 40 and all(loss == 2 for _, loss in pre[9:])
    assert [(x, colour) for x, colour, _ in crosses(axis)] == [(rates[29], plots.COLOURS[0])]
    (faint,) = (line for line in axis.lines if line.get_alpha() and len(line.get_xdata()) > 1)
    assert faint.get_xdata()[0] == rates[29] and faint.get_ydata()[-1] == 9
    assert axis.get_ylim()[1] < 9 and axis.get_xlim()[1] > rates[-1]


@pytest.mark.parametrize("draw", [plots.rates, plots.depths])
def test_there_is_a_picture_where_all_runs_diverged(tmp_path, draw):
    lines = {"pre": ({0.1: None}, None)} if draw is plots.rates else {"pre": {4: [None]}}
    draw({"loss": lines}, "t", tmp_path / "p.png")
    assert (tmp_path / "p.png").exists()


@pytest.mark.parametrize("name", ["pre", "pre:norm_layer=rmsnorm"])
def test_a_name_has_room_beside_its_line(figures, tmp_path, name):
    plots.depth_lines({"stream": {name: [1.0, 2.0]}, "gradient": {name: [1.0, 3.0]}}, "t", tmp_path / "p.png")
    for axis in figures[0].axes:
        box = axis.texts[0].get_window_extent()
        assert axis.transData.transform((2, 1))[0] < box.x0 and box.x1 < axis.bbox.x1
