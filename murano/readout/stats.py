"""Statistics of a row of logits: pure functions, one formula each, for logits of any shape whose last axis is the vocabulary.

The streaming reduction (:mod:`murano.readout.reduce`) gives the same numbers without ever holding more than a chunk of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.errors import InputError, nearest


def log_prob(logits: Float[Tensor, "*row vocab"], token: Int[Tensor, "*row"]) -> Float[Tensor, "*row"]:
    """``log p(token)`` in nats: its logit less the ``logsumexp`` of all."""
    x = logits.float()
    return x.gather(-1, token.unsqueeze(-1)).squeeze(-1) - x.logsumexp(-1)


def surprisal(logits: Float[Tensor, "*row vocab"], token: Int[Tensor, "*row"]) -> Float[Tensor, "*row"]:
    """``-log p(token)`` in nats, of the token that followed (Shannon 1948; in reading, Hale 2001)."""
    return -log_prob(logits, token)


def rank(logits: Float[Tensor, "*row vocab"], token: Int[Tensor, "*row"]) -> Int[Tensor, "*row"]:
    """How many tokens have a larger logit: 0 for the first."""
    return (logits > logits.gather(-1, token.unsqueeze(-1))).sum(-1)


def max_prob(logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """The probability of the most probable token."""
    x = logits.float()
    return (x.amax(-1) - x.logsumexp(-1)).exp()


def margin(logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """The most probable token's probability less the second's (Scheffer, Decomain & Wrobel 2001)."""
    first, second = logits.float().softmax(-1).topk(2, dim=-1).values.unbind(-1)
    return first - second


def entropy(logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """``-sum p log p`` in nats (Shannon 1948): 0 when one token is certain, ``log(vocab)`` when all are equally likely."""
    log_p = log_softmax(logits)
    return -torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p).sum(-1)


def kl_divergence(logits: Float[Tensor, "*row vocab"], reference: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """``KL(reference ‖ logits) = sum p (log p - log q)`` in nats, with ``p`` of the reference (Kullback & Leibler 1951).

    With the model's own prediction as the reference it is what reading too early loses, as Belrose et al. 2023 (arXiv:2303.08112) measure
    a lens.
    """
    return kl_of(log_softmax(logits), log_softmax(reference))


def js_divergence(logits: Float[Tensor, "*row vocab"], reference: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """``½ KL(p ‖ m) + ½ KL(q ‖ m)`` in nats with ``m = ½ (p + q)`` (Lin 1991): symmetric, at most ``log 2``."""
    return js_of(log_softmax(logits), log_softmax(reference))


def log_softmax(logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row vocab"]:
    """Log-probabilities in nats, in float32.

    ``torch.log_softmax`` adds up a row of 50 000 in float32 one after another, which costs 1e-5 on a CPU; ``sum`` adds in a tree.
    """
    x = logits.float()
    x = x - x.amax(-1, keepdim=True)
    return x.sub_(x.exp().sum(-1, keepdim=True).log())


def kl_of(log_q: Float[Tensor, "*row vocab"], log_p: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """:func:`kl_divergence` of log-probabilities."""
    # What p never says adds nothing, whatever q thinks of it.
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -torch.inf, 0.0, terms).sum(-1).clamp_(min=0)


def js_of(log_q: Float[Tensor, "*row vocab"], log_p: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row"]:
    """:func:`js_divergence` of log-probabilities."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (kl_of(log_m, log_p) + kl_of(log_m, log_q)) / 2


@dataclass(frozen=True)
class Stat:
    """A statistic that a lens can read for each cell.

    Args:
        name: what it is asked for by.
        unit: of the numbers.
        needs: beside the row itself: ``"last"`` for the last layer's distribution, ``"next"`` for the token that follows in the prompt.
    """

    name: str
    unit: str
    needs: str = ""


STATS = {
    stat.name: stat
    for stat in (
        Stat("entropy", "nats"),
        Stat("max_prob", "probability"),
        Stat("margin", "probability"),
        Stat("kl", "nats", "last"),
        Stat("js", "nats", "last"),
        Stat("surprisal", "nats", "next"),
        Stat("next_rank", "rank", "next"),
    )
}


def parse_stats(stats: Any) -> tuple[str, ...]:
    """The statistics that are asked for, each once: a tuple of names, one string with commas between them, or ``"all"``.

    Raises:
        InputError: one is unknown.
    """
    stats = tuple(STATS) if isinstance(stats, str) and stats == "all" else () if stats is None else stats
    if not isinstance(stats, Iterable):
        raise InputError(f"stats={stats!r:.80} must be names of statistics: {', '.join(STATS)}, or 'all'.")
    names = tuple(n.strip() for n in stats.split(",") if n.strip()) if isinstance(stats, str) else tuple(stats)
    for name in names:
        if not isinstance(name, str) or name not in STATS:
            raise InputError(
                f"Statistic {name!r} is unknown.{nearest(name, STATS)} There are: {', '.join(STATS)}, or 'all'."
            )
    return tuple(dict.fromkeys(names))
