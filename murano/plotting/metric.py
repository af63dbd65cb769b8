"""A metric against the layers that it was read at: its mean over prompts, and how sure that is."""

from __future__ import annotations

from murano.artifacts.metric_table import MetricTable
from murano.errors import InputError
from murano.plotting import fonts
from murano.plotting.backend import Axes, Size, bare_axes, np, pyplot_axes
from murano.plotting.grid import FAINT
from murano.plotting.selection import row_labels
from murano.plotting.trajectories import COLOURS
from murano.plotting.values import as_array

#: So many prompts are drawn as faint lines of their own; more would be a grey area.
MOST_LINES = 40


def plot_metric(table: MetricTable, by: str | None = None, ax: Axes | None = None, *, bare: bool = False) -> Axes:
    """Draw a metric's mean against its columns, with a bootstrap interval.

    Args:
        table: a metric by layer, or by the points of a sweep.
        by: a name in the prompts' metadata; a curve for each group. Without it each of up to 40 prompts is a faint line.
        ax: where to draw; without it a new pyplot figure.
        bare: without ``ax``: a figure that pyplot does not know.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: the columns hold numbers of different units.
        MissingExtraError: matplotlib is not installed.
    """
    if len(set(table.units)) > 1:
        raise InputError(f"{table.name} has columns of different units, {table.unit}: there is no curve to draw.")
    summary = table.mean(by)
    labels, title = row_labels(table.addresses) if table.addresses else (list(table.columns), "")
    if ax is None:
        tall = max(map(fonts.width, labels)) * 8 / 72
        size = Size(
            width=min(max(0.3 * len(labels), 3.2), 7.0), height=2.6, left=0.75, right=0.2, bottom=0.5 + tall, top=0.35
        )
        ax = (bare_axes if bare else pyplot_axes)(size)
    depth = np.arange(len(labels))
    if by is None and table.values.shape[0] <= MOST_LINES:
        ax.plot(depth, as_array(table.values).T, color=FAINT, linewidth=0.7, alpha=0.5, zorder=1)
    for index, name in enumerate(summary.groups):
        colour = COLOURS[index % len(COLOURS)]
        low, high = as_array(summary.low[index]), as_array(summary.high[index])
        ax.fill_between(depth, low, high, color=colour, alpha=0.2, linewidth=0, zorder=2)
        ax.plot(depth, as_array(summary.mean[index]), color=colour, marker="o", markersize=3.2, zorder=3, label=name)
    if by is not None:
        ax.legend(fontsize=8, frameon=False)
    every = max(1, -(-len(depth) // 16)) if all(text.isdigit() for text in labels) else 1
    upright = any(len(text) > 3 for text in labels) and len(depth) > 4
    shown = [int(i) for i in depth[::every]]
    ax.set_xticks(shown, labels=[labels[i] for i in shown], fontsize=8, rotation=90 if upright else 0)
    ax.tick_params(axis="y", labelsize=8)
    ax.yaxis.get_offset_text().set_fontsize(8)
    ax.set_xlabel(title, fontsize=8)
    ax.set_ylabel(table.unit, fontsize=8)
    ax.set_title(f"{table.name}: mean of {table.values.shape[0]}", fontsize=10, parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
