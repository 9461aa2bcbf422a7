import pytest
from conftest import toy_config, toy_model

from gpt import BLOCKS, report
from gpt.distributed import ALONE


def warned(norm="pre", val=(1, 2), **settings):
    """The warnings, by their first words."""
    texts = report.warnings(toy_config(steps=10, norm=norm, **settings), toy_model(norm=norm), Splits(val), ALONE)
    assert all(text.startswith("warning: ") and text.endswith(".") and "(" in text for text in texts)
    return [text.removeprefix("warning: ") for text in texts]


class Splits:
    """As much of Data as the warnings ask for."""

    def __init__(self, val):
        self.val = val


@pytest.mark.parametrize("norm", BLOCKS)
def test_post_ln_without_a_warm_up_is_warned_of(norm):
    assert warned(norm) == []
    expected = [f"{norm} may learn nothing without a warm-up (warmup_steps 0). Give --warmup-steps 100 or more."]
    assert warned(norm, warmup_steps=0) == (expected if norm == "post" else [])


def test_a_warm_up_that_does_not_end_and_an_evaluation_that_comes_late():
    assert warned(warmup_steps=9) == []
    (text,) = warned(warmup_steps=10)
    assert text == "the run ends within its warm-up (10 of 10 steps). Lower --warmup-steps."
    assert warned(eval_every=10) == [] and warned(eval_every=11, val=()) == []
    (text,) = warned(eval_every=11)
    assert text.startswith("the validation loss is computed at the end only (every 11 of 10 steps)")


def test_a_rising_validation_loss_is_said_at_the_end():
    end = {"run": "runs/x", "unit": "byte", "step": 9, "val_loss": 2.0, "best_step": 9, "best_val_loss": 2.0}
    assert "rises" not in report.closing(end)
    text = report.closing(end | {"best_step": 4, "best_val_loss": 1.5})
    assert "best 1.5000 at step 4\n" in text and "rises since step 4" in text and "sample.py takes" in text
    assert report.closing(end | {"val_loss": None}) == "run runs/x; more of this: python sample.py runs/x"
