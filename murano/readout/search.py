"""Searching rows for their largest numbers, while they come a piece at a time.

On a CPU ``torch.topk`` sorts candidates from the whole row, one thread to a row. But the ``k`` largest numbers of a row lie in the ``k``
groups of it that have the largest maxima: one vectorised pass for maxima, and what is searched is ``k`` groups. Of what comes, a group is
kept if its maximum reaches the bar: the ``k``-th largest maximum when the bar was last set.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Numbers in a group.
GROUP = 64
#: Groups for each number sought from which on their maxima pay.
FEWEST_GROUPS = 4
#: Stands for -inf: a number that is there, and so above what only fills a group.
LOWEST = torch.finfo(torch.float32).min
#: Groups kept of a row, for each number sought, from which on those that were surpassed are let go.
MOST_KEPT = 16


class Search:
    """The largest numbers of rows.

    Args:
        rows: how many rows there are.
        k: how many numbers of each are sought.
        width: how many numbers each row will have.
        on_cpu: whether they are on a CPU; elsewhere ``topk`` is as fast as anything.
    """

    def __init__(self, rows: int, k: int, width: int, on_cpu: bool = True) -> None:
        self.rows, self.k = rows, k
        self.grouped = on_cpu and width // GROUP >= FEWEST_GROUPS * k
        # Of a piece, slice by slice.
        self._slices: list[tuple[Tensor, ...]] = []
        # Of all pieces: the largest numbers and their places, or the groups' maxima and first places.
        self._found: list[tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]] = []
        self._maxima: list[Float[Tensor, "row n_groups"]] = []
        self._places: list[Int[Tensor, " n_groups"]] = []
        # The groups that are kept: their numbers, and whose they are.
        self._kept: list[tuple[Float[Tensor, "kept group"], Int[Tensor, " kept"], Int[Tensor, " kept"]]] = []
        self._bar: Float[Tensor, "row 1"] | None = None
        self._pieces = 0

    def add(self, x: Float[Tensor, "slice width"]) -> Float[Tensor, "slice 1"]:
        """Look through the next rows of a piece; returns the largest number of each, at least :data:`LOWEST`.

        Args:
            x: the numbers; those that are kept are copied.
        """
        if not self.grouped:
            k = min(self.k, x.shape[1])
            values, ids = x.max(dim=-1, keepdim=True) if k == 1 else x.topk(k, dim=-1)
            self._slices.append((values, ids))
            return values[:, :1].clamp_min(LOWEST)
        start = sum(len(part[0]) for part in self._slices)
        before = sum(maxima.shape[1] for maxima in self._maxima)
        n_groups = x.shape[1] // GROUP
        groups, rest = x[:, : n_groups * GROUP].view(len(x), n_groups, GROUP), x[:, n_groups * GROUP :]
        maxima = groups.amax(dim=2)
        if rest.shape[1]:  # what fills no group is one more
            maxima = torch.cat([maxima, rest.amax(dim=1, keepdim=True)], dim=1)
        maxima.clamp_min_(LOWEST)
        self._slices.append((maxima,))
        bar = self._bar[start : start + len(x)] if self._bar is not None else None
        reached = (maxima >= bar).nonzero() if bar is not None else None
        if reached is None or len(reached) > self.k * len(x):
            lowest = maxima.topk(min(self.k, maxima.shape[1]), dim=-1).values[:, -1:]
            reached = (maxima >= (lowest if bar is None else torch.maximum(bar, lowest))).nonzero()
        if rest.shape[1]:
            in_rest = reached[:, 1] == n_groups
            row, reached = reached[in_rest, 0], reached[~in_rest]
            filled = torch.nn.functional.pad(rest[row].clamp_min(LOWEST), (0, GROUP - rest.shape[1]), value=-torch.inf)
            self._kept.append((filled, start + row, torch.full_like(row, before + n_groups)))
        row, group = reached.unbind(1)
        self._kept.append((groups[row, group].clamp_min_(LOWEST), start + row, before + group))
        peak: Tensor = maxima.amax(dim=1, keepdim=True)
        return peak

    def end_piece(self, first: int, width: int) -> None:
        """Say which numbers of the rows the piece was.

        Args:
            first: the place of its first number.
            width: how many there are.
        """
        slices, self._slices = self._slices, []
        if not self.grouped:
            values, ids = (torch.cat(part) for part in zip(*slices, strict=True))
            self._found.append((values, ids + first))
            return
        maxima = torch.cat([part[0] for part in slices])
        self._maxima.append(maxima)
        self._places.append(first + GROUP * torch.arange(maxima.shape[1]))
        self._pieces += 1
        if self._pieces & (self._pieces - 1) == 0 and sum(m.shape[1] for m in self._maxima) >= self.k:
            # The more pieces are behind, the less is to be won by setting it anew.
            self._bar = torch.cat(self._maxima, dim=1).topk(self.k, dim=-1).values[:, -1:]
        if sum(len(part[0]) for part in self._kept) > MOST_KEPT * self.k * self.rows:
            groups, values = self._best_groups()
            rows = torch.arange(self.rows).unsqueeze(-1).expand_as(groups)
            self._kept = [(values.flatten(0, 1), rows.flatten(), groups.flatten())]
            of_all = torch.cat(self._maxima, dim=1)
            self._maxima = [torch.full_like(of_all, -torch.inf).scatter(1, groups, of_all.gather(1, groups))]

    def best(self) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
        """The largest numbers of each row and where they are in it, best first."""
        if not self.grouped:
            if len(self._found) == 1:
                return self._found[0]
            values, ids = (torch.cat(part, dim=1) for part in zip(*self._found, strict=True))
            values, index = values.topk(min(self.k, values.shape[1]), dim=-1)
            return values, ids.gather(1, index)
        groups, values = self._best_groups()
        best, index = values.flatten(1).topk(self.k, dim=-1)
        group = groups.gather(1, index // GROUP)
        return best, torch.cat(self._places)[group] + index % GROUP

    def _best_groups(self) -> tuple[Int[Tensor, "row k"], Float[Tensor, "row k group"]]:
        """The groups with the largest maxima of each row, and their numbers."""
        maxima = torch.cat(self._maxima, dim=1)
        groups = maxima.topk(min(self.k, maxima.shape[1]), dim=-1).indices
        values, rows, of = (torch.cat(part) for part in zip(*self._kept, strict=True))
        index = torch.zeros(maxima.shape, dtype=torch.int32)
        index[rows, of] = torch.arange(len(rows), dtype=torch.int32)
        return groups, values[index.gather(1, groups).long()]
