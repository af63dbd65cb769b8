"""Statistics of logits, beside the naive formula in float64; and the streaming reduction beside both."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from murano.errors import InputError
from murano.readout import stats
from murano.readout.reduce import reduce_rows

COMMON = settings(max_examples=int(os.environ.get("MURANO_EXAMPLES", "40")), deadline=None)


@st.composite
def logits(draw: st.DrawFn, least: int = 2) -> Tensor:
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([least, 3, 17, 1000, 5000]))
    scale, seed = draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 20.0])), draw(st.integers(0, 2**20))
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def naive_probs(x: Tensor) -> Tensor:
    e = (x.double() - x.double().amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def naive_kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1)


@COMMON
@given(logits(), st.integers(0, 2**20))
def test_against_float64(x: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(x.shape[1], (x.shape[0],), generator=generator)
    p = naive_probs(x)
    of_token = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    best = p.sort(-1, descending=True).values
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(stats.entropy(x).double(), -torch.where(p > 0, p * p.log(), 0.0).sum(-1), **close)
    torch.testing.assert_close(stats.max_prob(x).double(), best[:, 0], **close)
    torch.testing.assert_close(stats.margin(x).double(), best[:, 0] - best[:, 1], **close)
    torch.testing.assert_close(stats.log_prob(x, token).double(), of_token.log(), **close)
    torch.testing.assert_close(stats.surprisal(x, token).double(), -of_token.log(), **close)
    expected = [sum(v > row[t] for v in row.tolist()) for row, t in zip(x, token, strict=True)]
    assert stats.rank(x, token).tolist() == expected


@COMMON
@given(logits(), st.integers(0, 2**20), st.sampled_from([0.1, 1.0, 10.0]))
def test_divergences(x: Tensor, seed: int, scale: float) -> None:
    y = x + scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    q, p = naive_probs(x), naive_probs(y)
    m = (p + q) / 2
    kl, js = stats.kl_divergence(x, y), stats.js_divergence(x, y)
    torch.testing.assert_close(kl.double(), naive_kl(p, q), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(js.double(), (naive_kl(p, m) + naive_kl(q, m)) / 2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(js, stats.js_divergence(y, x), atol=1e-6, rtol=0)
    assert (js <= math.log(2) + 1e-6).all()
    assert (kl >= 0).all()
    assert stats.kl_divergence(x, x).max() < 1e-6
    assert stats.js_divergence(x, x).max() < 1e-6


def test_known_values() -> None:
    uniform = torch.full((1, 1000), 3.0)
    assert float(stats.entropy(uniform)) == pytest.approx(math.log(1000), abs=3e-6)
    assert float(stats.margin(uniform)) == 0.0
    x = torch.tensor([[0.0, math.log(3.0)]])  # probabilities 1/4 and 3/4
    assert float(stats.entropy(x)) == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert float(stats.max_prob(x)) == pytest.approx(0.75)
    assert float(stats.margin(x)) == pytest.approx(0.5)
    assert float(stats.surprisal(x, torch.tensor([0]))) == pytest.approx(math.log(4))
    assert float(stats.kl_divergence(x, torch.zeros(1, 2))) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6
    )
    certain = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    other = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert float(stats.js_divergence(certain, other)) == pytest.approx(math.log(2))
    assert float(stats.entropy(certain)) == 0.0
    assert int(stats.rank(certain, torch.tensor([0]))) == 0


@COMMON
@given(logits(), st.integers(0, 2**20), st.booleans())
def test_the_streaming_reduction_gives_the_same(x: Tensor, seed: int, masked: bool) -> None:
    if masked and x.shape[1] > 3:
        x[:, 1] = -torch.inf
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(x.shape[1], (x.shape[0], 3), generator=generator)
    reference = x[:2] + torch.randn(x[:2].shape, generator=generator)
    turn = torch.arange(len(x)) % len(reference)
    found = reduce_rows(x.clone(), 1, tokens=tokens, reference=stats.log_softmax(reference), divergences=("kl", "js"))
    assert found.token_ranks is not None
    assert found.token_log_probs is not None
    for column in range(3):
        assert torch.equal(found.token_ranks[:, column], stats.rank(x, tokens[:, column]))
        expected = stats.log_prob(x, tokens[:, column])
        torch.testing.assert_close(found.token_log_probs[:, column], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.divergences["kl"], stats.kl_divergence(x, reference[turn]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.divergences["js"], stats.js_divergence(x, reference[turn]), atol=1e-5, rtol=1e-5)
    argmax = x.argmax(-1, keepdim=True)
    first = reduce_rows(x.clone(), 1, tokens=argmax)
    assert first.token_ranks is not None
    assert first.token_ranks.max() == 0


def test_names() -> None:
    assert stats.parse_stats("kl") == ("kl",)
    assert stats.parse_stats(("kl", "js", "kl")) == ("kl", "js")
    assert stats.parse_stats("kl, js") == ("kl", "js")
    assert stats.parse_stats("all") == tuple(stats.STATS)
    assert stats.parse_stats(None) == ()
    with pytest.raises(
        InputError, match=r"'entropie' is unknown. Did you mean 'entropy'\? There are: entropy, max_prob"
    ):
        stats.parse_stats(("kl", "entropie"))
