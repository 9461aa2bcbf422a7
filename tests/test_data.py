import dataclasses
import types

import numpy as np
import pytest
import torch
from toys import toy_config, toy_model

import train
from gpt.config import Mistake
from gpt.loss import NextToken
from gpt.tokenizer import TOKENIZERS
from gpt.training import data as data_module
from gpt.training import shards
from gpt.training.data import Data
from gpt.training.trainer import mean_loss


def numbers(n=1000, context_length=8, batch_size=4, val_fraction=0.1, seed=0, eval_tokens=None):
    return Data(np.arange(n, dtype=np.uint16), context_length, batch_size, val_fraction, seed, eval_tokens)


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


@pytest.mark.parametrize("eval_tokens, count", [(1, 1), (8, 1), (40, 5), (47, 5), (79, 9)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_of_a_long_validation_split_evenly_spaced_windows_are_taken(eval_tokens, count, rows):
    """The same at every evaluation, for any number of rows; more tokens than asked for only where one row has more."""
    data = numbers(810, val_fraction=81 / 810, eval_tokens=eval_tokens)
    for _ in range(2):
        windows = torch.cat(list(data.windows(rows)))
        assert windows.shape == (count, 9) and torch.equal(windows, windows[:, :1] + torch.arange(9))
        places = (windows[:, 0] - 729).tolist()
        assert places == [8 * (10 * number // count) for number in range(count)]


@pytest.mark.parametrize("n_val", [9, 41, 81, 85])
def test_a_validation_split_that_is_no_longer_than_the_bound_is_evaluated_whole(n_val):
    whole, part = (numbers(1000, val_fraction=n_val / 1000, eval_tokens=n_val - less) for less in (1, 2))
    assert torch.cat([window[:, 1:].flatten() for window in whole.windows(3)]).tolist() == whole.val[1:].tolist()
    assert sum(window[:, 1:].numel() for window in part.windows(3)) == max(8, (n_val - 2) // 8 * 8)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_process_reads_its_own_windows_and_has_as_many_as_the_others(monkeypatch, size, rows):
    data, read = numbers(val_fraction=0.085), []
    monkeypatch.setattr(data, "_rows", lambda split, starts: read.extend(starts) or Data._rows(data, split, starts))
    shares = [list(data.windows(rows, rank, size)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1 and sorted(read) == [*range(0, 85, 8)]
    in_turn = [tokens for together in zip(*shares) for tokens in together]
    whole = list(data.windows(rows))
    assert all(torch.equal(one, other) for one, other in zip(in_turn, whole))
    assert [tokens.shape for tokens in in_turn[len(whole) :]] == [(0, 9)] * (len(in_turn) - len(whole))


@pytest.mark.parametrize("size", [2, 3, 30])
def test_the_validation_loss_does_not_depend_on_the_number_of_processes(size):
    """Each counts what is its own, and computes as often as the others, since sharded models need that."""
    net, data = NextToken(toy_model(vocab_size=1000)), numbers(val_fraction=0.085)
    expected, calls, sums = mean_loss(net, data.windows(2)), [], []

    def total(values):
        sums.append(values)
        return 1.0, 1.0

    net.register_forward_pre_hook(lambda *_: calls.append(len(sums)))
    for rank in range(size):
        mean_loss(net, data.windows(2, rank, size), types.SimpleNamespace(total=total))
    assert len({calls.count(rank) for rank in range(size)}) == 1
    loss, count = map(sum, zip(*sums))
    assert count == 84 and loss / count == pytest.approx(expected, abs=1e-6)


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


@pytest.mark.parametrize("length", [1, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16 + 7, 10**6])
def test_the_entropy_is_of_all_tokens_of_the_training_split(length):
    ids = np.random.default_rng(length).geometric(0.1, size=length).astype(np.uint16)
    data = Data(np.concatenate([ids, np.full(length, 9)]), 0, 1, 0.5, 0)
    p = np.unique(ids, return_counts=True)[1] / length
    assert data.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)


def test_of_a_long_training_split_the_entropy_is_of_evenly_spaced_blocks(monkeypatch, tmp_path):
    """Each is read once, and they never overlap. An array and the files of a prepared corpus have the same."""
    for name, size in (("COUNTED", 64), ("BLOCK", 8)):
        monkeypatch.setattr(data_module, name, size)
    ids, spans = np.random.default_rng(0).integers(5, size=1003).astype(np.uint8), []
    writer = shards.Writer(tmp_path, TOKENIZERS["bytes"](), 100, {})
    writer.add(ids)
    writer.finish()
    files = shards.read(tmp_path, TOKENIZERS["bytes"]())
    read = shards.Shards.__array__

    def reading(part, *arguments, **names):
        spans.append(part.span)
        return read(part, *arguments, **names)

    monkeypatch.setattr(shards.Shards, "__array__", reading)
    assert Data(files, 4, 1, 0.0, 0).entropy == Data(ids, 4, 1, 0.0, 0).entropy
    assert [len(span) for span in spans] == [8] * 8
    gaps = [later.start - earlier.start for earlier, later in zip(spans, spans[1:])]
    assert {*gaps} <= {125, 126}
    counts = np.bincount(np.concatenate([ids[span.start : span.stop] for span in spans]))
    p = counts / counts.sum()
    assert Data(ids, 4, 1, 0.0, 0).entropy == pytest.approx(-(p * np.log(p)).sum())


def test_without_a_validation_split_there_are_no_windows():
    data = numbers(val_fraction=0)
    assert len(data.train) == 1000 and list(data.windows(4)) == []


@pytest.mark.parametrize("n_val, rows", [(100, 4), (41, 4), (17, 2), (9, 1)])
def test_a_probe_gets_the_first_four_windows_or_as_many_as_there_are(n_val, rows):
    data = numbers(200, val_fraction=n_val / 200)
    assert torch.equal(data.few_rows(), torch.cat(list(data.windows(1))[:4])) and len(data.few_rows()) == rows


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_a_probe_gets_at_most_256_tokens_of_a_row(val_fraction):
    data = numbers(4000, context_length=300, val_fraction=val_fraction)
    row = data.batch(0)[0] if val_fraction == 0 else next(data.windows(1))[0]
    assert data.few_rows().shape == (4, 257) and torch.equal(data.few_rows()[0], row[:257])


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


def test_a_run_says_how_much_of_a_long_validation_split_it_evaluates(here, quick, capsys):
    """Losses of other windows are not comparable, so going on with another bound begins a new best."""
    config = toy_config(data="text.txt", steps=1)
    losses = []
    for step, eval_tokens in enumerate((2**18, 64, 64), start=1):
        settings = {"steps": step, "eval_tokens": eval_tokens}
        end = train.train(dataclasses.replace(config, **settings), "r", resume="last" if step > 1 else None)
        corpus = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("corpus"))
        assert (" 64 " in corpus) == (eval_tokens == 64)
        losses.append(end["val_loss"])
        assert end["best_val_loss"] == (losses[0] if step == 1 else min(losses[1:]))
