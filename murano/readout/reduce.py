"""Rows of logits, reduced to the few numbers asked for while they are still in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.readout.search import Candidates

#: Rows that are reduced together on a CPU: few enough for a slice of logits and one of exponentials to stay in cache.
CPU_SLICE_BYTES = 3 << 19


@dataclass(frozen=True)
class RowStats:
    """What is kept of each row.

    Args:
        top_ids: ids of the largest logits, best first.
        top_probs: their probabilities.
        entropy: in nats.
        log_normalizer: ``logsumexp`` of the row.
    """

    top_ids: Int[Tensor, "row k"]
    top_probs: Float[Tensor, "row k"]
    entropy: Float[Tensor, " row"]
    log_normalizer: Float[Tensor, " row"]


def reduce_rows(
    logits: Float[Tensor, "row vocab"],
    top_k: int,
    finish: Callable[[Tensor], Tensor] | None = None,
    scratch: Tensor | None = None,
) -> RowStats:
    """Top-k, log-normaliser and entropy of each row, in float32 whatever the logits are.

    With ``m`` the largest logit, ``s = sum exp(l - m)`` and ``d = sum (l - m) exp(l - m)``, the log-normaliser is ``m + log s`` and the
    entropy ``log s - d / s`` (Shannon's ``-sum p log p``, with ``p = exp(l - m) / s``).

    Args:
        logits: the rows; float32 rows are overwritten.
        top_k: how many tokens to keep.
        finish: arithmetic still to be done on logits (a soft-cap, say), slice by slice.
        scratch: room for the exponentials of one slice, reused from call to call.
    """
    n, vocab = logits.shape
    step = n if logits.is_cuda else slice_rows(n, vocab)
    candidates, peaks, totals, weighted = [], [], [], []
    for start in range(0, n, step):
        x = logits[start : start + step]
        if finish is not None:
            x = finish(x)
        x = x.float()
        found, peak = Candidates.among(x, top_k)
        total, weight = _sums(x.sub_(peak), scratch)
        candidates.append(found)
        peaks.append(peak)
        totals.append(total)
        weighted.append(weight)
    # What needs many small operations is done once for all slices.
    values, ids = Candidates.cat(candidates).best(top_k)
    peak, total = torch.cat(peaks), torch.cat(totals)
    log_total = total.log()
    return RowStats(
        ids,
        (values - peak - log_total.unsqueeze(-1)).exp(),
        log_total - torch.cat(weighted) / total,
        peak.squeeze(-1) + log_total,
    )


def slice_rows(rows: int, vocab: int) -> int:
    """How many of ``rows`` rows are reduced together on a CPU."""
    return min(rows, max(1, CPU_SLICE_BYTES // (4 * vocab)))


def _sums(x: Float[Tensor, "row vocab"], scratch: Tensor | None) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """``sum exp(x)`` and ``sum x exp(x)``."""
    exponentials = torch.exp(x, out=scratch[: x.shape[0], : x.shape[1]]) if scratch is not None else x.exp()
    total = exponentials.sum(dim=-1)
    weighted = exponentials.mul_(x).sum(dim=-1)
    if not math.isfinite(weighted.sum().item()):
        # A masked token has logit -inf and adds nothing: 0 · -inf is 0 here.
        weighted = torch.where(x == -torch.inf, 0.0, exponentials).sum(dim=-1)
    return total, weighted
