"""What a heatmap may be shaded by: the numbers of a statistic, with its unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError, nearest

#: What is always there, and the unit that the colour bar shows.
UNITS = {"prob": "probability", "entropy": "entropy (nats)"}
#: Units of statistics that can be read on demand; one that is not listed is called by its name.
STAT_UNITS = {
    "kl": "KL divergence (nats)",
    "js": "JS divergence (nats)",
    "max_prob": "probability of the first choice",
    "margin": "first probability − second",
    "surprisal": "surprisal of the next token (nats)",
    "next_rank": "rank of the next token (1 = first)",
    "target_prob": "probability of the target",
    "rank": "rank of the target (1 = first)",
}


def statistics_of(lens: LogitLensResult) -> list[str]:
    """The names of all statistics that were read; those of the target where prompts have one."""
    answers = ["target_prob", "rank"] if lens.target_log_probs is not None else []
    return list(dict.fromkeys([*UNITS, *lens.stats, *answers]))


def values_of(lens: LogitLensResult, value: str) -> Any:
    """The numbers of a statistic as an array ``[layer, prompt, position]``; ranks are counted from 1, as people do.

    Args:
        lens: what was read.
        value: ``"prob"``, ``"entropy"``, a name in ``lens.stats``, or ``"target_prob"`` or ``"rank"`` of the target.

    Raises:
        InputError: it was not read; the message says how to get it.
    """
    if value == "prob":
        return as_array(lens.max_probs)
    if value == "entropy":
        return as_array(lens.entropy)
    if isinstance(value, str) and value in lens.stats:
        return as_array(lens.stats[value]) + (1 if value == "next_rank" else 0)
    if value == "target_prob" and lens.target_log_probs is not None:
        probs = lens.target_log_probs.exp()
        return as_array(probs.nansum(-1).masked_fill(probs.isnan().all(-1), torch.nan))
    if value == "rank" and lens.target_ranks is not None:
        best = torch.where(lens.target_ranks < 0, torch.inf, lens.target_ranks.float()).amin(-1)
        return as_array(torch.where(best.isinf(), torch.nan, best + 1))
    there = statistics_of(lens)
    if value in ("target_prob", "rank"):
        how = "give each prompt a target, LoadPrompts(prompts, targets=[…])"
    else:
        how = f"LogitLens(model, stats=({str(value)!r},))"
    raise InputError(
        f"{value!r} was not read.{nearest(value, there)} There are: {', '.join(there)}. To read another statistic: {how}."
    )


def unit_of(value: str) -> str:
    """A statistic's name with its unit."""
    return UNITS.get(value) or STAT_UNITS.get(value, value)


def as_array(tensor: Tensor) -> Any:
    """A tensor as a float array, wherever it lives."""
    return tensor.detach().float().cpu().numpy()
