"""Token ids -> training batches and evaluation windows."""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from gpt.config import Mistake
from gpt.training.shards import Shards

COUNTED, BLOCK = 2**24, 2**16  # the most ids whose frequencies are counted, and how many come in a row


class Data:
    """A corpus cut in two contiguous splits: the last `val_fraction` of the ids is for validation, the rest to train.
    `ids` is an array or Shards, of which only the rows that are handed out are read.

    Both splits hand out (B, T + 1) int64 tokens: the first T of a row are its inputs, the last T its targets. An
    evaluation asks for at most about `eval_tokens` targets; None is no limit.
    Raises Mistake if a split is shorter than one such row; `val_fraction` 0 leaves no validation split.
    """

    def __init__(
        self,
        ids: np.ndarray | Shards,
        context_length: int,
        batch_size: int,
        val_fraction: float,
        seed: int,
        eval_tokens: int | None = None,
    ):
        cut = int(len(ids) * (1 - val_fraction))
        self.train, self.val = ids[:cut], ids[cut:]
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        self.eval_tokens = len(ids) if eval_tokens is None else eval_tokens
        for name, split in (("training", self.train), ("validation", self.val)):
            if len(split) <= context_length and not (name == "validation" and val_fraction == 0):
                raise Mistake(
                    f"the {name} split is too short ({len(split)} tokens of {len(ids)}; one row needs "
                    f"context_length + 1 = {context_length + 1}). Use more text (--data), a shorter "
                    f"context_length or another val_fraction."
                )

    def batch(self, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
        """The (batch_size, T + 1) tokens of a step: windows at random places, a pure function of (seed, step). Process
        `rank` of `size` gets every size-th row, from row `rank` on."""
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.train) - self.context_length, size=self.batch_size)
        return self._rows(self.train, starts[rank::size])

    def _rows(self, split, starts) -> torch.Tensor:
        rows = np.stack([split[start : start + self.context_length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))

    @functools.cached_property
    def entropy(self) -> float:
        """The entropy of single tokens of the training split in nats, -sum p ln p: the training loss of a model that
        knows how often each token comes, and nothing else. Of more than 2**24 ids, so many are counted, in evenly
        spaced blocks."""
        blocks = min(-(-len(self.train) // BLOCK), COUNTED // BLOCK)
        edges = [len(self.train) * number // blocks for number in range(blocks + 1)]
        counts = np.zeros(0, np.int64)
        for start, stop in zip(edges, edges[1:]):
            block = np.asarray(self.train[start : min(start + BLOCK, stop)], np.int64)
            more = np.bincount(block, minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def few_rows(self) -> torch.Tensor:
        """Up to four fixed rows to probe a model with: the first windows for validation or, without any, rows of the
        first batch; at most 256 tokens of each: longer ones show the same, and take long in a large model."""
        return next(self.windows(4), self.batch(0)[:4])[:, :257]

    def windows(self, rows: int, rank: int = 0, size: int = 1) -> Iterator[torch.Tensor]:
        """The windows of an evaluation, the same at every one, `rows` at a time. If the validation split has at most
        `eval_tokens` targets, they walk it from end to end: the last token of a window is the first of the next, so
        each token but the first is a target once, and the last window may be shorter and comes alone. Of a longer split
        they are evenly spaced whole windows.

        Process `rank` of `size` gets every size-th part, from part `rank` on, and reads no other. All get as many: one
        for which no part is left gets (0, T + 1) tokens."""
        T, targets = self.context_length, max(0, len(self.val) - 1)
        whole = targets // T
        count = min(whole, max(1, self.eval_tokens // T))
        starts = np.arange(count, dtype=np.int64) * whole // max(1, count) * T
        parts = [starts[first : first + rows] for first in range(0, count, rows)]
        if whole * T < targets <= self.eval_tokens:
            parts.append(np.array([whole * T]))
        for number in range(rank, -(-len(parts) // size) * size, size):
            mine = number < len(parts)
            yield self._rows(self.val, parts[number]) if mine else torch.zeros(0, T + 1, dtype=torch.int64)
