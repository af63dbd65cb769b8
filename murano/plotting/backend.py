"""The one door to matplotlib: without it, every figure says how to install it."""

from __future__ import annotations

from murano.errors import InputError, MissingExtraError

try:
    import numpy as np
    from matplotlib import colormaps as colormaps
    from matplotlib import font_manager as font_manager
    from matplotlib import rc_context as rc_context
    from matplotlib import rcParams as rcParams
    from matplotlib.axes import Axes as Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvasAgg
    from matplotlib.colors import Colormap as Colormap
    from matplotlib.colors import LogNorm as LogNorm
    from matplotlib.colors import Normalize as Normalize
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import FigureBase as FigureBase
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Patch as Patch
    from matplotlib.patches import Rectangle as Rectangle
except ImportError as error:
    raise MissingExtraError("Plots", "plot") from error

from dataclasses import dataclass
from typing import Any

__all__ = ["np"]


@dataclass(frozen=True)
class Size:
    """Of a figure, in inches: its axes, and what is to be left free around them.

    Args:
        width: of the axes.
        height: of the axes.
        left: for row labels.
        right: for a colour bar or a legend.
        bottom: for the labels below.
        top: for a title and the labels above.
    """

    width: float
    height: float
    left: float
    right: float
    bottom: float
    top: float


def place_axes(ax: Axes | None, own: Size, bare: bool) -> tuple[Axes, float]:
    """The axes to draw on, and how wide a title over them may be, in inches: no wider than axes that may have neighbours.

    Args:
        ax: those that were given; without them a new figure is made.
        own: how large that is.
        bare: whether it is one that pyplot does not know.

    Raises:
        InputError: what was given is not one Axes.
    """
    if ax is not None:
        return (given := check_axes(ax)), inner_size(given)[0]
    return (bare_axes if bare else pyplot_axes)(own), own.width + 2 * min(own.left, own.right)


def check_axes(ax: object) -> Axes:
    """The axes that were given to draw on.

    Raises:
        InputError: they are none, several, or not flat; the message says what to type.
    """
    if isinstance(ax, Axes):
        if ax.name != "rectilinear":
            raise InputError(f"ax: give flat Axes, not {ax.name!r} ones: ax=figure.add_subplot().")
        return ax
    kind = type(ax).__name__
    if one := one_of(ax, "axes"):
        raise InputError(f"ax: give one Axes, not several in a {kind}: ax={one}.")
    if isinstance(ax, FigureBase):
        raise InputError(f"ax: give one Axes, not a {kind}: ax=figure.add_subplot().")
    raise InputError(f"ax: give one Axes, as plt.subplots() makes them, not {ax!r}; without ax a new figure is made.")


def one_of(several: object, name: str) -> str:
    """How to write the first of several Axes, as ``plt.subplots`` and ``subplot_mosaic`` give them; empty for anything else."""
    if isinstance(several, dict):
        found = next((key for key, value in several.items() if isinstance(value, Axes)), None)
        return "" if found is None else f"{name}[{found!r}]"
    if isinstance(several, (list, tuple)):
        places = [i for i, value in enumerate(several) if isinstance(value, Axes)]
        return f"{name}[{places[0]}]" if places else ""
    return f"{name}[{', '.join('0' * several.ndim)}]" if isinstance(several, np.ndarray) and several.ndim else ""


def bare_axes(size: Size) -> Axes:
    """Axes on a figure that pyplot does not know, so that nothing has to be closed and no window opens."""
    figure = Figure(figsize=_outer(size))
    FigureCanvasAgg(figure)
    return _axes_on(figure, size)


def pyplot_axes(size: Size) -> Axes:
    """Axes on a new pyplot figure: a notebook shows it at the end of its cell, as any other."""
    import matplotlib.pyplot as plt  # here: it starts a window system where there is one

    return _axes_on(plt.figure(figsize=_outer(size)), size)


def inner_size(ax: Axes) -> tuple[float, float]:
    """Width and height of axes, in inches."""
    box, dpi = ax.get_window_extent(), figure_of(ax).dpi
    return float(box.width / dpi), float(box.height / dpi)


def figure_of(ax: Axes) -> Figure:
    """The whole figure that axes stand on, also where they are in a part of it."""
    figure: Any = ax.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    return figure


def _outer(size: Size) -> tuple[float, float]:
    return size.left + size.width + size.right, size.bottom + size.height + size.top


def _axes_on(figure: Figure, size: Size) -> Axes:
    width, height = _outer(size)
    return figure.add_axes((size.left / width, size.bottom / height, size.width / width, size.height / height))
