"""Rows of logits, reduced to the few numbers asked for while they are still in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.readout.search import Candidates
from murano.readout.stats import js_of, kl_of

#: Rows that are reduced together on a CPU: few enough for a slice of logits and one of exponentials to stay in cache.
CPU_SLICE_BYTES = 3 << 19
_DIVERGENCES = {"kl": kl_of, "js": js_of}


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
    """Top-k, log-normaliser and entropy of each row, in float32 whatever the logits are; and what else is asked for.

    With ``m`` the largest logit, ``s = sum exp(l - m)`` and ``d = sum (l - m) exp(l - m)``, the log-normaliser is ``m + log s`` and the
    entropy ``log s - d / s`` (Shannon's ``-sum p log p``, with ``p = exp(l - m) / s``).

    Args:
        logits: the rows; float32 rows are overwritten.
        top_k: how many tokens to keep.
        finish: arithmetic still to be done on logits (a soft-cap, say), slice by slice.
        scratch: room for the exponentials of one slice, reused from call to call.
        tokens: ids whose log-probability and rank are wanted in each row.
        reference: log-probabilities that rows diverge from; the rows take turns with them: row ``i`` with ``i % cell``.
        divergences: ``"kl"``, ``"js"``.
    """
    n, vocab = logits.shape
    step = n if logits.is_cuda else slice_rows(n, vocab)
    candidates, peaks, totals, weighted, asked, ranks = [], [], [], [], [], []
    diverged: dict[str, list[Tensor]] = {name: [] for name in divergences}
    for start in range(0, n, step):
        x = logits[start : start + step]
        if finish is not None:
            x = finish(x)
        x = x.float()
        if tokens is not None:
            of_tokens = x.gather(1, tokens[start : start + step])
            asked.append(of_tokens)
            ranks.append(torch.stack([_larger(x, column, scratch) for column in of_tokens.split(1, dim=1)], dim=1))
        found, peak = Candidates.among(x, top_k)
        total, weight = _sums(x.sub_(peak), scratch)
        candidates.append(found)
        peaks.append(peak)
        totals.append(total)
        weighted.append(weight)
        if reference is not None:
            x.sub_(total.log().unsqueeze(-1))
            turn = torch.arange(start, start + len(x), device=x.device) % len(reference)
            for name, parts in diverged.items():
                parts.append(_DIVERGENCES[name](x, reference[turn]))
    # What needs many small operations is done once for all slices.
    values, ids = Candidates.cat(candidates).best(top_k)
    peak, total = torch.cat(peaks), torch.cat(totals)
    log_total = total.log()
    log_normalizer = peak.squeeze(-1) + log_total
    return RowStats(
        top_ids=ids,
        top_probs=(values - peak - log_total.unsqueeze(-1)).exp(),
        entropy=log_total - torch.cat(weighted) / total,
        log_normalizer=log_normalizer,
        token_log_probs=torch.cat(asked) - peak - log_total.unsqueeze(-1) if tokens is not None else None,
        token_ranks=torch.cat(ranks) if tokens is not None else None,
        divergences={name: torch.cat(parts) for name, parts in diverged.items()},
    )


def _larger(
    x: Float[Tensor, "row vocab"], than: Float[Tensor, "row 1"], scratch: Tensor | None = None
) -> Int[Tensor, " row"]:
    """How many numbers of each row are larger."""
    if scratch is None:
        return (x > than).sum(dim=-1)
    # Ones and zeros as floats are added up several times as fast as truth values are, and exactly: no vocabulary has 2**24 tokens.
    ones = torch.gt(x, than, out=scratch[: x.shape[0], : x.shape[1]])
    return ones.sum(dim=-1).long()


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
