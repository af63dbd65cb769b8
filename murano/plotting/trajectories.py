"""How probable each candidate is, from the first layer to the last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError, nearest
from murano.plotting import fonts
from murano.plotting.backend import Axes, Patch, Size, np, place_axes
from murano.plotting.grid import FAINT
from murano.plotting.lens import title_of
from murano.plotting.selection import (
    check_lens,
    check_prompt,
    final_layer,
    finite,
    pick_layers,
    pick_positions,
    row_labels,
)
from murano.plotting.values import as_array

#: Okabe and Ito's colours, without yellow and black: they stay apart for colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: So many lines of the legend stand under each other.
LEGEND_LINES = 16


@dataclass(frozen=True)
class Curves:
    """What a plot of trajectories shows.

    Args:
        values: ``[token, layer]``, NaN where the token was not among the ``k`` kept.
        tokens: their texts.
        ids: their ids.
        bound: what a token outside the ``k`` kept can have at most, at each layer.
        k: how many tokens were kept.
        final: the row of the model's own prediction, if it is one of them.
        layers: the labels of the layers.
        layer_title: what they are.
        title: of the figure.
    """

    values: Any
    tokens: Sequence[str]
    ids: Sequence[int]
    bound: Any
    k: int
    final: int | None
    layers: Sequence[str]
    layer_title: str
    title: str

    def size(self) -> Size:
        """How large a figure has to be for all of it to be read."""
        columns = -(-(len(self.tokens) + 1) // LEGEND_LINES)
        widest = max(fonts.width(text) for text in [*self._labels(), self._bound_label()])
        lines = min(len(self.tokens) + 1, LEGEND_LINES)
        return Size(
            width=min(max(0.3 * len(self.layers), 3.2), 7.0),
            height=max(2.6, 0.2 * lines),
            left=0.65,
            right=(widest * 8 / 72 + 0.45) * columns + 0.1,
            bottom=0.5 + max(map(fonts.width, self.layers)) * 8 / 72,
            top=0.4 if self.title else 0.15,
        )

    def draw(self, ax: Axes | None = None, *, bare: bool = False) -> Axes:
        """Draw the curves on ``ax``, or on a new figure; ``bare``: one that pyplot does not know."""
        ax, room = place_axes(ax, self.size(), bare)
        depth = np.arange(len(self.layers))
        labels = self._labels()
        families = fonts.families([*labels, self._bound_label()])
        ax.fill_between(depth, 0, np.nan_to_num(self.bound), color=FAINT, alpha=0.2, linewidth=0, zorder=0.5)
        if len(depth) == 1:  # an area needs two ends
            ax.fill_between(
                [-0.4, 0.4], 0, float(np.nan_to_num(self.bound[0])), color=FAINT, alpha=0.2, linewidth=0, zorder=0.5
            )
        handles: list[Any] = []
        styles = itertools.cycle(itertools.product(("-", "--", ":"), range(len(COLOURS))))
        for row, (dash, colour) in zip(range(len(self.tokens)), styles, strict=False):
            handles += ax.plot(
                depth,
                self.values[row],
                linestyle=dash,
                color=COLOURS[colour],
                marker=MARKERS[row % len(MARKERS)],
                markersize=4 if row == self.final else 3.2,
                linewidth=2.2 if row == self.final else 1.2,
                zorder=3 if row == self.final else 2,
                clip_on=False,
            )
        top = float(np.nanmax(self.values)) if np.isfinite(self.values).any() else 1.0
        ax.set(ylim=(0, 1 if top > 0.5 else top * 1.15), xlim=(-0.4, len(depth) - 0.6))
        ax.spines[["top", "right"]].set_visible(False)
        every = max(1, -(-len(depth) // 16)) if all(text.isdigit() for text in self.layers) else 1
        shown = [int(i) for i in depth[::every]]
        upright = any(len(text) > 3 for text in self.layers) and len(depth) > 4
        ax.set_xticks(shown, labels=[self.layers[i] for i in shown], fontsize=8, rotation=90 if upright else 0)
        ax.tick_params(axis="y", labelsize=8)
        ax.set_xlabel(self.layer_title, fontsize=8)
        ax.set_ylabel("probability", fontsize=8)
        self._draw_legend(ax, handles, labels, families)
        fonts.draw_title(ax, self.title, room)
        return ax

    def _draw_legend(self, ax: Axes, handles: list[Any], labels: list[str], families: list[str]) -> None:
        handles = [*handles, Patch(facecolor=FAINT, alpha=0.2, edgecolor="none")]
        texts = [*labels, self._bound_label()]
        legend = ax.legend(
            handles,
            [
                str(i) for i in range(len(texts))
            ],  # not the texts themselves: matplotlib would drop one that begins with "_"
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            ncols=-(-len(texts) // LEGEND_LINES),
            fontsize=8,
            frameon=False,
            borderaxespad=0,
            handlelength=2.2,
        )
        for number, (drawn, text) in enumerate(zip(legend.get_texts(), texts, strict=True)):
            drawn.set(text=text, parse_math=False, usetex=False, family=families)
            if number == len(texts) - 1:
                drawn.set_color(FAINT)

    def _labels(self) -> list[str]:
        """What tokens are called; two that read alike get their ids."""
        texts = [fonts.label(token, 24) for token in self.tokens]
        return [
            f"{text}  (id {token})" if texts.count(text) > 1 else text
            for text, token in zip(texts, self.ids, strict=True)
        ]

    def _bound_label(self) -> str:
        return f"outside the top {self.k}"


def plot_trajectories(
    lens: LogitLensResult,
    prompt: int = 0,
    position: int = -1,
    tokens: Any = None,
    ax: Axes | None = None,
    *,
    layers: Any = None,
) -> Axes:
    """Draw the probability of some tokens through depth.

    Only the most probable tokens of each layer were kept. Where a token is not among them its curve has a gap: it lies
    somewhere in the grey area, below the least probable one that was kept.

    Args:
        lens: what was read.
        prompt: index of the prompt.
        position: index on the position axis; -1 is the prompt's last token.
        tokens: which tokens, as texts (``" Paris"``, with its space) or ids; ``None`` for every one that ranks first at
            some layer.
        ax: where to draw; without it a new pyplot figure.
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: there is no such prompt, position or layer, or a token was never among those kept.
        MissingExtraError: matplotlib is not installed.
    """
    return trajectory_curves(lens, prompt, position, tokens, layers=layers).draw(ax)


def trajectory_curves(
    lens: LogitLensResult, prompt: int = 0, position: int = -1, tokens: Any = None, *, layers: Any = None
) -> Curves:
    """What :func:`plot_trajectories` draws, as data; see there for the arguments."""
    check_lens(lens)
    prompt = check_prompt(lens, prompt)
    (column,) = pick_positions(lens, prompt, [position])
    rows = pick_layers(lens, layers)
    kept = lens.top_ids[rows, prompt, column].long()
    probabilities = finite(as_array(lens.top_probs[rows, prompt, column]))
    ids = _wanted(lens, kept.tolist(), tokens)
    match = kept.numpy()[None] == np.array(ids)[:, None, None]
    values = np.where(match.any(-1), np.where(match, probabilities[None], 0.0).sum(-1), np.nan)
    final = final_layer(lens)
    winner = -1 if final is None else int(lens.predicted_tokens[final, prompt, column])
    labels, title = row_labels([lens.addresses[row] for row in rows])
    index = int(lens.position_index[prompt, column])
    where = f"after token {index}, {fonts.label(lens.words[int(lens.input_ids[prompt, column])], 16)}"
    return Curves(
        values=values,
        tokens=[lens.words[token] for token in ids],
        ids=ids,
        bound=probabilities[:, -1],
        k=int(kept.shape[-1]),
        final=ids.index(winner) if winner in ids else None,
        layers=labels,
        layer_title=title,
        title=", ".join(part for part in (title_of(lens, prompt), where) if part),
    )


def _wanted(lens: LogitLensResult, kept: list[list[int]], tokens: Any) -> list[int]:
    """The ids to draw, in the order in which they come first, or as they were asked for."""
    seen = {token for layer in kept for token in layer if token >= 0}
    if tokens is None:
        found = list(dict.fromkeys(layer[0] for layer in kept if layer[0] >= 0))
        if not found:
            raise InputError("There is nothing to draw: no layer has a prediction at this position.")
        return found
    found = []
    for token in [tokens] if isinstance(tokens, (str, int)) else list(tokens):
        if isinstance(token, str):
            ids = sorted(i for i in seen if lens.words[i] == token)
            known: Sequence[object] = [lens.words[i] for i in sorted(seen)]
        else:
            ids, known = [i for i in seen if i == token], sorted(seen)
        if not ids:
            raise InputError(
                f"Token {token!r} is not among the {len(kept[0])} most probable at any layer shown."
                f"{nearest(token, known)} To follow it, read more of them: LogitLens(model, top_k=…)."
            )
        found += ids
    if not found:
        raise InputError("tokens is empty: name some, or leave it out for all that rank first at some layer.")
    return list(dict.fromkeys(found))
