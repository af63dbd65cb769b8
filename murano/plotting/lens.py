"""The logit lens as a heatmap: layers upwards, tokens from left to right."""

from __future__ import annotations

from typing import Any

from murano.artifacts.logit_lens import LogitLensResult
from murano.plotting.backend import Axes
from murano.plotting.grid import Grid, Words
from murano.plotting.scales import scale_of
from murano.plotting.selection import (
    called,
    check_lens,
    check_prompt,
    final_layer,
    finite,
    fold,
    pick_layers,
    pick_positions,
    row_labels,
    settled_row,
)
from murano.plotting.values import values_of

#: More columns than this are folded: wider figures fit no page.
MAX_COLUMNS = 40


def plot_lens(
    lens: LogitLensResult,
    prompt: int = 0,
    ax: Axes | None = None,
    value: str = "prob",
    *,
    layers: Any = None,
    positions: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Axes:
    """Draw what each layer predicts at each position of a prompt.

    Rows are layers, the first at the bottom, so that the answer is read upwards. The prompt's tokens stand below the
    columns, the model's own predictions above. A frame in the last column begins at the layer from which on its top
    token stays first.

    Args:
        lens: what was read.
        prompt: index of the prompt.
        ax: where to draw; without it a new pyplot figure, as large as its content needs.
        value: what cells are shaded by: ``"prob"`` of the predicted token, ``"entropy"``, or a name in ``lens.stats``.
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all.
        positions: which positions, as indices or a slice, -1 being the last; ``None`` for all.
        max_columns: with more positions than this the middle ones are left out, and a mark says how many.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: there is no such prompt, layer or position, or the statistic was not read.
        MissingExtraError: matplotlib is not installed.
    """
    return lens_grid(lens, prompt, value, layers=layers, positions=positions, max_columns=max_columns).draw(ax)


def lens_grid(
    lens: LogitLensResult,
    prompt: int = 0,
    value: str = "prob",
    *,
    layers: Any = None,
    positions: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Grid:
    """What :func:`plot_lens` draws, as data; see there for the arguments."""
    check_lens(lens)
    prompt = check_prompt(lens, prompt)
    rows = pick_layers(lens, layers)
    columns = fold(pick_positions(lens, prompt, positions), max_columns)
    numbers = finite(values_of(lens, value)[rows, prompt][:, columns])
    labels, row_title = row_labels([lens.addresses[row] for row in rows])
    final = final_layer(lens)
    settled = settled_row(lens, prompt, columns[-1], rows)
    note = "" if settled is None else f"\nframed: top token final from {_layer_name(labels[settled])} on"
    return Grid(
        values=numbers,
        scale=scale_of(value, numbers),
        rows=labels,
        row_title=row_title,
        words=[words_at(lens, row, prompt, columns) for row in rows],
        below=[[lens.words[token]] for token in lens.input_ids[prompt, columns].tolist()],
        below_title="input token" + note,
        above=[] if final is None else words_at(lens, final, prompt, columns),
        above_title="the model's prediction",
        left_out=gaps(lens, prompt, columns),
        settled={} if settled is None else {len(columns) - 1: settled},
        title=title_of(lens, prompt),
    )


def words_at(lens: LogitLensResult, layer: int, prompt: int, columns: list[int]) -> list[Words]:
    """The predicted token in each cell of a row; ``None`` where nothing could be read."""
    ids = lens.predicted_tokens[layer, prompt, columns].tolist()
    return [None if token < 0 else [lens.words[token]] for token in ids]


def gaps(lens: LogitLensResult, prompt: int, columns: list[int]) -> dict[int, int]:
    """How many of the prompt's positions lie between a column and the one before it."""
    index = lens.position_index[prompt, columns].tolist()
    steps = {column: index[column] - index[column - 1] - 1 for column in range(1, len(index))}
    return {column: missing for column, missing in steps.items() if missing > 0}


def title_of(lens: LogitLensResult, prompt: int | None = None) -> str:
    """The model, and which of several prompts."""
    which = f"prompt {prompt}" if prompt is not None and lens.n_prompts > 1 else ""
    return ", ".join(part for part in (called(lens.model), which) if part)


def _layer_name(row: str) -> str:
    return f"layer {row}" if row.isdigit() else row
