"""What a heatmap may be shaded by, with its unit, its range and a map that colour-blind readers can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError, nearest
from murano.plotting.backend import Colormap, LogNorm, Normalize, colormaps, np

#: What is always there, and the unit that the colour bar shows.
UNITS = {"prob": "probability", "entropy": "entropy (nats)"}
#: Units of statistics that can be read on demand; one that is not listed is called by its name.
STAT_UNITS = {
    "kl": "KL divergence (nats)",
    "js": "JS divergence (nats)",
    "rank": "rank",
    "logprob": "log probability (nats)",
}


@dataclass(frozen=True)
class Scale:
    """How numbers become colours.

    Args:
        unit: what the colour bar says.
        cmap: the name of the colour map.
        norm: the range.
    """

    unit: str
    cmap: str
    norm: Normalize

    @property
    def colormap(self) -> Colormap:
        """The map; where there is no number the cell stays empty."""
        return colormaps[self.cmap].with_extremes(bad=(0, 0, 0, 0))


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
    there = (*UNITS, *lens.stats)
    raise InputError(
        f"{value!r} was not read.{nearest(value, there)} There are: {', '.join(there)}. "
        f"To read another statistic: LogitLens(model, stats=({str(value)!r},))."
    )


def unit_of(value: str) -> str:
    """A statistic's name with its unit."""
    return UNITS.get(value) or STAT_UNITS.get(value, value)


def scale_of(value: str, numbers: Any) -> Scale:
    """The colours for a statistic of which these numbers are shown."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    unit = unit_of(value)
    if value == "prob":
        return Scale(unit, "Blues", Normalize(0, 1))
    if value == "entropy":
        return Scale(unit, "Purples", Normalize(0, max(high, 1e-3)))
    if value == "rank" and low >= 1:  # from 1 to the size of the vocabulary: linear colours would show two of them
        return Scale(unit, "Purples_r", LogNorm(1, max(high, 10)))
    if low < 0 < high:
        return difference_scale(unit, numbers)
    if low == high:
        low, high = min(low, 0.0), max(high, low + 1e-3)
    return Scale(unit, "Purples", Normalize(min(low, 0.0) if low < 0.5 * high else low, high))


def difference_scale(unit: str, numbers: Any) -> Scale:
    """Diverging colours, white at 0."""
    finite = np.abs(numbers[np.isfinite(numbers)])
    # Never a range so narrow that rounding errors are painted in full colour.
    reach = max(float(finite.max()) if finite.size else 0.0, 1e-3)
    return Scale(unit, "PuOr", Normalize(-reach, reach))


def as_array(tensor: Tensor) -> Any:
    """A tensor as a float array, wherever it lives."""
    return tensor.detach().float().cpu().numpy()
