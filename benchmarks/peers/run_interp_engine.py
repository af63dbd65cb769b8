"""interp-engine, eager: residuals of one forward, decoded layer by layer, the five best tokens by its ``lens_topk``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from protocol import batches, serve


def load(folder: str) -> Any:
    from interp_engine import load_model

    return load_model(folder, backend="eager", device="cpu", dtype="float32")


def make(model: Any, ids: list[list[int]], positions: str) -> Callable[[], Any]:
    from interp_engine import Address, capture
    from interp_engine.lens import decode_residuals
    from interp_engine.lens_topk import lens_topk

    points = [Address("resid_post", layer) for layer in range(model.n_layers)]

    def run() -> list[Any]:
        found = []
        for batch in batches(ids):
            cache = capture(model, torch.tensor(batch), points)
            for point in points:
                rows = cache[point] if positions == "all" else cache[point][:, -1]
                logits = decode_residuals(model, rows.reshape(-1, rows.shape[-1]))
                found.append(lens_topk(logits, top_n=5))
        return found

    return run


serve(load, make, "interp-engine")
