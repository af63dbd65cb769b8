"""Which layers and heads move the answer: layers × components, or layers × heads, as a heatmap."""

from __future__ import annotations

from murano.address import Address
from murano.artifacts.logit_attribution import LogitAttributionResult
from murano.errors import InputError
from murano.plotting.attribution import check_attributed, read_as, title_of
from murano.plotting.backend import Axes, np
from murano.plotting.grid import Grid
from murano.plotting.scales import difference_scale
from murano.plotting.values import as_array

#: With more columns than this cells are only shaded.
MOST_NUMBERED = 16
_SHORT = {"attn_out": "attn", "mlp_out": "MLP", "layer_out": "layer", "rest": "rest"}


def plot_attribution_grid(
    result: LogitAttributionResult,
    prompt: int | None = None,
    ax: Axes | None = None,
    *,
    of: str | None = None,
    position: int | None = None,
) -> Axes:
    """Draw what each layer's components add to the final logit: rows are layers, the first at the bottom.

    Columns are attention and MLP, or the heads where the logit was split by heads. What belongs to no layer, the embeddings and the bias,
    is not shown.

    Args:
        result: what was attributed.
        prompt: index of a prompt; ``None`` for the mean over all.
        ax: where to draw; without it a new pyplot figure.
        of: ``"target"``, ``"foil"`` or ``"difference"``; ``None``: the difference where every prompt has a foil.
        position: index of the token in its prompt, -1 is the last one; ``None``: the last one that was read.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: there is no such prompt, position or foil.
        MissingExtraError: matplotlib is not installed.
    """
    return attribution_grid(result, prompt, of=of, position=position).draw(ax)


def attribution_grid(
    result: LogitAttributionResult, prompt: int | None = None, *, of: str | None = None, position: int | None = None
) -> Grid:
    """What :func:`plot_attribution_grid` draws, as data; see there for the arguments."""
    check_attributed(result, prompt)
    of = result.default_of if of is None else of
    found, n = result.one(result.values(of, position), prompt, of, position)
    values = as_array(found)
    layers = sorted({a.layer for a in result.components if a.layer is not None})
    columns = list(dict.fromkeys(_column(a) for a in sorted(result.components, key=_order) if a.layer is not None))
    if not columns:
        raise InputError(f"There is nothing to draw in {result!r}.")
    numbers = np.full((len(layers), len(columns)), np.nan)
    for value, address in zip(values, result.components, strict=True):
        if address.layer is not None:
            numbers[layers.index(address.layer), columns.index(_column(address))] = value
    scale = difference_scale("contribution (logits)", numbers)
    words = None
    if len(columns) <= MOST_NUMBERED:
        # What would read +0.00 says nothing, and there is much of it.
        words = [[None if np.isnan(v) else [f"{v:+.2f}"] if abs(v) >= 0.005 else [] for v in row] for row in numbers]
    return Grid(
        values=numbers,
        scale=scale,
        rows=[str(layer) for layer in layers],
        row_title="layer",
        words=words,
        below=[[column] for column in columns],
        plain_below=True,
        below_title=read_as(result, prompt if result.n_prompts > 1 else 0, of),
        title=title_of(result, prompt, n, position),
    )


def _column(address: Address) -> str:
    return address.part if address.part.startswith("h") else _SHORT[address.part or address.component]


def _order(address: Address) -> tuple[int, int]:
    """Heads by number, then what is left of attention, then the MLP."""
    if address.part.startswith("h"):
        return (0, int(address.part[1:]))
    return (
        1 + ["attn_out", "rest", "mlp_out", "layer_out", "embeddings", "bias"].index(address.part or address.component),
        0,
    )
