"""How numbers become colours: a range, and a map that colour-blind readers can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from murano.plotting.backend import Colormap, LogNorm, Normalize, colormaps, np
from murano.plotting.values import unit_of


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


def scale_of(value: str, numbers: Any) -> Scale:
    """The colours for a statistic of which these numbers are shown."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    unit = unit_of(value)
    if value == "prob":
        return Scale(unit, "Blues", Normalize(0, 1))
    if value == "entropy":
        return Scale(unit, "Purples", Normalize(0, max(high, 1e-3)))
    if (
        value.endswith("rank") and low >= 1
    ):  # from 1 to the size of the vocabulary: linear colours would show two of them
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
