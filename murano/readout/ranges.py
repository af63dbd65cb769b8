"""Layers or positions in one string, as they are typed: ``"embeddings,all"``, ``"0-5"``, ``"0:12:2"``."""

from __future__ import annotations

import re

from murano.errors import InputError


def split_ranges(text: str, what: str = "layers") -> list[str | int | range | slice]:
    """The parts of ``text``, which commas separate, each as what it means.

    Args:
        text: ``all``, ``last``, numbers, addresses, ranges such as ``0-5`` (5 included) and slices such as ``0:12:2``.
        what: what they are, for the error.

    Returns:
        Ints, ranges, slices, and as strings whatever is none of these.

    Raises:
        InputError: a range or a slice that has nothing in it.

    >>> split_ranges("embeddings, 0-2, 4:8:2, 10:, -1")
    ['embeddings', range(0, 3), range(4, 8, 2), slice(10, None, None), -1]
    """
    return [_meaning(part.strip(), what) for part in text.split(",")]


def _meaning(part: str, what: str) -> str | int | range | slice:
    if part == "last":
        return -1
    if re.fullmatch(r"-?\d+", part):
        return int(part)
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        first, last = map(int, match.groups())
        if first > last:
            raise InputError(f"{what}={part!r} is empty: write the smaller number first, '{last}-{first}'.")
        return range(first, last + 1)
    if re.fullmatch(r"(-?\d+)?:(-?\d+)?(:(-?\d+)?)?", part):
        return _slice(part, what)
    return part


def _slice(part: str, what: str) -> range | slice:
    start, stop, step = ([int(number) if number else None for number in part.split(":")] + [None])[:3]
    if step == 0:
        raise InputError(f"{what}={part!r}: the step of a slice can't be 0.")
    if stop is None or stop < 0 or (start or 0) < 0 or (step or 1) < 0:
        return slice(start, stop, step)
    # Both ends are named. A range is not cut off at the end: what is not there will be refused.
    found = range(start or 0, stop, step or 1)
    if not found:
        raise InputError(f"{what}={part!r} is empty.")
    return found
