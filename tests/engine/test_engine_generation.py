"""Following a generation inside vLLM: every cell as on the eager backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine_lens import CLOSE, PROMPTS

from murano import MuranoModel
from murano.generation import follow_generation


@pytest.fixture(scope="module")
def model(engines: Callable[..., Any]) -> Any:
    return engines()


@pytest.mark.parametrize("options", [{}, {"stop": "."}], ids=["length", "stop"])
def test_eight_prompts_of_sixteen_new_tokens(options: dict[str, Any], model: Any) -> None:
    eager = MuranoModel(dtype="float32")
    found, expected = (follow_generation(m, PROMPTS[:8], max_new_tokens=16, **options) for m in (model, eager))
    assert found.texts == expected.texts
    assert found.finished == expected.finished
    assert torch.equal(found.sampled_ids, expected.sampled_ids)
    assert torch.equal(found.top_ids, expected.top_ids)
    close = {"rtol": 0, "equal_nan": True}
    torch.testing.assert_close(found.top_probs, expected.top_probs, atol=CLOSE, **close)
    torch.testing.assert_close(found.sampled_log_probs, expected.sampled_log_probs, atol=1e-3, **close)
    torch.testing.assert_close(found.own_log_probs, expected.own_log_probs, atol=1e-4, **close)
    # A token far down an early layer's list may change places with one that is as improbable.
    torch.testing.assert_close(found.sampled_ranks, expected.sampled_ranks, rtol=1e-2, atol=2)


def test_drawn_tokens_are_drawn_again_with_the_same_seed(model: Any) -> None:
    first, second = (follow_generation(model, PROMPTS[:3], max_new_tokens=8, temperature=1.0, seed=3) for _ in range(2))
    assert first.texts == second.texts
    assert torch.equal(first.top_probs.nan_to_num(), second.top_probs.nan_to_num())
