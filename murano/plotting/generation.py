"""A generation: what each layer predicts at each token that was written, and how often each layer agrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from murano.artifacts.generation_lens import GenerationLensResult
from murano.errors import InputError, nearest
from murano.plotting import fonts, labels
from murano.plotting.backend import Axes, Size, np, place_axes
from murano.plotting.grid import Grid
from murano.plotting.lens import MAX_COLUMNS
from murano.plotting.scales import scale_of
from murano.plotting.selection import called, finite, fold, pick_layers, row_labels
from murano.plotting.values import as_array

#: What cells may be shaded by: where it is in the result, and what scales and colour bars call it.
VALUES = {
    "sampled_prob": ("sampled_probs", "prob", "probability of the written token"),
    "prob": ("max_probs", "prob", "probability of the guess"),
    "sampled_rank": ("sampled_ranks", "rank", "rank of the written token, from 1"),
    "entropy": ("entropy", "entropy", "entropy (nats)"),
}
#: Okabe and Ito's blue; lines of single prompts are as light as the grey of everything that is beside the point.
BLUE, GREY = "#0072b2", "#767676"


def plot_generation(
    lens: GenerationLensResult,
    prompt: int = 0,
    ax: Axes | None = None,
    value: str = "sampled_prob",
    *,
    layers: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Axes:
    """Draw what each layer predicts at each step of a prompt's continuation.

    Rows are layers, the first at the bottom; columns are steps, and the tokens that were written stand below them. A line runs along
    the layers from which on all agree with what was written; behind each layer's name stands how often it agrees.

    Args:
        lens: what was read.
        prompt: index of the prompt.
        ax: where to draw; without it a new pyplot figure, as large as its content needs.
        value: what cells are shaded by: ``"sampled_prob"``, ``"prob"`` of the guess, ``"sampled_rank"`` or ``"entropy"``.
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all.
        max_columns: with more steps than this the middle ones are left out, and a mark says how many.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: there is no such prompt, layer or value.
        MissingExtraError: matplotlib is not installed.
    """
    return generation_grid(lens, prompt, value, layers=layers, max_columns=max_columns).draw(ax)


def generation_grid(
    lens: GenerationLensResult,
    prompt: int = 0,
    value: str = "sampled_prob",
    *,
    layers: Any = None,
    max_columns: int = MAX_COLUMNS,
) -> Grid:
    """What :func:`plot_generation` draws, as data; see there for the arguments."""
    _check(lens)
    if value not in VALUES:
        raise InputError(f"value={value!r} is unknown.{nearest(value, VALUES)} Use one of: {', '.join(VALUES)}.")
    one = lens[prompt]
    rows = pick_layers(one, layers)
    columns = fold(list(range(one.sampled_ids.shape[1])), max_columns)
    field, scale, unit = VALUES[value]
    numbers = finite(as_array(getattr(one, field)[rows, 0][:, columns])) + (value == "sampled_rank")
    drawn = scale_of(scale, numbers)
    names, title = row_labels([one.addresses[row] for row in rows])
    shares = one.agreement_by_layer()[rows].tolist()
    settled = one.settled()[0, columns].tolist()
    ordered = rows == list(range(len(one.addresses)))
    ended = "" if one.finished[0] == "length" else f" ({one.finished[0]})"
    return Grid(
        values=numbers,
        scale=type(drawn)(unit, drawn.cmap, drawn.norm),
        # A figure space is as wide as a digit.
        rows=[f"{name}  {f'{share:.0%}'.rjust(4, chr(0x2007))}" for name, share in zip(names, shares, strict=True)],
        row_title=f"{title or 'layer'}, and its agreement",
        words=[[[one.words[i]] for i in one.predicted_tokens[row, 0, columns].tolist()] for row in rows],
        below=[[one.words[i]] for i in one.sampled_ids[0, columns].tolist()],
        below_title=f"what was written{ended}" + ("\nline: all layers agree from here on" if ordered else ""),
        left_out={i: gap for i in range(1, len(columns)) if (gap := columns[i] - columns[i - 1] - 1)},
        settled={i: row for i, row in enumerate(settled) if row < len(rows)} if ordered else {},
        title=_title(lens, prompt, one),
    )


@dataclass(frozen=True)
class AgreementCurve:
    """How often each layer's first choice is the token that was written.

    Args:
        share: of all steps, by layer.
        by_prompt: of each prompt's steps, ``[prompt, layer]``.
        layers: the labels of the layers.
        layer_title: what they are.
        title: of the figure.
    """

    share: Any
    by_prompt: Any
    layers: list[str]
    layer_title: str
    title: str

    def size(self) -> Size:
        """How large a figure has to be for all of it to be read."""
        return Size(
            width=min(max(0.3 * len(self.layers), 3.2), 7.0),
            height=2.6,
            left=0.65,
            right=0.2,
            bottom=0.5 + max(map(fonts.width, self.layers)) * 8 / 72,
            top=0.4,
        )

    def draw(self, ax: Axes | None = None, *, bare: bool = False) -> Axes:
        """Draw the curve on ``ax``, or on a new figure; ``bare``: one that pyplot does not know."""
        ax, room = place_axes(ax, self.size(), bare)
        depth = np.arange(len(self.layers))
        if len(self.by_prompt) > 1:
            for line in self.by_prompt:
                ax.plot(depth, line, color=GREY, alpha=0.35, linewidth=0.8, zorder=1)
        ax.plot(depth, self.share, color=BLUE, marker="o", markersize=4, linewidth=2, zorder=3, clip_on=False)
        ax.set(ylim=(0, 1), xlim=(-0.4, len(depth) - 0.6))
        ax.spines[["top", "right"]].set_visible(False)
        every = max(1, -(-len(depth) // 16)) if all(text.isdigit() for text in self.layers) else 1
        upright = any(len(text) > 3 for text in self.layers) and len(depth) > 4
        shown = depth[::every].tolist()
        ax.set_xticks(shown, labels=[self.layers[i] for i in shown], fontsize=8, rotation=90 if upright else 0)
        ax.tick_params(axis="y", labelsize=8)
        ax.set_xlabel(self.layer_title, fontsize=8)
        ax.set_ylabel("share of steps at which it agrees", fontsize=8)
        fonts.draw_title(ax, self.title, room)
        return ax


def plot_agreement(lens: GenerationLensResult, ax: Axes | None = None, *, layers: Any = None) -> Axes:
    """Draw at what share of all steps each layer's first choice is the token that was written; one thin line is one prompt.

    Args:
        lens: what was read.
        ax: where to draw; without it a new pyplot figure.
        layers: which layers, in any form that ``LogitLens`` takes; ``None`` for all.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: a layer was not read.
        MissingExtraError: matplotlib is not installed.
    """
    return agreement_curve(lens, layers=layers).draw(ax)


def agreement_curve(lens: GenerationLensResult, *, layers: Any = None) -> AgreementCurve:
    """What :func:`plot_agreement` draws, as data; see there for the arguments."""
    _check(lens)
    rows = pick_layers(lens, layers)
    names, title = row_labels([lens.addresses[row] for row in rows])
    n, steps = lens.n_prompts, int(lens.steps_mask.sum())
    return AgreementCurve(
        share=as_array(lens.agreement_by_layer()[rows]),
        by_prompt=np.stack([as_array(lens.agreement_by_layer(prompt)[rows]) for prompt in range(n)]),
        layers=names,
        layer_title=title,
        title=", ".join(
            part for part in (called(lens.model), f"{steps} steps of {n} prompt{'s' if n > 1 else ''}") if part
        ),
    )


def generation_figures(
    lens: GenerationLensResult, stem: str, per_prompt: bool
) -> Iterator[tuple[str, Grid | AgreementCurve]]:
    """Every figure of a generation with its file's name: the agreement of all layers, and if asked for a heatmap of each prompt."""
    yield f"{stem}_agreement", agreement_curve(lens)
    digits = len(str(lens.n_prompts - 1))
    for prompt in range(lens.n_prompts if per_prompt else 0):
        yield stem if lens.n_prompts == 1 else f"{stem}_{prompt:0{digits}}", generation_grid(lens, prompt)


def _check(lens: object) -> None:
    if not isinstance(lens, GenerationLensResult):
        raise InputError(
            f"A GenerationLensResult is needed, not {type(lens).__name__}: results[keys.GENERATION_LENS] holds one."
        )


def _title(lens: GenerationLensResult, prompt: int, one: GenerationLensResult) -> str:
    name = "" if one.prompts is None else labels.prose(str(one.prompts[0]), 60)
    which = f"prompt {prompt}" if lens.n_prompts > 1 else ""
    return ", ".join(part for part in (called(lens.model), which, name) if part)
