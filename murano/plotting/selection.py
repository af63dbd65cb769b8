"""Which rows and columns of a lens a figure shows, and what can be said about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from murano.address import Address
from murano.artifacts.generation_lens import GenerationLensResult
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.lookup import as_index, prompt_index
from murano.artifacts.model_name import model_name
from murano.errors import InputError
from murano.plotting import labels
from murano.readout.request import parse_layers

#: So wide is a model's name in a title.
NAME_WIDTH = 40


def check_lens(lens: object) -> LogitLensResult:
    """A lens, or an error that says what to give instead.

    Raises:
        InputError: it is no lens, or an empty one.
    """
    if not isinstance(lens, LogitLensResult):
        raise InputError(f"A LogitLensResult is needed, not {type(lens).__name__}: results[keys.LOGIT_LENS] holds one.")
    if not lens.addresses or not lens.top_ids.numel():
        raise InputError(f"There is nothing to draw in {lens!r}.")
    return lens


def check_prompt(lens: LogitLensResult, prompt: object) -> int:
    """The index of a prompt, counted from 0.

    Raises:
        InputError: it is no index, or there is no such prompt.
    """
    return prompt_index(prompt, lens.n_prompts)


def pick_prompts(lens: LogitLensResult, prompts: Any = None) -> list[int]:
    """The indices of the prompts to show, in the order asked for.

    Args:
        lens: what was read.
        prompts: an index or several; ``None`` for all.

    Raises:
        InputError: one does not exist, or there are none.
    """
    if prompts is None:
        return list(range(lens.n_prompts))
    chosen = list(dict.fromkeys(check_prompt(lens, prompt) for prompt in _several(prompts)))
    if not chosen:
        raise InputError(
            f"prompts is empty: name some of the {lens.n_prompts}, counted from 0, or leave it out for all."
        )
    return chosen


def read_prompts(lens: LogitLensResult) -> list[int]:
    """The indices of the prompts of which something was read: one that was too long, say, is left out.

    Raises:
        InputError: there are none.
    """
    there = [prompt for prompt, mask in enumerate(lens.attention_mask) if bool(mask.any())]
    if not there:
        raise InputError(f"There is nothing to draw: {lens.why_left_out(0)}")
    return there


def ordered_layers(lens: LogitLensResult | GenerationLensResult) -> list[int]:
    """All layers, as the data flows."""
    return sorted(range(len(lens.addresses)), key=lambda layer: lens.addresses[layer])


def pick_layers(lens: LogitLensResult | GenerationLensResult, layers: Any = None) -> list[int]:
    """The indices of the layers to show, as the data flows.

    Args:
        lens: what was read.
        layers: as ``LogitLens`` takes them: an address or several, ``"20-29"``, a slice; ``None`` or ``"all"`` for all that were read.

    Raises:
        InputError: one was not read, or there are none.
    """
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return ordered_layers(lens)
    deepest = max((address.layer for address in lens.addresses if address.layer is not None), default=-1)
    wanted = parse_layers(layers, int(lens.model.get("n_layers", deepest + 1)))
    chosen = {lens.layer_index(layer) for layer in wanted}
    return [layer for layer in ordered_layers(lens) if layer in chosen]


def pick_positions(lens: LogitLensResult, prompt: int, positions: Any = None) -> list[int]:
    """The positions of a prompt to show, in reading order; those that hold no token of it are left out.

    Args:
        lens: what was read.
        prompt: index of the prompt.
        positions: indices of tokens in the prompt as in ``lens.at`` (-1 is its last token), one or several, or a slice of what was
            read; ``"last"``; ``None`` or ``"all"`` for all.

    Raises:
        InputError: one does not exist, or there are none.
    """
    mask = lens.attention_mask[prompt].tolist()
    if isinstance(positions, str) and positions in ("all", "last"):  # as LogitLens takes them
        positions = -1 if positions == "last" else None
    if positions is None or isinstance(positions, slice):
        there = [column for column, is_there in enumerate(mask) if is_there]
        chosen = set(there[positions or slice(None)])
    else:
        chosen = set()
        for given in _several(positions):
            chosen.add(lens.column(prompt, as_index(given, "position")))
    if not chosen:
        raise InputError(
            f"There are no positions to draw: prompt {prompt} has {sum(mask)}, and positions={positions!r}."
        )
    return sorted(chosen)


def fold(columns: list[int], limit: int) -> list[int]:
    """The columns that are kept when there are more than fit: a quarter of the first ones and, for the rest, the last.

    Raises:
        InputError: the limit is no number of columns.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"max_columns is a number of columns from 1 on, not {limit!r}.")
    if len(columns) <= limit:
        return columns
    first = limit // 4
    return columns[:first] + columns[len(columns) - (limit - first) :]


def called(model: Mapping[str, Any]) -> str:
    """A model's name as titles have it; empty where the artifact has none."""
    return labels.prose(model_name(str(model.get("model_id") or "")), NAME_WIDTH, both_ends=True)


def final_layer(lens: LogitLensResult) -> int | None:
    """The layer whose prediction is the model's own; ``None`` when it was not read."""
    last = ordered_layers(lens)[-1]
    address, n_layers = lens.addresses[last], lens.model.get("n_layers")
    if address == Address(None, "ln_final") or n_layers is None:  # without a record of depth, the last one read counts
        return last
    return last if address == Address(int(n_layers) - 1) else None


def settled_row(lens: LogitLensResult, prompt: int, position: int, shown: list[int]) -> int | None:
    """The first of the rows shown from which on the model's own top token stays first, at every layer that was read.

    Args:
        lens: what was read.
        prompt: index of the prompt.
        position: index on the position axis.
        shown: the layers that are rows, as the data flows.
    """
    final = final_layer(lens)
    if final is None:
        return None
    order = ordered_layers(lens)
    ids = lens.predicted_tokens[order, prompt, position].tolist()
    if ids[-1] < 0:
        return None
    first = len(ids) - 1
    while first > 0 and ids[first - 1] == ids[-1]:
        first -= 1
    settled = set(order[first:])
    return next((row for row, layer in enumerate(shown) if layer in settled), None)


def row_labels(addresses: Sequence[Address]) -> tuple[list[str], str]:
    """A label for each row, and one for their axis; numbers are enough where one component was read."""
    components = {address.component for address in addresses if address.layer is not None}
    if len(components) > 1:
        return [str(address) for address in addresses], ""
    component = components.pop() if components else "resid_post"
    texts = [address.component if address.layer is None else str(address.layer) for address in addresses]
    return texts, "layer" if component == "resid_post" else f"layer ({component})"


def finite(array: Any) -> Any:
    """A copy with NaN where a number is not finite."""
    return np.where(np.isfinite(array), array, np.nan)


def _several(given: Any) -> list[Any]:
    """What was given as a list, whether it is one thing or several: a list, a range, a set, an array, a tensor."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
