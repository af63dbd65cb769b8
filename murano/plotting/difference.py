"""Two lenses on the same prompt, one minus the other."""

from __future__ import annotations

from typing import Any

from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError
from murano.plotting.backend import Axes
from murano.plotting.grid import Grid, Words
from murano.plotting.lens import MAX_COLUMNS, gaps, title_of, words_at
from murano.plotting.scales import difference_scale
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
)
from murano.plotting.values import unit_of, values_of


def plot_difference(
    a: LogitLensResult,
    b: LogitLensResult,
    prompt: int = 0,
    ax: Axes | None = None,
    value: str = "prob",
    *,
    names: tuple[str, str] | None = None,
    layers: Any = None,
    positions: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Axes:
    """Draw what two lenses say of the same prompt: two models, two revisions, two seeds.

    Cells are shaded by ``a`` minus ``b``: with ``value="prob"`` the probability of what ``a`` predicts minus that of
    what ``b`` predicts, which may be another token. Where the tokens differ both are written, the one of ``a`` above.

    Args:
        a: what was read first.
        b: what is subtracted; its layers and positions may be others: those that both have are drawn.
        prompt: index of the prompt, in both.
        ax: where to draw; without it a new pyplot figure.
        value: ``"prob"``, ``"entropy"``, or a name in the ``stats`` of both.
        names: what the two are called; without it the models' names if they differ, else "a" and "b".
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all that both have.
        positions: which positions of ``a``, as indices or a slice; ``None`` for all that both have.
        max_columns: with more positions than this the middle ones are left out, and a mark says how many.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: the prompts differ, or a prompt, layer, position or statistic is not there.
        MissingExtraError: matplotlib is not installed.
    """
    return difference_grid(
        a, b, prompt, value, names=names, layers=layers, positions=positions, max_columns=max_columns
    ).draw(ax)


def difference_grid(
    a: LogitLensResult,
    b: LogitLensResult,
    prompt: int = 0,
    value: str = "prob",
    *,
    names: tuple[str, str] | None = None,
    layers: Any = None,
    positions: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Grid:
    """What :func:`plot_difference` draws, as data; see there for the arguments."""
    check_lens(a)
    check_lens(b)
    prompt = check_prompt(a, prompt)
    check_prompt(b, prompt)
    name_a, name_b = _names(a, b, names)
    rows = _shared_layers(a, b, layers)
    columns_a, columns_b = _shared_positions(a, b, prompt, positions, max_columns)
    rows_b = [b.layer_index(a.addresses[row]) for row in rows]
    numbers = finite(values_of(a, value)[rows, prompt][:, columns_a])
    numbers = numbers - finite(values_of(b, value)[rows_b, prompt][:, columns_b])
    labels, row_title = row_labels([a.addresses[row] for row in rows])
    words = [
        _both(words_at(a, row, prompt, columns_a), words_at(b, row_b, prompt, columns_b))
        for row, row_b in zip(rows, rows_b, strict=True)
    ]
    final_a, final_b = final_layer(a), final_layer(b)
    above: list[Words] = []
    if final_a is not None and final_b is not None:
        above = _both(words_at(a, final_a, prompt, columns_a), words_at(b, final_b, prompt, columns_b))
    differ = any(cell is not None and len(cell) > 1 for row in [*words, above] for cell in row)
    return Grid(
        values=numbers,
        scale=difference_scale(f"difference in {unit_of(value)}", numbers),
        rows=labels,
        row_title=row_title,
        words=words,
        below=[[a.words[token]] for token in a.input_ids[prompt, columns_a].tolist()],
        below_title="input token" + (f"\nwhere they differ: {name_a} above, {name_b} below" if differ else ""),
        above=above,
        above_title="the models' predictions",
        left_out=gaps(a, prompt, columns_a),
        title=(
            f"{name_a} − {name_b}"
            if names is not None or name_a != "a"
            else f"{title_of(a, prompt)}: a − b".lstrip(": ")
        )
        + _of_one_only(a, b, layers),
    )


def _names(a: LogitLensResult, b: LogitLensResult, given: Any) -> tuple[str, str]:
    """What the two are called.

    Raises:
        InputError: names were given, and they are not two texts.
    """
    if given is not None:
        if isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(name, str) for name in given):
            return given[0], given[1]
        raise InputError(f"names={given!r}: give two, one for each lens: names=('base', 'tuned').")
    one, other = called(a.model), called(b.model)
    return (one, other) if one and other and one != other else ("a", "b")


def _of_one_only(a: LogitLensResult, b: LogitLensResult, layers: Any) -> str:
    """How many layers are not drawn because one lens alone has them; nothing where the layers were asked for."""
    n = len(set(a.addresses) ^ set(b.addresses)) if layers is None else 0
    return f" (not drawn: {n} layer{'s' if n != 1 else ''} that one of them lacks)" if n else ""


def _shared_layers(a: LogitLensResult, b: LogitLensResult, layers: Any) -> list[int]:
    rows = pick_layers(a, layers)
    if layers is not None:
        for row in rows:
            b.layer_index(a.addresses[row])  # one that was asked for by name is not left out in silence
    shared: set[Address] = set(b.addresses)
    rows = [row for row in rows if a.addresses[row] in shared]
    if not rows:
        raise InputError(
            f"The lenses have no layer in common. First: {', '.join(map(str, a.addresses))}; "
            f"second: {', '.join(map(str, b.addresses))}."
        )
    return rows


def _shared_positions(
    a: LogitLensResult, b: LogitLensResult, prompt: int, positions: Any, max_columns: int
) -> tuple[list[int], list[int]]:
    """The positions of the prompt that both have, as columns of each: padding may put them elsewhere."""
    where = {int(b.position_index[prompt, column]): column for column in pick_positions(b, prompt)}
    columns = pick_positions(a, prompt, positions)
    columns = fold([column for column in columns if int(a.position_index[prompt, column]) in where], max_columns)
    if not columns:
        raise InputError(f"The lenses have no position of prompt {prompt} in common.")
    others = [where[int(a.position_index[prompt, column])] for column in columns]
    for column, other in zip(columns, others, strict=True):
        one, two = (lens.words[int(lens.input_ids[prompt, c])] for lens, c in ((a, column), (b, other)))
        if one != two:
            raise InputError(
                f"The lenses read different prompts: token {int(a.position_index[prompt, column])} of prompt {prompt} "
                f"is {one!r} in the first and {two!r} in the second."
            )
    return columns, others


def _both(one: list[Words], other: list[Words]) -> list[Words]:
    """One token where two cells agree, both where they differ."""
    cells: list[Words] = []
    for x, y in zip(one, other, strict=True):
        cells.append(None if x is None or y is None else x if x == y else [*x, *y])
    return cells
