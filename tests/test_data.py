import numpy as np
import pytest
import torch

from gpt.config import Mistake
from gpt.training.data import Data


def numbers(n=1000, context_length=8, batch_size=4, val_fraction=0.1, seed=0):
    return Data(np.arange(n, dtype=np.uint16), context_length, batch_size, val_fraction, seed)


def test_the_splits_are_contiguous_and_disjoint():
    data = numbers()
    assert np.array_equal(np.concatenate([data.train, data.val]), np.arange(1000)) and len(data.val) == 100


def test_a_batch_is_a_pure_function_of_seed_and_step():
    first, again = numbers(), numbers()
    expected = [first.batch(step) for step in range(5)]
    list(again.windows(3))  # evaluating in between changes nothing
    for step in reversed(range(5)):
        assert torch.equal(again.batch(step), expected[step])
    assert not torch.equal(expected[0], expected[1]) and not torch.equal(numbers(seed=1).batch(0), expected[0])


def test_rows_are_windows_of_the_training_split():
    data, seen = numbers(60, val_fraction=0.5), set()
    for step in range(200):
        rows = data.batch(step)
        assert rows.shape == (4, 9) and rows.dtype == torch.int64
        assert torch.equal(rows, rows[:, :1] + torch.arange(9)) and rows.max() < 30
        seen |= set(rows.flatten().tolist())
    assert seen == set(range(30))  # to the last token


@pytest.mark.parametrize("n_val", [9, 10, 16, 17, 18, 100])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_windows_ask_for_each_validation_token_but_the_first_once(n_val, rows):
    data = numbers(200, val_fraction=n_val / 200)
    assert len(data.val) == n_val
    windows = list(data.windows(rows))
    targets = torch.cat([window[:, 1:].flatten() for window in windows])
    assert targets.tolist() == data.val[1:].tolist()
    assert all(torch.equal(window[:, 1:], window[:, :-1] + 1) and len(window) <= rows for window in windows)


@pytest.mark.parametrize("n, ok", [(8, False), (9, True)])
def test_a_split_shorter_than_a_row_is_refused(n, ok):
    for name, fraction in (("validation", n / 200), ("training", 1 - n / 200)):
        if ok:
            assert numbers(200, val_fraction=fraction).batch(0).shape == (4, 9)
        else:
            with pytest.raises(Mistake) as mistake:
                numbers(200, val_fraction=fraction)
            assert all(
                word in str(mistake.value) for word in (name, "8 ", "200", "9", "context_length", "val_fraction")
            )


def test_without_a_validation_split_there_are_no_windows():
    data = numbers(val_fraction=0)
    assert len(data.train) == 1000 and list(data.windows(4)) == []


@pytest.mark.parametrize("n_val, rows", [(100, 4), (41, 4), (17, 2), (9, 1)])
def test_a_probe_gets_the_first_four_windows_or_as_many_as_there_are(n_val, rows):
    data = numbers(200, val_fraction=n_val / 200)
    assert torch.equal(data.few_rows(), torch.cat(list(data.windows(1))[:4])) and len(data.few_rows()) == rows


@pytest.mark.parametrize("batch_size, rows", [(6, 4), (2, 2)])
def test_without_validation_a_probe_gets_rows_of_the_first_batch(batch_size, rows):
    data = numbers(batch_size=batch_size, val_fraction=0)
    assert torch.equal(data.few_rows(), data.batch(0)[:rows])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_processes_share_out_a_batch(size):
    data = numbers()
    parts = [data.batch(7, rank, size) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == sorted(data.batch(7).tolist())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
