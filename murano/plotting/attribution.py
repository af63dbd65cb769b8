"""The final logit as a waterfall: what each component added to it, from the embedding upwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from murano.artifacts.logit_attribution import LogitAttributionResult, summed, what
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.lookup import prompt_index
from murano.errors import InputError
from murano.plotting import fonts
from murano.plotting.backend import Axes, Patch, Size, np, place_axes
from murano.plotting.grid import FAINT
from murano.plotting.selection import called, finite
from murano.plotting.trajectories import COLOURS
from murano.plotting.values import as_array

#: Colour and name of each kind of component.
KINDS = {
    "embeddings": (FAINT, "embeddings, bias"),
    "attn_out": (COLOURS[0], "attention"),
    "mlp_out": (COLOURS[1], "MLP"),
    "layer_out": (COLOURS[2], "layer"),
    "bias": (FAINT, "embeddings, bias"),
}


@dataclass(frozen=True)
class Waterfall:
    """What a waterfall shows.

    Args:
        values: what each component adds, from the bottom upwards.
        kinds: which kind of component each is.
        layers: its layer; ``None`` for one of the whole model.
        total: what they add up to: the model's own number.
        curve: what a lens reads after each layer, where one was given.
        x_title: what is added up.
        title: of the figure.
    """

    values: Any
    kinds: Sequence[str]
    layers: Sequence[int | None]
    total: float
    curve: Any
    x_title: str
    title: str

    def size(self) -> Size:
        """How large a figure has to be for all of it to be read."""
        return Size(
            width=4.6,
            height=max(0.13 * len(self.values), 1.6),
            left=0.95,
            right=1.75,
            bottom=0.55 + 0.15 * self.x_title.count("\n"),
            top=0.4 if self.title else 0.15,
        )

    def draw(self, ax: Axes | None = None, *, bare: bool = False) -> Axes:
        """Draw it on ``ax``, or on a new figure; ``bare``: one that pyplot does not know."""
        ax, room = place_axes(ax, self.size(), bare)
        ends = np.cumsum(self.values)
        rows = np.arange(len(self.values))
        colours = [KINDS[kind][0] for kind in self.kinds]
        ax.barh(rows, self.values, left=ends - self.values, height=0.82, color=colours, linewidth=0, zorder=2)
        ax.vlines(ends[:-1], rows[:-1] - 0.41, rows[1:] + 0.41, color=FAINT, linewidth=0.5, zorder=1)
        ax.axvline(0, color=FAINT, linewidth=0.7, zorder=0.5)
        model = ax.axvline(self.total, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.6)
        handles: list[Any] = [Patch(facecolor=c) for c in dict.fromkeys(colours)]
        names = list(dict.fromkeys(KINDS[kind][1] for kind in self.kinds))
        handles.append(model)
        names.append(f"the model: {self.total:+.2f}")
        if self.curve is not None:
            tops = [max(i for i, at in enumerate(self.layers) if at == layer) + 0.5 for layer in self._shown_layers()]
            handles += ax.plot(self.curve, tops, color=COLOURS[3], marker="o", markersize=2.5, linewidth=1, zorder=3)
            names.append("logit lens")
        self._label_rows(ax)
        ax.set(ylim=(-0.6, len(self.values) - 0.4))
        across = np.concatenate([[0.0, self.total], ends, self.curve if self.curve is not None else []])
        spare = 0.04 * max(float(np.nanmax(across) - np.nanmin(across)), 1e-3)
        ax.set_xlim(float(np.nanmin(across)) - spare, float(np.nanmax(across)) + spare)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(axis="x", labelsize=8)
        x_title = fonts.drawable(self.x_title)
        ax.set_xlabel(x_title, fontsize=8, parse_math=False, usetex=False, family=fonts.families([x_title]))
        ax.legend(
            handles, names, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False, borderaxespad=0
        )
        fonts.draw_title(ax, self.title, room)
        return ax

    def _shown_layers(self) -> list[int]:
        return sorted({layer for layer in self.layers if layer is not None})

    def _label_rows(self, ax: Axes) -> None:
        """A label in the middle of each layer's rows; with many layers, of some."""
        shown = self._shown_layers()
        every = max(1, -(-len(shown) // 40))
        labels = {i: kind for i, (kind, at) in enumerate(zip(self.kinds, self.layers, strict=True)) if at is None}
        places: list[float] = [float(i) for i in labels]
        texts = list(labels.values())
        for layer in shown[::every]:
            rows = [i for i, at in enumerate(self.layers) if at == layer]
            places.append(sum(rows) / len(rows))
            texts.append(str(layer))
        ax.set_yticks(places, labels=texts, fontsize=7)
        ax.set_ylabel("layer", fontsize=8)
        ax.tick_params(axis="y", length=0)


def plot_attribution(
    result: LogitAttributionResult,
    prompt: int | None = 0,
    ax: Axes | None = None,
    *,
    of: str | None = None,
    position: int | None = None,
    lens: LogitLensResult | None = None,
) -> Axes:
    """Draw how the final logit adds up, from the embedding at the bottom to the model's own number at the top.

    Each bar begins where the one below it ended. The last one ends at the model's own logit, a dashed line; where a family caps its
    logits, at the one before the cap. Heads are added up to their attention: :func:`plot_attribution_grid` shows them apart.

    Args:
        result: what was attributed.
        prompt: index of the prompt; ``None`` for the mean over all.
        ax: where to draw; without it a new pyplot figure, as large as its content needs.
        of: ``"target"``, ``"foil"`` or ``"difference"``; ``None``: the difference where every prompt has a foil.
        position: index of the token in its prompt, -1 is the last one; ``None``: the last one that was read.
        lens: a lens of the same prompts with its targets: what it reads after each layer is drawn as a curve. It differs from the sum so
            far, for it norms each layer's stream by that stream's own scale.

    Returns:
        The axes, to go on with.

    Raises:
        InputError: there is no such prompt, position or foil, or the lens is of other prompts.
        MissingExtraError: matplotlib is not installed.
    """
    return waterfall(result, prompt, of=of, position=position, lens=lens).draw(ax)


def waterfall(
    result: LogitAttributionResult,
    prompt: int | None = 0,
    *,
    of: str | None = None,
    position: int | None = None,
    lens: LogitLensResult | None = None,
) -> Waterfall:
    """What :func:`plot_attribution` draws, as data; see there for the arguments."""
    check_attributed(result, prompt)
    of = result.default_of if of is None else of
    total, n = result.one(result.total(of, position).unsqueeze(-1), prompt, of, position)
    names, added = summed(result)
    values, _ = result.one(result._pick(added, of, position), prompt, of, position)
    curve = (
        None if lens is None else result.one(_lens_curve(result, lens, of, position, prompt), prompt, of, position)[0]
    )
    return Waterfall(
        values=finite(as_array(values)),
        kinds=[address.component for address in names],
        layers=[address.layer for address in names],
        total=float(total),
        curve=None if curve is None else as_array(curve),
        x_title=read_as(result, prompt, of),
        title=title_of(result, prompt, n, position),
    )


def check_attributed(result: object, prompt: int | None) -> None:
    """Refuse what is no attribution, or a prompt that is not in it.

    Raises:
        InputError: saying what is needed.
    """
    if not isinstance(result, LogitAttributionResult):
        raise InputError(
            f"A LogitAttributionResult is needed, not {type(result).__name__}: results[keys.LOGIT_ATTRIBUTION] holds one."
        )
    if prompt is not None:
        prompt_index(prompt, result.n_prompts)


def read_as(result: LogitAttributionResult, prompt: int | None, of: str) -> str:
    """What is attributed, with the answers' own words where it is one prompt's."""
    text = what(of)
    if prompt is not None:
        target, foil = (
            fonts.label(result.words[int(result.answer_ids[prompt, i])], 16) if i < result.answer_ids.shape[1] else ""
            for i in (0, result.n_targets)
        )
        text = {"target": f"logit of {target}", "foil": f"logit of {foil}"}.get(
            of, f"logit of {target} less that of {foil}"
        )
    return text + ("\nbefore the soft-cap, which is not part of the sum" if result.cap else "")


def title_of(result: LogitAttributionResult, prompt: int | None, n: int, position: int | None) -> str:
    """The model, which of several prompts, and which token where it is not the last.

    Args:
        result: what was attributed.
        prompt: the one shown; ``None`` for a mean.
        n: of how many prompts a mean is.
        position: the token.
    """
    which = "" if result.n_prompts == 1 else f"mean of {n} prompts" if prompt is None else f"prompt {prompt}"
    where = "" if prompt is None and result.n_prompts > 1 else result.where(prompt or 0, position)
    return ", ".join(part for part in (called(result.model), which, where) if part)


def _lens_curve(
    result: LogitAttributionResult, lens: LogitLensResult, of: str, position: int | None, prompt: int | None
) -> Float[Tensor, "prompt layer"]:
    """What a lens reads after each layer; NaN for a prompt that is not shown.

    Raises:
        InputError: it is of other prompts or positions, or did not read what is needed.
    """
    ids = result.answer_ids
    mine = (ids[:, 0], ids[:, result.n_targets]) if ids.shape[1] > result.n_targets else (ids[:, 0],)
    theirs = [None if of_lens is None else of_lens[:, 0] for of_lens in (lens.target_ids, lens.foil_ids)]
    needed = {"target": (0,), "foil": (1,)}.get(of, (0, 1))
    for index in needed:
        found = theirs[index]
        if found is None or found.shape != mine[index].shape or not bool((found == mine[index]).all()):
            raise InputError("The lens is of other prompts, or did not read the same targets and foils.")
    if lens.target_mode != "first":
        raise InputError(
            f"The lens reads whole answers (target_mode={lens.target_mode!r}), and their first token is attributed. "
            "Read again with target_mode='first'."
        )
    layers = sorted({a.layer for a in result.components if a.layer is not None})
    rows = [lens.layer_index(layer) for layer in layers]
    curve = torch.full((result.n_prompts, len(rows)), torch.nan)
    for number, column in enumerate(result.columns(position).tolist()):
        if column < 0 or (prompt is not None and number != prompt_index(prompt, result.n_prompts)):
            continue
        at = lens.column(number, int(result.position_index[number, column]))
        if int(lens.input_ids[number, at]) != int(result.input_ids[number, column]):
            raise InputError(f"The lens is of other prompts: prompt {number} differs.")
        logits = []
        for index in needed:
            log_probs = lens.target_log_probs if index == 0 else lens.foil_log_probs
            assert log_probs is not None
            logits.append(log_probs[rows, number, at, 0] + lens.log_normalizer[rows, number, at])
        curve[number] = logits[0] - logits[1] if of == "difference" else logits[0]
    return curve
