"""What goes to a worker and comes back, as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murano.model.wire import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.float64]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31 - 1))
def test_every_bit_comes_back(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw.view(-1).view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    (found,) = unpack(pack({"a": tensor}))[0].values()
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_tensors_of_any_layout_and_plain_values() -> None:
    about = {"layers": ["L0.resid_post"], "top_k": 5, "keep": None, "note": "⟨é⟩"}
    tensor = torch.arange(6.0).view(2, 3).T
    tensors, values = unpack(pack({"a": tensor, "b": torch.tensor(True).to(torch.uint8)}, about))
    assert torch.equal(tensors["a"], tensor)
    assert tensors["b"].item() == 1
    assert values == about
    assert unpack(pack({})) == ({}, {})


def test_numbers_that_are_alike_take_few_bytes() -> None:
    probs = torch.full((1000,), 0.5) + torch.arange(1000) / 1e6
    assert len(pack({"a": probs})) < 2800


def test_bytes_of_something_else_are_not_read() -> None:
    with pytest.raises(Exception, match="incorrect header"):
        unpack(b"\x80\x04nothing that was packed")
