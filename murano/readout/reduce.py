"""Rows of logits, reduced to the few numbers asked for while they are still in the processor's cache.

A row comes whole, or a tile of the vocabulary at a time. Of each tile are kept an offset ``m`` (its largest logit, or 0 where that is
near enough), ``s = sum exp(l - m)``, ``d = sum (l - m) exp(l - m)`` and what may be among the top k; tiles are put together in the end,
as online softmax does it (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.readout.search import LOWEST, Search
from murano.readout.stats import js_of, kl_of

#: Rows that are reduced together on a CPU: few enough for a slice of logits and one of exponentials to stay in cache.
CPU_SLICE_BYTES = 3 << 19
_DIVERGENCES = {"kl": kl_of, "js": js_of}
#: Exponentials are taken to the base of 2: on a CPU ``exp`` is MKL's, which on AMD's processors takes twice as long as ``exp2``.
LOG2_E = 1 / math.log(2)
#: Logits up to here are multiplied by that before they are subtracted: what rounding does to the product shows in the difference.
LARGE = 1 << 8
#: Bits whose exponentials add up to no more than this, and no less than its inverse, need no subtraction at all: float32 has room for
#: them, and what rounding does to them is less than what it did in a product of that size.
LARGE_SUM = 2.0**64


@dataclass(frozen=True)
class RowStats:
    """What is kept of each row.

    Args:
        top_ids: ids of the largest logits, best first.
        top_probs: their probabilities.
        entropy: in nats.
        log_normalizer: ``logsumexp`` of the row.
        token_log_probs: log-probabilities of the tokens that were asked about.
        token_ranks: how many tokens have a larger logit than each.
        divergences: from the reference, by name.
    """

    top_ids: Int[Tensor, "row k"]
    top_probs: Float[Tensor, "row k"]
    entropy: Float[Tensor, " row"]
    log_normalizer: Float[Tensor, " row"]
    token_log_probs: Float[Tensor, "row token"] | None = None
    token_ranks: Int[Tensor, "row token"] | None = None
    divergences: Mapping[str, Float[Tensor, " row"]] = field(default_factory=dict)


class Reduction:
    """What is kept of rows of logits that come a tile of the vocabulary at a time.

    With ``m``, ``s`` and ``d`` of the whole row, the log-normaliser is ``m + log s`` and the entropy ``log s - d / s`` (Shannon's
    ``-sum p log p``, with ``p = exp(l - m) / s``). Each slice is float32 whatever the logits are; what is kept of it goes into room made at
    the start, for the reason that is told in :mod:`murano.readout.search`.

    Args:
        search: for the tokens to keep.
        finish: arithmetic still to be done on logits (a soft-cap, say), slice by slice.
        scratch: room for the exponentials of one slice, reused from call to call.
        tokens: ids whose log-probability and rank are wanted in each row.
        token_logits: their logits, where tiles come before the one that they are in; to the bit what that tile will hold, or the row
            is not :meth:`sure`.
        in_bits: whether logits come multiplied by :data:`LOG2_E` already, ``token_logits`` too.
    """

    def __init__(
        self,
        search: Search,
        finish: Callable[[Tensor], Tensor] | None = None,
        scratch: Tensor | None = None,
        tokens: Int[Tensor, "row token"] | None = None,
        token_logits: Float[Tensor, "row token"] | None = None,
        in_bits: bool = False,
    ) -> None:
        self.search, self.finish, self.scratch, self.in_bits = search, finish, scratch, in_bits
        self.tokens, self.token_logits = tokens, token_logits
        self.unit = 1 / LOG2_E if in_bits else 1.0
        device = search.device
        self._of_tile: Float[Tensor, "3 row"] = torch.empty(3, search.rows, device=device)
        # An offset of 0 leaves all of the logits' size to be subtracted in the end. Elsewhere than on a CPU float64 may not be had.
        self._sums = torch.zeros_like(self._of_tile, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self._sums[0] = LOWEST
        self._seen = torch.full(tokens.shape, torch.nan, device=device) if tokens is not None else None
        self._ranks = torch.zeros_like(tokens) if tokens is not None else None
        self._near = in_bits  # until logits turn out to be far from 0: then sums with that offset aren't tried again

    def add(
        self,
        blocks: Iterable[Float[Tensor, "some width"]],
        first: int = 0,
        reference: Float[Tensor, "cell vocab"] | None = None,
        diverged: Mapping[str, list[Tensor]] | None = None,
    ) -> None:
        """Take the logits of some tokens, or of all.

        Args:
            blocks: the rows, some after the others; float32 rows are overwritten.
            first: the first token.
            reference: log-probabilities that whole rows diverge from; the rows take turns with them.
            diverged: where the divergences of each slice go, by name.
        """
        start = width = 0
        for x in self._slices(blocks):
            if self.finish is not None:
                x = self.finish(x)
            x = x.float()
            width, rows = x.shape[1], slice(start, start + len(x))
            if self.tokens is not None and self._seen is not None and self._ranks is not None:
                local = self.tokens[rows] - first
                here = x.gather(1, local.clamp(0, width - 1))
                than = here if self.token_logits is None else self.token_logits[rows]
                self._seen[rows] = torch.where((local < 0) | (local >= width), self._seen[rows], here)
                self._ranks[rows] += torch.stack([_larger(x, one, self.scratch) for one in than.split(1, dim=1)], dim=1)
            # First what takes longest: it hides that logits come from far.
            sums = _sums_of_bits(x, self.scratch) if self._near else None
            self._near = sums is not None
            peak = self.search.add(x)
            sums = sums or _sums(x, peak, self.scratch, reference is not None, self.in_bits)
            for of_tile, of_slice in zip(self._of_tile, sums, strict=True):
                of_tile[rows] = of_slice
            if reference is not None and diverged is not None:
                x.sub_(sums[1].log().unsqueeze(-1))
                turn = torch.arange(start, start + len(x), device=x.device) % len(reference)
                for name, parts in diverged.items():
                    parts.append(_DIVERGENCES[name](x, reference[turn]))
            start += len(x)
            del x  # or a block stays until the next has been made
        self.search.end_piece(first, width)
        _merge(self._sums, self._of_tile, self.unit)

    def _slices(self, blocks: Iterable[Float[Tensor, "some width"]]) -> Iterator[Float[Tensor, "slice width"]]:
        """As many rows at a time as are reduced together."""
        room = 4 * self.scratch.numel() if self.scratch is not None else None
        for block in blocks:
            n, width = block.shape
            yield from block.split(n if block.device.type != "cpu" else slice_rows(n, width, room))
            del block

    def sure(self) -> Bool[Tensor, " row"]:
        """The rows whose ranks can be relied on: in which the tokens' logits came as they were foreseen, to the bit."""
        if self._seen is None or self.token_logits is None:
            return torch.ones(self.search.rows, dtype=torch.bool)
        return (self._seen == self.token_logits).all(dim=1)

    def stats(self, diverged: Mapping[str, list[Tensor]] | None = None) -> RowStats:
        """What was asked for, of whole rows."""
        values, ids = _lower_first(*self.search.best())
        offset, total, weight = self._sums
        total = total.masked_fill(total == 0, torch.nan)  # a row of tokens that are all masked is no distribution
        log_total = total.log()

        def log_probs(logits: Tensor) -> Tensor:
            exact: Tensor = (logits - offset.unsqueeze(-1)) * self.unit - log_total.unsqueeze(-1)
            return exact.float()

        return RowStats(
            top_ids=ids,
            top_probs=log_probs(values).exp(),
            entropy=(log_total - weight / total).clamp_min(0).float(),  # rounding may leave less
            log_normalizer=(offset * self.unit + log_total).float(),
            token_log_probs=log_probs(self._seen) if self._seen is not None else None,
            token_ranks=self._ranks,
            divergences={name: torch.cat(parts) for name, parts in (diverged or {}).items()},
        )


def reduce_rows(
    logits: Float[Tensor, "row vocab"],
    top_k: int,
    finish: Callable[[Tensor], Tensor] | None = None,
    scratch: Tensor | None = None,
    *,
    tokens: Int[Tensor, "row token"] | None = None,
    reference: Float[Tensor, "cell vocab"] | None = None,
    divergences: Sequence[str] = (),
) -> RowStats:
    """Top-k, log-normaliser and entropy of whole rows, and what else is asked for; see :class:`Reduction`.

    Args:
        logits: the rows; float32 rows are overwritten.
        top_k: how many tokens to keep.
        finish: arithmetic still to be done on logits (a soft-cap, say), slice by slice.
        scratch: room for the exponentials of one slice, reused from call to call.
        tokens: ids whose log-probability and rank are wanted in each row.
        reference: log-probabilities that rows diverge from; the rows take turns with them: row ``i`` with ``i % cell``.
        divergences: ``"kl"``, ``"js"``.
    """
    reduction = Reduction(Search(len(logits), top_k, logits.shape[1], logits.device), finish, scratch, tokens)
    diverged: dict[str, list[Tensor]] = {name: [] for name in divergences}
    reduction.add([logits], 0, reference, diverged)
    return reduction.stats(diverged)


def _lower_first(
    values: Float[Tensor, "row k"], ids: Int[Tensor, "row k"]
) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
    """Of equal numbers the one with the lower id first, however they were found."""
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _merge(of_all: Float[Tensor, "3 row"], of_tile: Float[Tensor, "3 row"], unit: float) -> None:
    """Add what a tile comes to: offset, sum and weighted sum of each row."""
    offset = torch.maximum(of_all[0], of_tile[0])
    total, weight = torch.zeros_like(offset), torch.zeros_like(offset)
    for peak, own_total, own_weight in (of_all, of_tile):
        lower = (peak - offset) * unit
        share = lower.exp()
        total += share * own_total
        # A share of 0 is of a tile too low to matter, however low.
        weight += share * (own_weight + torch.where(share == 0, 0.0, lower) * own_total)
    for into, value in zip(of_all, (offset, total, weight), strict=True):
        into.copy_(value)


def _larger(x: Float[Tensor, "row vocab"], than: Float[Tensor, "row 1"], scratch: Tensor | None) -> Int[Tensor, " row"]:
    """How many numbers of each row are larger."""
    # Counted in float32, exact up to 16 million: adding up booleans takes four times as long.
    return torch.gt(x, than, out=_room(scratch, x)).sum(dim=-1).long()


def _room(scratch: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty_like(like) if scratch is None else scratch.view(-1)[: like.numel()].view(like.shape)


def slice_rows(rows: int, vocab: int, max_bytes: int | None = None) -> int:
    """How many of ``rows`` rows are reduced together on a CPU: slices of one size, of at most ``max_bytes`` or one row."""
    most = max(1, (max_bytes or CPU_SLICE_BYTES) // (4 * vocab))
    return -(-rows // max(1, -(-rows // most)))


#: Of each row an offset ``o``, ``sum exp(l - o)`` and ``sum (l - o) exp(l - o)``.
Sums: TypeAlias = tuple[Float[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]


def _sums_of_bits(x: Float[Tensor, "row vocab"], scratch: Tensor | None) -> Sums | None:
    """Sums of logits in bits, with an offset of 0; ``None`` where that is too far from them, or some are not finite."""
    p = torch.exp2(x, out=_room(scratch, x))
    total = p.sum(dim=-1)
    weighted = p.mul_(x).sum(dim=-1)
    least, most = (end.item() for end in total.aminmax())
    if 1 / LARGE_SUM <= least <= most <= LARGE_SUM and math.isfinite(weighted.sum().item()):
        return torch.zeros_like(total), total, weighted / LOG2_E
    return None


def _sums(
    x: Float[Tensor, "row vocab"], peak: Float[Tensor, "row 1"], scratch: Tensor | None, below: bool, in_bits: bool
) -> Sums:
    """Sums of rows, each row's peak as its offset; rows are overwritten: with ``l - peak`` if ``below``."""
    shift = peak
    if in_bits or not bool(peak.abs().amax() <= LARGE):
        x.sub_(peak)  # too large for what is left below to be small, or nothing but masked tokens
        shift = torch.zeros_like(peak)
    left = torch.zeros_like(peak)
    if not in_bits:
        # One rounding for unit and difference; what it leaves of the peak's own difference, instead of 0, is taken out of the sums.
        base = -LOG2_E * shift
        torch.add(base, x, alpha=LOG2_E, out=x)
        left = torch.add(base, shift, alpha=LOG2_E)
    p = torch.exp2(x, out=_room(scratch, x))
    total = p.sum(dim=-1)
    weighted = p.mul_(x).sum(dim=-1)
    if not math.isfinite(weighted.sum().item()):
        # A masked token has logit -inf and adds nothing: 0 · -inf is 0 here.
        weighted = p.masked_fill_(x == -torch.inf, 0.0).sum(dim=-1)
    if below:
        x.sub_(left).div_(LOG2_E)
    left = left.squeeze(-1)
    by = torch.exp2(-left)
    return peak.squeeze(-1), by * total, by * (weighted - left * total) / LOG2_E
