"""Layers and positions as they are typed, and as ``LogitLens`` takes them."""

from __future__ import annotations

import re
from typing import Any

from murano.address import lens_address
from murano.errors import InputError


def parse_layers(text: str) -> list[Any]:
    """What ``--layers`` says.

    Args:
        text: parts separated by commas: ``all``, an address in any form, ``0-5``, or a slice ``0:12:2``.

    Raises:
        InputError: a part is none of these, or is not on the residual stream.

    >>> parse_layers("embeddings, 0-2, 4:8:2, 10:, -1")
    ['embeddings', range(0, 3), range(4, 8, 2), slice(10, None, None), -1]
    """
    return [_layers(part.strip()) for part in text.split(",")]


def _layers(part: str) -> Any:
    if part == "all":
        return part
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        first, last = map(int, match.groups())
        if first > last:
            raise InputError(f"--layers {part!r} is empty: write the smaller layer first, {last}-{first}.")
        return range(first, last + 1)
    if re.fullmatch(r"(-?\d+)?:(-?\d+)?(:(-?\d+)?)?", part):
        return _slice(part)
    lens_address(part)
    return int(part) if re.fullmatch(r"-?\d+", part) else part


def _slice(part: str) -> range | slice:
    start, stop, step = ([int(number) if number else None for number in part.split(":")] + [None])[:3]
    if step == 0:
        raise InputError(f"--layers {part!r}: the step of a slice can't be 0.")
    if stop is None or stop < 0 or (start or 0) < 0 or (step or 1) < 0:
        return slice(start, stop, step)
    # Both ends are named. A range is not cut off at the model's end: a layer that is not there will be refused.
    found = range(start or 0, stop, step or 1)
    if not found:
        raise InputError(f"--layers {part!r} is empty.")
    return found


def parse_positions(text: str) -> str | list[int]:
    """What ``--positions`` says.

    Raises:
        InputError: it is neither ``all`` nor ``last`` nor a list of indices.

    >>> parse_positions("0, -1")
    [0, -1]
    """
    if text in ("all", "last"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--positions {text!r} is unknown. Use all, last, or token indices such as 0,-1.") from None
