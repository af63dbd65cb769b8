"""A lens as text for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from murano import __version__
from murano.artifacts.logit_lens import LogitLensResult
from murano.prompts import PromptBatch


def as_tables(lens: LogitLensResult, prompts: PromptBatch, only_last: bool) -> str:
    """A table per prompt and position.

    Args:
        lens: what was read.
        prompts: the prompts of it.
        only_last: show each prompt's last position alone, whatever else was read.
    """
    parts = []
    for prompt, text in enumerate(prompts.texts):
        parts.append(f"prompt: {text!r}")
        for cell in _cells(lens, prompt, only_last):
            if not only_last:
                parts.append(f"position {int(lens.position_index[prompt, cell])}: {lens.input_words[prompt][cell]!r}")
            parts.append(lens.table(prompt, int(lens.position_index[prompt, cell])))
    return "\n\n".join(parts)


def as_json(lens: LogitLensResult, prompts: PromptBatch, only_last: bool) -> str:
    """The predictions of every layer as strict JSON: a number that is not finite is ``null``.

    Args:
        lens: what was read.
        prompts: the prompts of it.
        only_last: show each prompt's last position alone, whatever else was read.
    """
    shown = {
        "murano": __version__,
        "model": dict(lens.model),
        "notes": list(lens.notes),
        "prompts": [
            {"prompt": text, "positions": [_position(lens, prompt, c) for c in _cells(lens, prompt, only_last)]}
            for prompt, text in enumerate(prompts.texts)
        ],
    }
    return json.dumps(shown, indent=1, allow_nan=False)


def _cells(lens: LogitLensResult, prompt: int, only_last: bool) -> list[int]:
    """The columns of a prompt that are shown."""
    return [-1] if only_last else [i for i, there in enumerate(lens.attention_mask[prompt].tolist()) if there]


def _position(lens: LogitLensResult, prompt: int, cell: int) -> dict[str, Any]:
    token_id = int(lens.input_ids[prompt, cell])
    return {
        "position": int(lens.position_index[prompt, cell]),
        "id": token_id,
        "token": lens.words[token_id],
        "layers": [_layer(lens, index, prompt, cell) for index in range(len(lens.addresses))],
    }


def _layer(lens: LogitLensResult, index: int, prompt: int, cell: int) -> dict[str, Any]:
    ids, probs = lens.top_ids[index, prompt, cell].tolist(), lens.top_probs[index, prompt, cell].tolist()
    answers = {}
    for kind in ("target", "foil"):
        log_probs, ranks = getattr(lens, f"{kind}_log_probs"), getattr(lens, f"{kind}_ranks")
        if log_probs is not None:
            of = zip(
                getattr(lens, f"{kind}_texts")[prompt],
                log_probs[index, prompt, cell].exp(),
                ranks[index, prompt, cell],
                strict=False,
            )
            answers[f"{kind}s"] = [{"token": t, "prob": _number(float(p)), "rank": int(r)} for t, p, r in of]
    return {
        "address": str(lens.addresses[index]),
        "predictions": [{"id": i, "token": lens.words[i], "prob": _number(p)} for i, p in zip(ids, probs, strict=True)],
        "entropy": _number(float(lens.entropy[index, prompt, cell])),
        **answers,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
