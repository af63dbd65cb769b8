"""Ropes whose factors depend on how long the text is: a longrope turns from its short factors to its long ones.

They turn for all positions at once, so that a token's key is another one in a longer text: it can't come from a cache, nor from a batch
in which another prompt is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from murano.model.anatomy import text_config


def turning_lengths(config: Any) -> tuple[int, ...]:
    """The numbers of tokens beyond which a model's ropes use other factors, within its context.

    A "dynamic" rope is not among them: its factors change beyond ``max_position_embeddings``, which no prompt exceeds.
    """
    config = text_config(config)
    lengths = {
        rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
        for rope in _ropes(getattr(config, "rope_parameters", None))
        if rope.get("rope_type") == "longrope"
    }
    return tuple(sorted(length for length in lengths if isinstance(length, int)))


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each rope; some families have one for each kind of layer."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        else:
            for value in parameters.values():
                yield from _ropes(value)
