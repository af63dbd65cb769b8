"""How a result is asked for a prompt or a layer, and what is said when it has none such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from murano.address import Address
from murano.errors import InputError


def as_index(value: Any, what: str) -> int:
    """A whole number of any library.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"A {what} is given by its index, not by {value!r}.")
    return int(value.__index__())


def prompt_index(prompt: Any, n_prompts: int) -> int:
    """The index of a prompt, counted from 0.

    Raises:
        InputError: it is no index, or there is no such prompt.
    """
    index = as_index(prompt, "prompt")
    if not -n_prompts <= index < n_prompts:
        raise InputError(f"Prompt {index} does not exist: there are {n_prompts}, counted from 0.")
    return index % n_prompts


def prompt_indices(chosen: Any, n_prompts: int) -> list[int]:
    """The indices that an index, a slice or several indices mean.

    Raises:
        InputError: one is no index, or there is no such prompt.
    """
    if isinstance(chosen, slice):
        return list(range(*chosen.indices(n_prompts)))
    several = hasattr(chosen, "__iter__") and not isinstance(chosen, str) and getattr(chosen, "ndim", 1) > 0
    return [prompt_index(prompt, n_prompts) for prompt in (chosen if several else [chosen])]


def layer_index(address: Any, addresses: Sequence[Address], model: Mapping[str, Any]) -> int:
    """Where an address, in any form, stands among those that were read.

    Raises:
        InputError: it was not read.
    """
    wanted = Address.parse(address)
    if wanted.layer is not None and wanted.layer < 0 and "n_layers" in model:
        wanted = wanted.resolve(int(model["n_layers"]))
    if wanted not in addresses:
        raise InputError(f"'{wanted}' was not read. Read: {', '.join(map(str, addresses))}.")
    return list(addresses).index(wanted)
