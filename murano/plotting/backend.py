"""The one door to matplotlib: without it, every figure says how to install it."""

from __future__ import annotations

from murano.errors import MissingExtraError

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


def bare_axes(size: Size) -> Axes:
    """Axes on a figure that pyplot does not know, so that nothing has to be closed and no window opens."""
    figure = Figure(figsize=_outer(size))
    FigureCanvasAgg(figure)
    return _place(figure, size)


def pyplot_axes(size: Size) -> Axes:
    """Axes on a new pyplot figure: a notebook shows it at the end of its cell, as any other."""
    import matplotlib.pyplot as plt  # here: it starts a window system where there is one

    return _place(plt.figure(figsize=_outer(size)), size)


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


def _place(figure: Figure, size: Size) -> Axes:
    width, height = _outer(size)
    return figure.add_axes((size.left / width, size.bottom / height, size.width / width, size.height / height))
