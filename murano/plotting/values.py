"""What a heatmap may be shaded by: the numbers of a statistic, with its unit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError, nearest

#: What is always there, and the unit that the colour bar shows.
UNITS = {"prob": "probability", "entropy": "entropy (nats)"}
#: Units of statistics that can be read on demand; one that is not listed is called by its name.
STAT_UNITS = {
    "kl": "KL divergence (nats)",
    "js": "JS divergence (nats)",
    "rank": "rank",
    "logprob": "log probability (nats)",
}


def statistics_of(lens: LogitLensResult) -> list[str]:
    """The names of all statistics that were read."""
    return [*UNITS, *lens.stats]


def values_of(lens: LogitLensResult, value: str) -> Any:
    """The numbers of a statistic as an array ``[layer, prompt, position]``.

    Args:
        lens: what was read.
        value: ``"prob"``, ``"entropy"`` or a name in ``lens.stats``.

    Raises:
        InputError: it was not read; the message says how to get it.
    """
    if value == "prob":
        return as_array(lens.max_probs)
    if value == "entropy":
        return as_array(lens.entropy)
    if isinstance(value, str) and value in lens.stats:
        return as_array(lens.stats[value])
    there = statistics_of(lens)
    raise InputError(
        f"{value!r} was not read.{nearest(value, there)} There are: {', '.join(there)}. "
        f"To read another statistic: LogitLens(model, stats=({str(value)!r},))."
    )


def unit_of(value: str) -> str:
    """A statistic's name with its unit."""
    return UNITS.get(value) or STAT_UNITS.get(value, value)


def as_array(tensor: Tensor) -> Any:
    """A tensor as a float array, wherever it lives."""
    return tensor.detach().float().cpu().numpy()
