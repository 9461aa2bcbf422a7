"""Token ids -> training batches and evaluation windows."""

from collections.abc import Iterator

import numpy as np
import torch


class Data:
    """A corpus cut in two contiguous splits: the last `val_fraction` of the ids is for validation, the rest to train.

    Both hand out (B, T + 1) int64 tokens: the first T of a row are its inputs, the last T its targets.
    Raises ValueError if a split is shorter than one such row; `val_fraction` 0 leaves no validation split.
    """

    def __init__(self, ids: np.ndarray, context_length: int, batch_size: int, val_fraction: float, seed: int):
        cut = int(len(ids) * (1 - val_fraction))
        self.train, self.val = ids[:cut], ids[cut:]
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        for name, split in (("training", self.train), ("validation", self.val)):
            if len(split) <= context_length and not (name == "validation" and val_fraction == 0):
                raise ValueError(
                    f"the {name} split is too short ({len(split)} tokens of {len(ids)}; one row needs "
                    f"context_length + 1 = {context_length + 1}). Use more text, a shorter context_length or "
                    f"another val_fraction."
                )

    def batch(self, step: int) -> torch.Tensor:
        """The (batch_size, T + 1) tokens of a step: windows at random places, a pure function of (seed, step)."""
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.train) - self.context_length, size=(self.batch_size, 1))
        rows = self.train[starts + np.arange(self.context_length + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def few_rows(self) -> torch.Tensor:
        """Up to four fixed rows to probe a model with, of the validation split or, without one, to train on."""
        return next(self.windows(4), self.batch(0)[:4])

    def windows(self, rows: int) -> Iterator[torch.Tensor]:
        """The validation split from end to end, `rows` windows at a time. Windows share only an edge, so each token
        but the first is a target once; the last window may be shorter and comes alone."""
        T, targets = self.context_length, max(0, len(self.val) - 1)
        whole = targets // T
        for first in range(0, whole, rows):
            starts = np.arange(first, min(first + rows, whole))[:, None] * T
            yield torch.from_numpy(self.val[starts + np.arange(T + 1)].astype(np.int64))
        if targets > whole * T:
            yield torch.from_numpy(self.val[None, whole * T :].astype(np.int64))
