"""Token ids -> training batches and evaluation windows."""

from collections.abc import Iterator

import numpy as np
import torch

from gpt.config import Mistake
from gpt.training.shards import Shards


class Data:
    """A corpus cut in two contiguous splits: the last `val_fraction` of the ids is for validation, the rest to train.
    `ids` is an array or Shards, of which only the rows that are handed out are read.

    Both splits hand out (B, T + 1) int64 tokens: the first T of a row are its inputs, the last T its targets.
    Raises Mistake if a split is shorter than one such row; `val_fraction` 0 leaves no validation split.
    """

    def __init__(self, ids: np.ndarray | Shards, context_length: int, batch_size: int, val_fraction: float, seed: int):
        cut = int(len(ids) * (1 - val_fraction))
        self.train, self.val = ids[:cut], ids[cut:]
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        for name, split in (("training", self.train), ("validation", self.val)):
            if len(split) <= context_length and not (name == "validation" and val_fraction == 0):
                raise Mistake(
                    f"the {name} split is too short ({len(split)} tokens of {len(ids)}; one row needs "
                    f"context_length + 1 = {context_length + 1}). Use more text, a shorter context_length or "
                    f"another val_fraction."
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

    def few_rows(self) -> torch.Tensor:
        """Up to four fixed rows to probe a model with: the first windows for validation or, without any, rows of the
        first batch."""
        return next(self.windows(4), self.batch(0)[:4])

    def windows(self, rows: int) -> Iterator[torch.Tensor]:
        """The validation split from end to end, `rows` windows at a time. The last token of a window is the first of
        the next, so each token but the first is a target once. The last window may be shorter and comes alone."""
        T, targets = self.context_length, max(0, len(self.val) - 1)
        whole = targets // T
        for first in range(0, whole, rows):
            yield self._rows(self.val, np.arange(first, min(first + rows, whole)) * T)
        if targets > whole * T:
            yield self._rows(self.val, [whole * T])
