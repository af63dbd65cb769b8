"""What to read: the layers, positions and number of tokens that a user asks for, in any of the forms they are written in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from murano.address import Address, lens_address
from murano.errors import InputError, nearest


def parse_layers(layers: Any, n_layers: int | None = None) -> tuple[Address, ...]:
    """The addresses that ``layers`` names, in the user's order.

    Args:
        layers: ``"all"``, an int, a range, an address, or a list of any of these; ``"embeddings"`` is the row before block 0.
        n_layers: how many layers the model has; without it ``"all"`` gives nothing and negative layers stay as they are.

    Raises:
        InputError: what is no address, is not on the residual stream, is outside the model, or is named twice.
    """
    is_one = isinstance(layers, (str, int, Address)) or (
        isinstance(layers, tuple) and len(layers) == 2 and isinstance(layers[1], str) and layers[1] != "all"
    )
    items: Iterable[Any] = [layers] if is_one else layers
    try:
        items = list(items)
    except TypeError:
        raise InputError(f"layers={layers!r} is neither 'all' nor a layer nor a list of layers.") from None
    found: list[Address] = []
    for item in items:
        if isinstance(item, str) and item == "all":
            found.extend(Address(i) for i in range(n_layers or 0))
            continue
        nested = item if isinstance(item, (range, slice)) else None
        if isinstance(nested, slice):
            nested = range(*nested.indices(n_layers)) if n_layers is not None else range(0)
        for one in nested if nested is not None else [item]:
            address = lens_address(one)
            found.append(address if n_layers is None else address.resolve(n_layers))
    twice = [a for i, a in enumerate(found) if a in found[:i]]
    if twice:
        raise InputError(f"'{twice[0]}' is named twice in layers={layers!r}.")
    if not found and n_layers is not None:
        raise InputError(f"layers={layers!r} names no layer.")
    return tuple(found)


def parse_positions(positions: Any) -> tuple[int, ...] | None:
    """The positions that are read of each prompt; ``None`` for all of them.

    Args:
        positions: ``"all"``, ``"last"``, an int, or a list or range of ints; negative ones count from a prompt's end.

    Raises:
        InputError: anything else, or no position at all.
    """
    if isinstance(positions, str):
        if positions in ("all", "last"):
            return None if positions == "all" else (-1,)
        raise InputError(f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1].")
    if isinstance(positions, bool):
        raise InputError(f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1].")
    try:
        found = (positions.__index__(),) if hasattr(positions, "__index__") else tuple(p.__index__() for p in positions)
    except (TypeError, AttributeError):
        raise InputError(
            f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1]."
        ) from None
    if not found:
        raise InputError("positions is empty: use 'all', 'last', or token indices such as [0, -1].")
    return found


def check_top_k(top_k: Any, vocab_size: int | None = None) -> int:
    """``top_k`` if it can be had.

    Raises:
        InputError: it is no whole number from 1 to the size of the vocabulary.
    """
    if (
        not isinstance(top_k, int)
        or isinstance(top_k, bool)
        or top_k < 1
        or (vocab_size is not None and top_k > vocab_size)
    ):
        upper = f"to {vocab_size}, the size of the vocabulary" if vocab_size is not None else "upwards"
        raise InputError(f"top_k={top_k!r}: it must be a whole number from 1 {upper}.")
    return top_k


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
