"""Searching rows for their largest numbers.

On a CPU ``torch.topk`` sorts candidates from the whole row, one thread to a row. But the ``k`` largest numbers of a row lie in the ``k``
blocks of it that have the largest maxima: one vectorised pass for maxima, and what is searched is ``k`` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Numbers whose maximum is taken at once: in whole rows, and then in the blocks that were found.
BLOCK, SMALL_BLOCK = 512, 32


@dataclass(frozen=True)
class Candidates:
    """The blocks of each row in which its largest numbers lie.

    Args:
        values: the blocks, one after another.
        starts: where in the row each block begins.
        block: how many numbers a block has; the last one may have fewer.
    """

    values: Float[Tensor, "row candidate"]
    starts: Int[Tensor, "row n_blocks"]
    block: int

    @classmethod
    def among(
        cls, x: Float[Tensor, "row width"], k: int, block: int = BLOCK
    ) -> tuple[Candidates, Float[Tensor, "row 1"]]:
        """The candidates for the ``k`` largest of each row, copied, and the largest one."""
        n_blocks = x.shape[1] // block
        if x.is_cuda or n_blocks < 4 * k:
            values, ids = x.max(dim=-1, keepdim=True) if k == 1 else x.topk(k, dim=-1)
            return cls(values, ids, 1), values[:, :1]
        searched = n_blocks * block
        blocks = x[:, :searched].unflatten(1, (n_blocks, block))
        maxima, best = blocks.amax(dim=-1).topk(k, dim=-1)
        values = blocks[torch.arange(len(x)).unsqueeze(-1), best].flatten(1)
        peak, starts = maxima[:, :1], best * block
        if searched < x.shape[1]:  # what fills no block is a candidate too
            rest = x[:, searched:]
            values = torch.cat([values, rest], dim=1)
            starts = torch.nn.functional.pad(starts, (0, 1), value=searched)
            peak = torch.maximum(peak, rest.amax(dim=-1, keepdim=True))
        return cls(values, starts, block), peak

    @classmethod
    def cat(cls, parts: Sequence[Candidates]) -> Candidates:
        """The candidates of several slices of rows as one."""
        return cls(torch.cat([p.values for p in parts]), torch.cat([p.starts for p in parts]), parts[0].block)

    def best(self, k: int) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
        """The ``k`` largest of each row and where they are in it, best first."""
        if self.block == 1:
            return self.values, self.starts
        if self.block > SMALL_BLOCK:
            values, index = self.among(self.values, k, SMALL_BLOCK)[0].best(k)
        else:
            values, index = self.values.topk(k, dim=-1)
        return values, self.starts.gather(1, index // self.block) + index % self.block
