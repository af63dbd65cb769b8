"""A metric through depth: its mean over prompts with an interval, a line for each group; and the share of prompts decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from murano.address import Address
from murano.artifacts.metric_table import MetricTable
from murano.errors import InputError
from murano.plotting import fonts
from murano.plotting.backend import Axes, Size, np, place_axes
from murano.plotting.selection import row_labels
from murano.plotting.trajectories import COLOURS, MARKERS
from murano.plotting.values import as_array

#: What the axis of a metric says.
TITLES = {
    "token_prob": "probability of the target",
    "match": "share of prompts with the target first",
    "logit_diff": "logit of target − foil (nats)",
    "rank": "rank of the target (1 = first)",
}


@dataclass(frozen=True)
class MetricCurves:
    """What a plot of a metric shows.

    Args:
        groups: what each line is called, with its number of prompts.
        mean: ``[group, layer]``.
        low: lower ends of the intervals.
        high: upper ends; both ``None`` where there is no interval.
        layers: labels of the layers.
        layer_title: what they are.
        unit: what the vertical axis says.
        log: whether it is logarithmic.
        limits: of the vertical axis, where they are known.
        title: of the figure.
    """

    groups: list[str]
    mean: Any
    low: Any
    high: Any
    layers: list[str]
    layer_title: str
    unit: str
    log: bool = False
    limits: tuple[float, float] | None = None
    title: str = ""

    def size(self) -> Size:
        """How large a figure has to be for all of it to be read."""
        widest = max(fonts.width(fonts.drawable(text)) for text in self.groups) if len(self.groups) > 1 else 0
        return Size(
            width=min(max(0.2 * len(self.layers), 3.4), 6.5),
            height=max(2.7, 0.2 * len(self.groups)),
            left=0.75,
            right=widest * 8 / 72 + 0.55 if widest else 0.15,
            bottom=0.55 + (max(map(fonts.width, self.layers)) * 8 / 72 if max(map(len, self.layers)) > 3 else 0),
            top=0.4 if self.title else 0.15,
        )

    def draw(self, ax: Axes | None = None, *, bare: bool = False) -> Axes:
        """Draw the curves on ``ax``, or on a new figure; ``bare``: one that pyplot does not know."""
        ax, room = place_axes(ax, self.size(), bare)
        depth = np.arange(len(self.layers))
        lines = []
        for group in range(len(self.groups)):
            colour = COLOURS[group % len(COLOURS)]
            dash = ("-", "--", ":")[group // len(COLOURS) % 3]
            lines += ax.plot(
                depth,
                self.mean[group],
                color=colour,
                linestyle=dash,
                marker=MARKERS[group % len(MARKERS)] if len(depth) <= 40 else "",
                markersize=3.2,
                linewidth=1.5,
                zorder=3,
            )
            if self.low is not None and len(depth) == 1:  # a band would have no width
                ax.vlines(depth, self.low[group], self.high[group], color=colour, linewidth=1.2, zorder=2)
            elif self.low is not None:
                ax.fill_between(
                    depth, self.low[group], self.high[group], color=colour, alpha=0.18, linewidth=0, zorder=2
                )
        if self.log:
            ax.set_yscale("log")
        if self.limits is not None:
            ax.set_ylim(*self.limits)
        ax.set_xlim(-0.4, len(depth) - 0.6)
        ax.spines[["top", "right"]].set_visible(False)
        short = all(text.isdigit() for text in self.layers)
        every = max(1, -(-len(depth) // 16)) if short else 1
        shown = [int(i) for i in depth[::every]]
        upright = any(len(text) > 3 for text in self.layers) and len(depth) > 4
        ax.set_xticks(shown, labels=[self.layers[i] for i in shown], fontsize=8, rotation=90 if upright else 0)
        ax.tick_params(axis="y", labelsize=8)
        ax.set_xlabel(self.layer_title, fontsize=8)
        ax.set_ylabel(self.unit, fontsize=8)
        if len(self.groups) > 1:
            texts = [fonts.drawable(text) for text in self.groups]
            # Not the texts themselves: matplotlib would drop one that begins with "_".
            numbers = [str(i) for i in range(len(texts))]
            place: dict[str, Any] = {
                "loc": "upper left",
                "bbox_to_anchor": (1.01, 1.02),
                "borderaxespad": 0,
                "handlelength": 2.2,
            }
            legend = ax.legend(lines, numbers, fontsize=8, frameon=False, **place)
            for drawn, text in zip(legend.get_texts(), texts, strict=True):
                drawn.set(text=text, parse_math=False, usetex=False, family=fonts.families([text]))
        fonts.draw_title(ax, self.title, room)
        return ax


def plot_metric(
    table: MetricTable,
    ax: Axes | None = None,
    *,
    by: str | None = None,
    confidence: float = 0.95,
    log: bool | None = None,
) -> Axes:
    """Draw a metric through depth: the mean over prompts and its bootstrap interval, a line for each group.

    Args:
        table: of a metric that has a value at each layer, or at each point of a sweep.
        ax: where to draw; without it a new pyplot figure.
        by: a name in the prompts' metadata to group by.
        confidence: of the interval.
        log: whether the vertical axis is logarithmic; ``None``: for ranks.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: the metric has no layers, or no prompt has such metadata.
        MissingExtraError: matplotlib is not installed.
    """
    return metric_curves(table, by=by, confidence=confidence, log=log).draw(ax)


def plot_decided(table: MetricTable, ax: Axes | None = None, *, by: str | None = None) -> Axes:
    """Draw the share of prompts that are decided at each layer or before: the prediction depth, or a target's commitment.

    Args:
        table: as :func:`murano.metrics.prediction_depth` or :func:`murano.metrics.commitment` gives it.
        ax: where to draw; without it a new pyplot figure.
        by: a name in the prompts' metadata to group by.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: the table has no depths, or no prompt has such metadata.
        MissingExtraError: matplotlib is not installed.
    """
    return decided_curves(table, by=by).draw(ax)


def metric_curves(
    table: MetricTable, *, by: str | None = None, confidence: float = 0.95, log: bool | None = None
) -> MetricCurves:
    """What :func:`plot_metric` draws, as data; see there for the arguments."""
    if not isinstance(table, MetricTable):
        raise InputError(f"Only a metric is drawn through depth, not a {type(table).__name__}.")
    if len(set(table.units)) > 1 or table.columns == ("depth",):
        raise InputError(
            f"Only a metric with a value at each layer is drawn through depth; {table.name} has {', '.join(table.columns)}. "
            "For depths: plot_decided(table)."
        )
    summary = table.mean(by, confidence=confidence)
    ranks = table.unit == "rank"
    first = 1 if ranks else 0  # a logarithmic axis has no 0
    several = int(summary.n.max()) > 1
    top = float(np.nan_to_num(as_array(summary.high)).max(initial=0))
    labels, title = row_labels(list(table.addresses)) if table.addresses else (list(table.columns), "")
    return MetricCurves(
        groups=[f"{group} (n={int(summary.n[i].max())})" for i, group in enumerate(summary.groups)],
        mean=as_array(summary.mean) + first,
        low=as_array(summary.low) + first if several else None,
        high=as_array(summary.high) + first if several else None,
        layers=labels,
        layer_title=title,
        unit=TITLES.get(table.name, f"{table.name} ({table.unit})" if table.unit else table.name),
        log=ranks if log is None else log,
        limits=(0, 1) if table.unit in ("probability", "share") and not log and top > 0.5 else None,
        title=f"mean of {int(summary.n.max())} prompts, {confidence:.0%} interval" if by is None and several else "",
    )


def decided_curves(table: MetricTable, *, by: str | None = None) -> MetricCurves:
    """What :func:`plot_decided` draws, as data; see there for the arguments."""
    if not isinstance(table, MetricTable) or "depth" not in table.columns:
        raise InputError(
            "Only a table of depths can be drawn as decided prompts: prediction_depth(lens) or commitment(lens)."
        )
    depth, groups = as_array(table["depth"]), table.groups(by)
    n_layers = int(table.model.get("n_layers", np.nanmax(depth, initial=0) + 1))
    labels, title = row_labels([Address(layer) for layer in range(n_layers)])
    shares = [[float((depth[rows] <= layer).mean()) for layer in range(n_layers)] for rows in groups.values()]
    return MetricCurves(
        groups=[f"{name} (n={len(rows)})" for name, rows in groups.items()],
        mean=np.array(shares),
        low=None,
        high=None,
        layers=labels,
        layer_title=title,
        unit="share of prompts decided",
        limits=(0, 1),
        title=f"{table.name}: {table.how.split(',')[0]}",
    )
