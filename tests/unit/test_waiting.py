"""Rows that wait for a chunk to fill: every one comes out once, in order, and none is lost when the device runs out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reading import held
from torch import Tensor

from murano.artifacts.logit_lens import LogitLensResult
from murano.lens import logit_lens
from murano.model import residuals
from murano.reader import Reader
from murano.waiting import Waiting

TEXTS = [f"{'word ' * (1 + i % 3)}{i}" for i in range(12)]


@pytest.mark.parametrize("sizes", [[3, 4, 1, 12, 5], [5], [10], [1] * 7, [0, 5, 0], [23]])
def test_chunks_hold_the_rows_in_their_order(sizes: list[int]) -> None:
    waiting = Waiting(5, torch.device("cpu"))
    rows = torch.randn(sum(sizes), 3)
    out: list[tuple[Tensor, Tensor]] = []
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        out += [(r.clone(), p.clone()) for r, p in waiting.add(rows[part], torch.arange(start, start + size))]
        start += size
        assert len(waiting) == start % 5
    assert all(len(r) == len(p) == 5 for r, p in out)
    out += [(r.clone(), p.clone()) for r, p in waiting.rest()]
    assert len(waiting) == 0
    assert list(waiting.rest()) == []
    assert torch.equal(torch.cat([r for r, _ in out]), rows)
    assert torch.equal(torch.cat([p for _, p in out]), torch.arange(len(rows)))


def test_rows_of_another_dtype_keep_their_bits() -> None:
    waiting = Waiting(4, torch.device("cpu"))
    half, single = torch.randn(3, 2).bfloat16(), torch.randn(3, 2)
    assert list(waiting.add(half, torch.arange(3))) == []
    ((rows, place),) = [(r.clone(), p.clone()) for r, p in waiting.add(single, torch.arange(3, 6))]
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, half) and place.tolist() == [0, 1, 2]
    ((rows, place),) = list(waiting.rest())
    assert rows.dtype == torch.float32 and torch.equal(rows, single) and place.tolist() == [3, 4, 5]


def test_a_chunk_that_could_not_be_read_waits_on() -> None:
    waiting = Waiting(4, torch.device("cpu"))
    first, second = torch.randn(3, 2), torch.randn(3, 2)
    list(waiting.add(first, torch.arange(3)))
    with pytest.raises(MemoryError):
        for _ in waiting.add(second, torch.arange(3, 6)):
            raise MemoryError
    assert len(waiting) == 4
    ((rows, place),) = [(r.clone(), p.clone()) for r, p in waiting.add(second, torch.arange(3, 6))]
    assert torch.equal(rows, torch.cat([first, second[:1]])) and place.tolist() == [0, 1, 2, 3]
    ((rows, place),) = list(waiting.rest())
    assert torch.equal(rows, second) and place.tolist() == [3, 4, 5]


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> list[int]:
    """Let the device run out of memory at one call of a function; says how often it was called."""
    own: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise torch.cuda.OutOfMemoryError("no room, says the test")
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def check_equal(one: LogitLensResult, other: LogitLensResult) -> None:
    assert torch.equal(one.top_ids, other.top_ids)
    for values, same in ((one.top_probs, other.top_probs), (one.entropy, other.entropy)):
        assert torch.equal(values.isnan(), same.isnan())
        assert (values - same).abs().nan_to_num(0).max() < 1e-5
    for name, of in one.stats.items():
        assert torch.equal(of.isnan(), other.stats[name].isnan())
        assert (of - other.stats[name]).abs().nan_to_num(0).max() < 1e-5


#: Two short tails, one with a bias after the norm, and one that is replayed after the forward.
FAMILIES = ["llama", "gpt2", "gemma3n_text"]


@pytest.mark.parametrize("stats", [(), ("kl",)])
@pytest.mark.parametrize(("where", "at"), [("rows", 1), ("rows", 4), ("rows", 16), ("forward", 1), ("forward", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_out_of_memory_halves_the_batch_and_loses_nothing(
    family: str, where: str, at: int, stats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model = held(family)
    options: dict[str, Any] = {"stats": stats, "max_batch_tokens": 34, "max_chunk_bytes": 7 * 4 * model.vocab_size}
    expected = logit_lens(model, TEXTS, **options)
    owner, name = (Reader, "_project") if where == "rows" else (residuals, "forward")
    calls = fails_once(monkeypatch, owner, name, at)
    with caplog.at_level(logging.WARNING, "murano"):
        found = logit_lens(model, TEXTS, **options)
    assert len(calls) > at
    assert sum("going on with halves" in message for message in caplog.messages) == 1
    check_equal(found, expected)
    monkeypatch.undo()
    check_equal(
        logit_lens(model, TEXTS, **options), expected
    )  # nothing of the forward that failed is left in the model


def test_out_of_memory_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = held("llama")
    options: dict[str, Any] = {"max_batch_tokens": 34, "product": "torch", "max_chunk_bytes": 7 * 4 * model.vocab_size}
    expected = logit_lens(model, TEXTS, **options)
    fails_once(monkeypatch, Reader, "_project", 4)
    check_equal(logit_lens(model, TEXTS, checkpoint=tmp_path / "lens.pt", **options), expected)


def test_one_prompt_that_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    logit_lens(held("llama"), TEXTS[:2])  # whether prompts may be padded is found out by a forward of its own
    fails_once(monkeypatch, residuals, "forward", 2)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"prompt 1 alone, of 17 tokens .*: no room, says the test"):
        logit_lens(held("llama"), TEXTS[-1:] * 2, max_batch_tokens=17)
