"""Which prompts and layers of a result an index means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from murano.address import Address
from murano.artifacts.lookup import layer_index, prompt_indices
from murano.errors import InputError


@pytest.mark.parametrize(
    ("chosen", "means"),
    [
        (0, [0]),
        (-1, [3]),
        (np.int64(2), [2]),
        (torch.tensor(1), [1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        ([0, -1], [0, 3]),
        (np.array([2, 0]), [2, 0]),
        (torch.tensor([3]), [3]),
        (range(2), [0, 1]),
        ([], []),
    ],
)
def test_prompts(chosen: Any, means: list[int]) -> None:
    assert prompt_indices(chosen, 4) == means


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (4, "Prompt 4 does not exist: there are 4"),
        ([0, -5], "Prompt -5 does not exist"),
        (True, "by its index, not by True"),
        ([False, True], "by its index, not by False"),
        ("0", "by its index, not by '0'"),
        (1.0, "by its index, not by 1.0"),
        (None, "by its index, not by None"),
    ],
)
def test_no_such_prompt(chosen: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        prompt_indices(chosen, 4)


def test_layers() -> None:
    read = (Address(2), Address(5))
    assert layer_index(-1, read, {"n_layers": 6}) == layer_index("L5.resid_post", read, {}) == 1
    with pytest.raises(InputError, match=r"'L4.resid_post' was not read. Read: L2.resid_post, L5.resid_post"):
        layer_index(4, read, {"n_layers": 6})
