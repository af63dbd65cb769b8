"""Rows of logits, reduced to the few numbers asked for while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Rows that are reduced together on a CPU: few enough for a slice of logits and one of exponentials to stay in cache.
CPU_SLICE_BYTES = 3 << 19
#: Numbers whose maximum is taken at once when the largest of a row are searched.
BLOCK = 256


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
    step = n if logits.is_cuda else max(1, CPU_SLICE_BYTES // (4 * vocab))
    parts = []
    for start in range(0, n, step):
        x = logits[start : start + step]
        if finish is not None:
            x = finish(x)
        parts.append(_reduce_slice(x.float(), top_k, scratch))
    if len(parts) == 1:
        return RowStats(*parts[0])
    return RowStats(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _reduce_slice(x: Tensor, top_k: int, scratch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, ids = top(x, top_k)
    peak = values[:, :1]
    x = x.sub_(peak)
    exponentials = torch.exp(x, out=scratch[: x.shape[0], : x.shape[1]]) if scratch is not None else x.exp()
    total = exponentials.sum(dim=-1)
    weighted = exponentials.mul_(x).sum(dim=-1)
    log_total = total.log()
    entropy = log_total - weighted / total
    if not bool(entropy.isfinite().all()):
        # A masked token has logit -inf and adds nothing: 0 · -inf is 0 here.
        weighted = torch.where(x == -torch.inf, 0.0, exponentials).sum(dim=-1)
        entropy = log_total - weighted / total
    return ids, (values - peak - log_total.unsqueeze(-1)).exp(), entropy, peak.squeeze(-1) + log_total


def top(x: Float[Tensor, "row vocab"], k: int) -> tuple[Float[Tensor, "row k"], Int[Tensor, "row k"]]:
    """The ``k`` largest numbers of each row and where they are, best first.

    On a CPU ``torch.topk`` sorts candidates from the whole row, one thread to a row. The ``k`` largest numbers lie in the ``k`` blocks
    with the largest maxima, so that one vectorised pass for maxima and a search in ``k`` blocks find the same.
    """
    rows, vocab = x.shape
    n_blocks = vocab // BLOCK
    if x.is_cuda or n_blocks < 4 * k:
        return x.max(dim=-1, keepdim=True) if k == 1 else x.topk(k, dim=-1)
    searched = n_blocks * BLOCK
    blocks = x[:, :searched].unflatten(1, (n_blocks, BLOCK))
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices
    candidates = blocks.gather(1, best.unsqueeze(-1).expand(rows, k, BLOCK)).flatten(1)
    if searched < vocab:  # what fills no block is searched too
        candidates = torch.cat([candidates, x[:, searched:]], dim=1)
    values, index = candidates.topk(k, dim=-1)
    block = best.gather(1, (index // BLOCK).clamp_(max=k - 1))
    ids = torch.where(index < k * BLOCK, block * BLOCK + index % BLOCK, index - k * BLOCK + searched)
    return values, ids
