"""Small results that look like real ones, for the tests of saved runs: every value says which version it belongs to."""

from __future__ import annotations

from typing import Any

import torch

from murano import keys
from murano.address import Address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.words import TokenWords
from murano.prompts import as_prompts
from murano.results import Results, StepRecord


def small_lens(version: int = 0, layers: int = 2, prompts: int = 2, positions: int = 4, k: int = 3) -> LogitLensResult:
    """A logit lens whose numbers are all ``version``."""
    shape = (layers, prompts, positions)
    return LogitLensResult(
        addresses=tuple(Address(layer) for layer in range(layers)),
        top_ids=torch.full((*shape, k), version),
        top_probs=torch.full((*shape, k), float(version)),
        entropy=torch.full(shape, float(version)),
        log_normalizer=torch.full(shape, float(version)),
        input_ids=torch.full((prompts, positions), version),
        attention_mask=torch.ones((prompts, positions), dtype=torch.bool),
        position_index=torch.arange(positions).repeat(prompts, 1),
        words=TokenWords({version: f" word {version}", version + 1: "not in the artifact"}),
        model={"model_id": "tiny", "revision": "abc", "dtype": "float32", "device": "cpu", "n_layers": layers},
        readout={"exact": True, "max_difference": 0.0},
    )


def small_results(version: int = 0, **sizes: int) -> Results:
    """Prompts, a lens, a number and a tensor, all of one version, with the history of the steps that made them."""
    results = Results()
    results[keys.PROMPTS] = as_prompts([f"prompt {version}", "another 日本語"])
    results[keys.LOGIT_LENS] = small_lens(version, **sizes)
    results["score"] = version
    results["table"] = torch.full((3, 2), version)
    results.history.append(StepRecord("LogitLens", "LogitLens(model, top_k=3)", 0.25, ("logit_lens",)))
    return results


def versions_in(results: Any) -> set[int]:
    """The versions that the values of loaded results belong to: one, unless something was mixed."""
    lens = results[keys.LOGIT_LENS]
    return {
        int(results[keys.PROMPTS][0].text.split()[-1]),
        results["score"],
        *results["table"].unique().tolist(),
        *(int(value) for tensor in (lens.top_ids, lens.top_probs, lens.entropy) for value in tensor.unique()),
    }
