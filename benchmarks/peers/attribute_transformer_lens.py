"""TransformerLens: its own direct logit attribution, ``logit_attrs`` of ``decompose_resid`` and ``stack_head_results``, as JSON.

Reads from standard input a folder, ids of one prompt, a target and a foil. Value biases stay where they are, so that heads are what they
are in the checkpoint; the final norm is folded, and the unembedding centred, which leaves a difference of two logits as it is.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch


@torch.no_grad()
def attribute(folder: str, ids: list[int], target: int, foil: int) -> dict[str, Any]:
    """Contributions to the difference, by TransformerLens's own names."""
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    model.enable_compatibility_mode(fold_value_biases=False)
    logits, cache = model.run_with_cache(torch.tensor([ids]))
    parts, names = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
    heads, head_names = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    shares = {}
    for stack, labels in ((parts, names), (heads, head_names)):
        values = cache.logit_attrs(stack, tokens=target, incorrect_tokens=foil, pos_slice=-1).flatten().tolist()
        shares |= dict(zip(labels, values, strict=True))
    return {"difference": float(logits[0, -1, target] - logits[0, -1, foil]), "shares": shares}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        answer = attribute(**json.load(sys.stdin))
    print(json.dumps(answer))
