"""TransformerLens: its own ``logit_lens`` on a bridge, the five best tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from protocol import batches, serve


def load(folder: str) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def make(model: Any, ids: list[list[int]], positions: str) -> Callable[[], Any]:
    from transformer_lens.tools.analysis.logit_lens import logit_lens

    where = None if positions == "all" else -1

    def run() -> list[Any]:
        return [logit_lens(model, torch.tensor(b), positions=where, return_type="probs", top_k=5) for b in batches(ids)]

    return run


serve(load, make, "transformer-lens")
