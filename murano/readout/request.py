"""What to read: the layers, positions and number of tokens that a user asks for, in any of the forms they are written in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from murano.address import Address, is_one, lens_address
from murano.errors import InputError, nearest
from murano.readout.ranges import split_ranges

#: What layers may be besides addresses.
FURTHER_FORMS = (
    "Layers may also be 'all', 'last', '0-5' (5 included), '0:12:2' (a slice), or several: 'embeddings,all', [0, 'L5']."
)


def parse_layers(layers: Any, n_layers: int | None = None) -> tuple[Address, ...]:
    """The addresses that ``layers`` names, in the user's order.

    Args:
        layers: ``"all"``, ``"last"``, an int, a range, a slice, an address, a list of any of these, or a string of several as it is typed,
            ``"embeddings,0-5"``; ``"embeddings"`` is the row before block 0.
        n_layers: how many layers the model has; without it ``"all"`` gives nothing and negative layers stay as they are.

    Raises:
        InputError: what is no address, is not on the residual stream, is outside the model, or is named twice.
    """
    items: Iterable[Any] = [layers] if is_one(layers) or isinstance(layers, slice) else layers
    try:
        items = list(items)
    except TypeError:
        raise InputError(
            f"layers={layers!r} is neither 'all' nor a layer nor a list of layers. {FURTHER_FORMS}"
        ) from None
    parts = [part for item in items for part in (split_ranges(item) if isinstance(item, str) else [item])]
    found = [address for part in parts for address in _addresses(part, n_layers)]
    twice = [a for i, a in enumerate(found) if a in found[:i]]
    if twice:
        raise InputError(f"'{twice[0]}' is named twice in layers={layers!r}.")
    if not found and n_layers is not None:
        raise InputError(f"layers={layers!r} names no layer.")
    return tuple(found)


def _addresses(part: Any, n_layers: int | None) -> list[Address]:
    """The addresses of one part: of a layer, a range, a slice or ``"all"``."""
    if isinstance(part, str) and part == "all":
        part = slice(None)
    if isinstance(part, slice):
        try:
            part = range(*part.indices(n_layers or 0))
        except (TypeError, ValueError) as error:
            raise InputError(f"layers={part!r} is no slice of layers: {error}.") from None
    found = []
    for layer in part if isinstance(part, range) else [part]:
        try:
            address = Address.parse(layer)
        except InputError as error:
            raise InputError(f"{error} {FURTHER_FORMS}") from None
        lens_address(address)
        found.append(address if n_layers is None else address.resolve(n_layers))
    return found


def parse_positions(positions: Any) -> tuple[int, ...] | None:
    """The positions that are read of each prompt; ``None`` for all of them.

    Args:
        positions: ``"all"``, ``"last"``, an int, a list, range or slice of ints, or these as they are typed, ``"0,-1"``, ``"0-2"``
            (2 included), ``"-3:"``; negative ones count from a prompt's end.

    Raises:
        InputError: anything else, no position at all, one named twice, or a slice that is of another length in each prompt.
    """
    unknown = InputError(
        f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1], '0-2' or '-3:'."
    )
    if isinstance(positions, str) and positions == "all":
        return None
    if hasattr(positions, "tolist"):  # an array or a tensor
        positions = positions.tolist()
    if isinstance(positions, bool):
        raise unknown
    if isinstance(positions, str):
        parts: Iterable[Any] = split_ranges(positions, "positions")
    else:
        parts = [positions] if isinstance(positions, slice) or hasattr(positions, "__index__") else positions
    found: list[int] = []
    try:
        for part in parts:
            found += (
                _in_slice(part, positions)
                if isinstance(part, slice)
                else part
                if isinstance(part, range)
                else [part.__index__()]
            )
    except (TypeError, AttributeError):
        raise unknown from None
    if not found:
        raise InputError("positions is empty: use 'all', 'last', or token indices such as [0, -1].")
    twice = [p for i, p in enumerate(found) if p in found[:i]]
    if twice:
        raise InputError(f"Position {twice[0]} is named twice in positions={positions!r}.")
    return tuple(found)


def _in_slice(part: slice, positions: Any) -> range:
    """The positions of a slice that has as many in every prompt: both ends are counted from the same end of it."""
    start, stop, step = part.start, part.stop, 1 if part.step is None else part.step.__index__()
    if start is None and stop is not None and stop.__index__() >= 0:
        start = 0
    from_end = start is not None and start.__index__() < 0
    if stop is None and from_end:
        stop = 0
    elif start is None or stop is None or step < 1 or (stop.__index__() < 0) != from_end:
        raise InputError(
            f"positions={positions!r}: {part} takes another number of positions in each prompt. Use 'all', or a slice with both ends "
            "counted from one end of the prompt, such as slice(0, 3) or slice(-3, None)."
        )
    return range(start.__index__(), stop.__index__(), step)


def check_model(model: Any, what: str) -> None:
    """Refuse what is no :class:`~murano.MuranoModel`: a name, a transformers model, the class itself.

    Args:
        model: what was given.
        what: the step or function that it was given to.

    Raises:
        InputError: saying how to make one.
    """
    if isinstance(model, type) or not hasattr(model, "check_layers"):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"{what} needs a MuranoModel, not {given}: {what}(MuranoModel(…), …).")


def check_top_k(top_k: Any, vocab_size: int | None = None) -> int:
    """``top_k`` if it can be had.

    Raises:
        InputError: it is no whole number from 1 to the size of the vocabulary.
    """
    whole = _whole(top_k)
    if whole is None or whole < 1 or (vocab_size is not None and whole > vocab_size):
        upper = f"to {vocab_size}, the size of the vocabulary" if vocab_size is not None else "upwards"
        raise InputError(f"top_k={top_k!r}: it must be a whole number from 1 {upper}.")
    return whole


def _whole(given: Any) -> int | None:
    """An int of Python, numpy or torch as Python's; ``None`` for anything else."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        return None
    try:
        return int(given.__index__())
    except TypeError:  # an array of several
        return None


def check_choice(name: str, given: Any, allowed: Sequence[Any]) -> None:
    """Refuse what is none of the choices.

    Raises:
        InputError: naming them, and the nearest.
    """
    if not any(given is choice or (isinstance(given, str) and given == choice) for choice in allowed):
        hint = nearest(given, [choice for choice in allowed if choice]) if isinstance(given, str) else ""
        choices = " or ".join(f"{name}={choice!r}" for choice in allowed if choice)
        raise InputError(f"{name}={given!r} is unknown.{hint} Use {choices}.")


def check_whole(name: str, given: Any) -> int:
    """A whole number from 1 on; ``2.0**25`` is one too.

    Raises:
        InputError: it is none.
    """
    whole = int(given) if isinstance(given, float) and given.is_integer() else _whole(given)
    if whole is None or whole < 1:
        raise InputError(f"{name}={given!r}: it must be a whole number from 1 upwards.")
    return whole


def check_options(
    *,
    keep: Any = None,
    on_error: Any = "raise",
    product: Any = "auto",
    apart: Any = False,
    max_chunk_bytes: Any = 1,
    max_batch_tokens: Any = 1,
) -> None:
    """Refuse options of a lens that can't be right, whatever the model.

    Raises:
        InputError: naming the option and what it may be.
    """
    check_choice("keep", keep, (None, "residuals", "logits"))
    check_choice("on_error", on_error, ("raise", "skip"))
    check_choice("product", product, PRODUCTS)
    if not isinstance(apart, bool):
        raise InputError(f"apart={apart!r} must be True or False.")
    check_whole("max_chunk_bytes", max_chunk_bytes)
    check_whole("max_batch_tokens", max_batch_tokens)


#: What ``product=`` may be.
PRODUCTS = ("auto", "torch", "tiles", "onednn", "numpy")
#: How finely a logit can be split.
BY = ("layer", "component", "head", "neuron_topk")


def check_attribution(by: Any, positions: Any, neurons: Any) -> tuple[int, ...] | None:
    """Refuse an attribution that can't be asked of any model.

    Returns:
        The positions; ``None`` for all.

    Raises:
        InputError: saying what can be asked.
    """
    if by not in BY:
        raise InputError(f"by={by!r} is unknown.{nearest(by, BY)} Use {', '.join(map(repr, BY))}.")
    if isinstance(neurons, bool) or not isinstance(neurons, int) or neurons < 1:
        raise InputError(f"neurons={neurons!r} must be a number of neurons from 1 on.")
    return parse_positions(positions)
