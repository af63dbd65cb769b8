"""reduce_rows: the few numbers of each row, beside a naive float64 computation."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from murano.readout import reduce
from murano.readout.reduce import Reduction, reduce_rows
from murano.readout.search import Search

COMMON = settings(max_examples=int(os.environ.get("MURANO_EXAMPLES", "60")), deadline=None)
SHAPES = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 7, 256, 1025, 3000]))


def naive(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = logits.double()
    peak = x.amax(-1, keepdim=True)
    p = (x - peak).softmax(-1)
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    return x.topk(k, dim=-1).values, p.topk(k, dim=-1).values, entropy, peak.squeeze(-1) + (x - peak).logsumexp(-1)


def check(logits: Tensor, k: int, **options: Any) -> None:
    values, probs, entropy, log_normalizer = naive(logits, k)
    stats = reduce_rows(logits.clone(), k, **options)
    rows, vocab = logits.shape
    assert stats.top_ids.shape == stats.top_probs.shape == (rows, k)
    assert stats.top_probs.dtype == stats.entropy.dtype == stats.log_normalizer.dtype == torch.float32
    assert torch.equal(
        logits.double().gather(-1, stats.top_ids), values
    )  # the ids, whichever of equal logits comes first
    assert all(len(set(row)) == k for row in stats.top_ids.tolist())
    assert (stats.top_probs - probs).abs().max() < 2e-6
    assert (stats.entropy - entropy).abs().max() < 2e-5 * max(1.0, np.log(vocab))
    assert ((stats.log_normalizer - log_normalizer).abs() <= 2e-6 * log_normalizer.abs().clamp(min=1.0)).all()


@COMMON
@given(st.data())
def test_random_rows(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    seed, scale = data.draw(st.integers(0, 2**20)), data.draw(st.sampled_from([0.0, 1e-3, 1.0, 10.0, 80.0, 1e4]))
    k = data.draw(st.integers(1, min(shape[1], 40)))
    check(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale, k)


@COMMON
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-1e4, 1e4, width=32)),
    st.data(),
)
def test_any_finite_numbers(array: Any, data: st.DataObject) -> None:
    """Ties, zeros and numbers far apart included."""
    check(torch.from_numpy(array), data.draw(st.integers(1, array.shape[1])))


@pytest.mark.parametrize("offset", [0.0, 50.0, -240.0, 300.0, -6e4, 1e6, -1e30, 3e38])
def test_logits_of_any_size(offset: float) -> None:
    """What is far from 0 altogether is rounded, but what it was rounded to is read as exactly as any other."""
    for width in (3000, 3005):  # registers are filled, or not
        check(torch.randn(4, width, generator=torch.Generator().manual_seed(0)) * 3 + offset, 5)
    mixed = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)) * 3
    mixed[2] += offset
    check(mixed, 5)


@pytest.mark.parametrize("offset", [0.0, 30.0, -60.0, 64.0, 150.0, -700.0, 1e5])
def test_bits_of_any_size(offset: float) -> None:
    """Logits that come multiplied by 1 / log 2, together with some that are far off, or masked."""
    nats = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 3
    bits = ((nats + offset) / math.log(2)).float()
    bits[3] -= 40
    for masked in (False, True):
        if masked:
            bits[1, ::2] = -torch.inf
            bits[4] = -torch.inf
        reduction = Reduction(Search(5, 5, 3000), in_bits=True)
        for first in range(0, 3000, 1024):
            reduction.add([bits[:, first : first + 1024].clone()], first)
        stats = reduction.stats()
        good = slice(4 if masked else 5)
        values, probs, entropy, log_normalizer = naive(bits.double() * math.log(2), 5)
        assert torch.equal(bits.double().gather(-1, stats.top_ids)[good] * math.log(2), values[good])
        assert (stats.top_probs - probs)[good].abs().max() < 2e-6
        assert (stats.entropy - entropy)[good].abs().max() < 2e-5
        assert ((stats.log_normalizer - log_normalizer).abs() <= 2e-6 * log_normalizer.abs().clamp(min=1.0))[good].all()
        assert not masked or stats.entropy[4].isnan()


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_tokens_that_are_masked_in_either_way(lowest: float) -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    logits[:, ::2] = lowest
    logits[3, 2:] = lowest
    check(logits, 5)


@pytest.mark.parametrize("k", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_tokens(k: int, dtype: torch.dtype) -> None:
    """A logit of -inf has no probability and adds nothing."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, ::2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[3, 0] = 2.0
    stats = reduce_rows(logits.clone(), k)
    values, probs, entropy, log_normalizer = naive(logits, k)
    assert torch.equal(logits.double().gather(-1, stats.top_ids), values)
    assert (stats.top_probs - probs).abs().max() < 1e-6
    assert (stats.entropy - entropy).abs().max() < 1e-4
    assert (stats.log_normalizer - log_normalizer).abs().max() < 1e-4
    assert stats.entropy[3] == 0.0
    assert stats.top_probs[3, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_reduced_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 2000, generator=torch.Generator().manual_seed(1)) * 5).to(dtype).float()
    check(logits.to(dtype), 7)
    before = logits.to(torch.bfloat16)
    copy = before.clone()
    reduce_rows(before, 3)
    assert torch.equal(before, copy)


def test_all_of_the_vocabulary_and_one_row_of_one() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    check(logits, 50)
    stats = reduce_rows(logits.clone(), 50)
    assert (stats.top_probs.sum(-1) - 1).abs().max() < 1e-6
    assert all(sorted(row) == list(range(50)) for row in stats.top_ids.tolist())
    one = reduce_rows(torch.tensor([[-3.0]]), 1)
    assert (one.top_ids.item(), one.top_probs.item(), one.entropy.item(), one.log_normalizer.item()) == (
        0,
        1.0,
        0.0,
        -3.0,
    )


def test_slices_scratch_and_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(11, 700, generator=torch.Generator().manual_seed(3))
    whole = reduce_rows(logits.clone(), 4)
    monkeypatch.setattr(reduce, "CPU_SLICE_BYTES", 3 * 4 * 700)
    for scratch in (None, torch.empty(3, 700)):
        sliced = reduce_rows(logits.clone(), 4, None, scratch)
        assert torch.equal(sliced.top_ids, whole.top_ids)
        assert (sliced.top_probs - whole.top_probs).abs().max() < 1e-7
        assert (sliced.entropy - whole.entropy).abs().max() < 1e-5
    capped = reduce_rows(logits.clone(), 4, lambda x: torch.tanh(x / 2) * 2, torch.empty(3, 700))
    expected = reduce_rows(torch.tanh(logits / 2) * 2, 4)
    assert torch.equal(capped.top_ids, expected.top_ids)
    assert (capped.top_probs - expected.top_probs).abs().max() < 1e-7
    cut = reduce_rows(logits.clone(), 4, lambda x: x[..., :650], torch.empty(3, 700))
    expected = reduce_rows(logits[:, :650].clone(), 4)
    assert torch.equal(cut.top_ids, expected.top_ids)
    assert (cut.log_normalizer - expected.log_normalizer).abs().max() < 1e-6


def test_rows_that_are_not_finite_are_marked_as_such() -> None:
    logits = torch.randn(3, 40)
    logits[1, 3] = float("nan")
    stats = reduce_rows(logits, 2)
    assert stats.top_probs[1].isnan().all()
    assert stats.entropy[1].isnan()
    assert stats.log_normalizer[1].isnan()
    assert stats.entropy[[0, 2]].isfinite().all()


@pytest.mark.parametrize("where", [0, 255, 256, 700, 2559, 2560, 2599])
def test_the_largest_is_found_wherever_it_lies(where: int) -> None:
    """In the first block, at a border, and in what fills no block."""
    logits = torch.randn(4, 2600, generator=torch.Generator().manual_seed(4))
    logits[:, where] = 50.0
    for k in (1, 2, 5):
        stats = reduce_rows(logits.clone(), k)
        assert stats.top_ids[:, 0].tolist() == [where] * 4
        check(logits, k)
