"""A set of prompts at a glance: how sure each layer is about each prompt's last token."""

from __future__ import annotations

from typing import Any

from murano.artifacts.logit_lens import LogitLensResult
from murano.plotting.backend import Axes
from murano.plotting.grid import Grid
from murano.plotting.lens import MAX_COLUMNS, title_of
from murano.plotting.scales import scale_of
from murano.plotting.selection import check_lens, final_layer, finite, pick_layers, row_labels, settled_row
from murano.plotting.values import values_of


def plot_overview(
    lens: LogitLensResult,
    ax: Axes | None = None,
    value: str = "prob",
    *,
    layers: Any = None,
    sort: bool | None = None,
) -> Axes:
    """Draw layers × prompts at each prompt's last position.

    A line marks, for each prompt, the layer from which on the model's own top token stays first. Up to 40 prompts the
    predicted tokens are written into their cells.

    Args:
        lens: what was read.
        ax: where to draw; without it a new pyplot figure.
        value: what cells are shaded by: ``"prob"`` of the predicted token, ``"entropy"``, or a name in ``lens.stats``.
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all.
        sort: whether prompts are ordered by the layer at which they settle; ``None`` for when there are more than 40.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: a layer or the statistic was not read.
        MissingExtraError: matplotlib is not installed.
    """
    return overview_grid(lens, value, layers=layers, sort=sort).draw(ax)


def overview_grid(lens: LogitLensResult, value: str = "prob", *, layers: Any = None, sort: bool | None = None) -> Grid:
    """What :func:`plot_overview` draws, as data; see there for the arguments."""
    check_lens(lens)
    rows = pick_layers(lens, layers)
    numbers = finite(values_of(lens, value)[rows, :, -1])
    labels, row_title = row_labels([lens.addresses[row] for row in rows])
    final = final_layer(lens)
    few = lens.n_prompts <= MAX_COLUMNS
    order = list(range(lens.n_prompts))
    settled = [settled_row(lens, prompt, -1, rows) for prompt in order]
    known = any(row is not None for row in settled)
    if known and (sort or (sort is None and not few)):
        order.sort(key=lambda prompt: len(rows) if (row := settled[prompt]) is None else row)
        title = f"prompt, at its last token; {lens.n_prompts} prompts, sorted by the layer of the line"
    else:
        title = "prompt, at its last token"
    return Grid(
        values=numbers[:, order],
        scale=scale_of(value, numbers),
        rows=labels,
        row_title=row_title,
        words=[_words(lens, row, order) for row in rows] if few else None,
        below=[[str(prompt)] for prompt in order],
        plain_below=True,
        below_title=title + ("\nline: top token final from this layer on" if known else ""),
        above=_words(lens, final, order) if few and final is not None else [],
        above_title="the model's prediction",
        settled={column: row for column, prompt in enumerate(order) if (row := settled[prompt]) is not None},
        title=title_of(lens),
    )


def _words(lens: LogitLensResult, layer: int, order: list[int]) -> list[Any]:
    ids = lens.predicted_tokens[layer, order, -1].tolist()
    return [None if token < 0 else [lens.words[token]] for token in ids]
