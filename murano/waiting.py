"""Rows of several layers and batches, gathered until they fill a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Waiting:
    """One buffer, as long as a chunk, which rows are copied into.

    Kept as they come, they would lie between the blocks that a forward frees, and the C library could not join these: each batch took new
    memory. A chunk that is handed out is a view of the buffer, to be done with before the next one; it waits on if that fails.

    Args:
        most: rows of a chunk.
        device: where they are wanted.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.device = device
        self._rows: Float[Tensor, "row d_model"] | None = None
        self._place = torch.empty(most, dtype=torch.int64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(
        self, rows: Float[Tensor, "row d_model"], place: Int[Tensor, " row"]
    ) -> Iterator[tuple[Float[Tensor, "row d_model"], Int[Tensor, " row"]]]:
        """Hand out the chunks that these rows fill; what is left of them waits.

        Args:
            rows: from any device; what waits in another dtype is handed out first, as what it is.
            place: where the results of each go.
        """
        most = len(self._place)
        if self._rows is None or self._rows.dtype != rows.dtype:
            yield from self.rest()
            self._rows = rows.new_empty(most, rows.shape[1], device=self.device)
        while True:
            if self._n == most:
                yield from self.rest()
            if not len(rows):
                return
            n = min(len(rows), most - self._n)
            self._rows[self._n : self._n + n] = rows[:n]
            self._place[self._n : self._n + n] = place[:n]
            self._n += n
            rows, place = rows[n:], place[n:]

    def rest(self) -> Iterator[tuple[Float[Tensor, "row d_model"], Int[Tensor, " row"]]]:
        """Hand out what waits, if anything does."""
        if self._n and self._rows is not None:
            yield self._rows[: self._n], self._place[: self._n]
            self._n = 0
