"""The document of a two-point lens, and ways to change it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

SEED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "seed_002.json").read_text(encoding="utf-8"))

#: Takes the place of what is to be removed.
REMOVED = object()


def changed(*changes: tuple[str, Any], base: dict[str, Any] = SEED) -> dict[str, Any]:
    """A copy of a document with values put at paths: ``("sites.resid.layers.sweep.0", [3])``."""
    document = copy.deepcopy(base)
    for path, given in changes:
        value = given if given is REMOVED else copy.deepcopy(given)
        *inner, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        at: Any = document
        for part in inner:
            at = at[part]
        if value is REMOVED:
            del at[last]
        elif isinstance(at, list) and last == len(at):
            at.append(value)
        else:
            at[last] = value
    return document
