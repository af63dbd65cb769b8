"""Searching rows for their largest numbers, while they come a piece at a time.

On a CPU ``torch.topk`` sorts candidates from the whole row, one thread to a row. But the ``k`` largest numbers of a row lie in the ``k``
groups of it that have the largest maxima: one vectorised pass for maxima, and what is searched is ``k`` groups. Of what comes, a group is
kept if its maximum reaches the bar: the ``k``-th largest maximum when the bar was last set.

All that is kept goes into room made at the start. Blocks of many megabytes come and go meanwhile, and whatever small were to stay in the
hole that one has left would make the C library look for another place for the next.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

CPU = torch.device("cpu")
#: Numbers in a group.
GROUP = 64
#: Groups for each number sought from which on their maxima pay.
FEWEST_GROUPS = 4
#: Stands for -inf: a number that is there, and so above what only fills a group.
LOWEST = torch.finfo(torch.float32).min
#: Groups kept of a row, for each number sought, from which on those that were surpassed are let go.
MOST_KEPT = 4


class Search:
    """The largest numbers of rows.

    Args:
        rows: how many rows there are.
        k: how many numbers of each are sought.
        width: the most numbers that each row will have.
        device: where they are; elsewhere than on a CPU ``topk`` is as fast as anything.
    """

    def __init__(self, rows: int, k: int, width: int, device: torch.device = CPU) -> None:
        self.rows, self.k, self.device = rows, k, device
        self.grouped = device.type == "cpu" and width // GROUP >= FEWEST_GROUPS * k
        if not self.grouped:
            # The largest numbers and their places, slice by slice of a piece, and of all pieces.
            self._slices: list[tuple[Tensor, Tensor]] = []
            self._found: list[tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]] = []
            return
        n_groups = -(-width // GROUP)
        #: The largest number of each group so far, -inf where the group wasn't kept, and where those that were are in the room for them.
        self._maxima: Float[Tensor, "row n_groups"] = torch.empty(rows, n_groups)
        self._index: Int[Tensor, "row n_groups"] = torch.empty(rows, n_groups, dtype=torch.int32)
        self._kept: Float[Tensor, "room group"] = torch.empty(min((MOST_KEPT + 1) * k, n_groups) * rows, GROUP)
        self.n_kept = 0
        self._bar: Float[Tensor, "row 1"] | None = None
        # Groups of the pieces before, rows of this one, and how many pieces there were.
        self._before = self._start = self._pieces = 0

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
        n_whole = x.shape[1] // GROUP
        groups, rest = x[:, : n_whole * GROUP].view(len(x), n_whole, GROUP), x[:, n_whole * GROUP :]
        rows = slice(self._start, self._start + len(x))
        maxima = groups.amax(dim=2)
        if rest.shape[1]:  # what fills no group is one more
            maxima = torch.cat([maxima, rest.amax(dim=1, keepdim=True)], dim=1)
        maxima.nan_to_num_(torch.inf, torch.inf, LOWEST)  # what is no number is found first
        peak: Tensor = maxima.amax(dim=1, keepdim=True)
        bar = self._bar[rows] if self._bar is not None else LOWEST
        reached = (maxima >= bar).nonzero() if self._bar is not None else None
        if reached is None or len(reached) > self.k * len(x):
            best = maxima.topk(min(self.k, maxima.shape[1]), dim=-1)
            maxima.fill_(-torch.inf).scatter_(1, best.indices, best.values)
            reached = (maxima >= bar).nonzero()
        self._maxima[rows, self._before : self._before + maxima.shape[1]] = maxima
        row, group = reached.unbind(1)
        end = self.n_kept + len(reached)
        self._index[rows][row, self._before + group] = torch.arange(self.n_kept, end, dtype=torch.int32)
        kept = self._kept[self.n_kept : end]
        if rest.shape[1]:
            whole = group < n_whole
            kept[whole] = groups[row[whole], group[whole]]
            kept[~whole] = torch.nn.functional.pad(rest[row[~whole]], (0, GROUP - rest.shape[1]))
            kept.clamp_min_(LOWEST)[~whole, rest.shape[1] :] = -torch.inf
        else:
            torch.clamp(groups[row, group], min=LOWEST, out=kept)
        self.n_kept, self._start = end, self._start + len(x)
        return peak

    def end_piece(self, first: int, width: int) -> None:
        """Say which numbers of the rows the piece was.

        Args:
            first: the place of its first number; of pieces that are searched by groups, all but the last have whole ones.
            width: how many there are.
        """
        if not self.grouped:
            values, ids = (torch.cat(part) for part in zip(*self._slices, strict=True))
            self._slices = []
            self._found.append((values, ids + first))
            return
        self._before, self._start, self._pieces = self._before + -(-width // GROUP), 0, self._pieces + 1
        if self._pieces & (self._pieces - 1) == 0 and self._before >= self.k:
            # The more pieces are behind, the less is to be won by setting it anew.
            self._bar = self._maxima[:, : self._before].topk(self.k, dim=-1).values[:, -1:]
        if self.n_kept > MOST_KEPT * self.k * self.rows:
            groups, values = self._best_groups()
            self.n_kept = groups.numel()
            self._kept[: self.n_kept] = values.flatten(0, 1)
            self._index.scatter_(1, groups, torch.arange(self.n_kept, dtype=torch.int32).view_as(groups))
            maxima = self._maxima[:, : self._before]
            best = maxima.gather(1, groups)
            maxima.fill_(-torch.inf).scatter_(1, groups, best)

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
        return best, GROUP * groups.gather(1, index // GROUP) + index % GROUP

    def _best_groups(self) -> tuple[Int[Tensor, "row k"], Float[Tensor, "row k group"]]:
        """The groups with the largest maxima of each row, and their numbers."""
        groups = self._maxima[:, : self._before].topk(min(self.k, self._before), dim=-1).indices
        return groups, self._kept[self._index.gather(1, groups).long()]
