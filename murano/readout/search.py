"""Searching rows for their largest numbers.

On a CPU ``torch.topk`` sorts candidates from the whole row, one thread to a row. But the ``k`` largest numbers of a row lie in the ``k``
groups of it that have the largest maxima: one vectorised pass for maxima, and what is searched is ``k`` groups. A group takes every
``n_groups``-th number of the row, so that the maxima of neighbouring groups are taken side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Numbers in a group.
GROUP = 64
#: Groups for each number sought from which on their maxima pay.
FEWEST_GROUPS = 4


@dataclass(frozen=True)
class Candidates:
    """Some numbers of each row, the largest ones among them.

    Args:
        values: the numbers: of some groups, one after another, and then of what fills no group.
        starts: where in the row each group's first number is.
        stride: how far the numbers of a group lie apart; 0 where each number stands for itself.
        rest: where in the row what fills no group begins.
    """

    values: Float[Tensor, "row candidate"]
    starts: Int[Tensor, "row n_groups"]
    stride: int = 0
    rest: int = 0

    @classmethod
    def among(cls, x: Float[Tensor, "row width"], k: int) -> tuple[Candidates, Float[Tensor, "row 1"]]:
        """The candidates for the ``k`` largest of each row, copied, and the largest one.

        Args:
            x: the rows.
            k: how many are sought; all, where a row has fewer.
        """
        k, n_groups = min(k, x.shape[1]), x.shape[1] // GROUP
        if x.is_cuda or n_groups < FEWEST_GROUPS * k:
            values, ids = x.max(dim=-1, keepdim=True) if k == 1 else x.topk(k, dim=-1)
            return cls(values, ids), values[:, :1]
        searched = n_groups * GROUP
        groups = x[:, :searched].unflatten(1, (GROUP, n_groups))
        maxima, starts = groups.amax(dim=1).topk(k, dim=-1)
        values = groups.transpose(1, 2)[torch.arange(len(x)).unsqueeze(-1), starts].flatten(1)
        peak = maxima[:, :1]
        if searched < x.shape[1]:
            rest = x[:, searched:]
            values = torch.cat([values, rest], dim=1)
            peak = torch.maximum(peak, rest.amax(dim=-1, keepdim=True))
        return cls(values, starts, n_groups, searched), peak

    @classmethod
    def cat(cls, parts: Sequence[Candidates]) -> Candidates:
        """The candidates of several slices of rows as one."""
        if len(parts) == 1:
            return parts[0]
        values, starts = torch.cat([p.values for p in parts]), torch.cat([p.starts for p in parts])
        return cls(values, starts, parts[0].stride, parts[0].rest)

    def best(self, k: int) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
        """The ``k`` largest of each row and where they are in it, best first."""
        if not self.stride:
            return self.values[:, :k], self.starts[:, :k]
        values, index = self.values.topk(min(k, self.values.shape[1]), dim=-1)
        return values, self._place(index)

    def _place(self, index: Int[Tensor, "row k"]) -> Int[Tensor, "row k"]:
        """Where in the row a candidate is."""
        grouped = self.starts.shape[1] * GROUP
        of_group = self.starts.gather(1, (index // GROUP).clamp_max(self.starts.shape[1] - 1))
        return torch.where(index < grouped, of_group + index % GROUP * self.stride, self.rest + index - grouped)


def best_of(parts: Sequence[tuple[int, Candidates]], k: int) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
    """The ``k`` largest of rows that come in pieces, and where in the row they are, best first.

    Args:
        parts: where in the row each piece begins, and its candidates.
        k: how many.
    """
    if len(parts) == 1:
        values, ids = parts[0][1].best(k)
        return values, ids + parts[0][0]
    together = torch.cat([part.values for _, part in parts], dim=1)
    values, index = Candidates.among(together, k)[0].best(k)
    ids, begin = torch.zeros_like(index), 0
    for first, part in parts:
        width = part.values.shape[1]
        local = (index - begin).clamp(0, width - 1)
        place = part._place(local) if part.stride else part.starts.gather(1, local)
        ids = torch.where((index >= begin) & (index < begin + width), first + place, ids)
        begin += width
    return values, ids
