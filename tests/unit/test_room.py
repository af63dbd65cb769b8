"""What a lens would keep is held against the memory that is free, before any work."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reading import forwards, held

from murano import room
from murano.answers import Question
from murano.errors import InputError
from murano.lens import logit_lens
from murano.room import make_room

PROMPTS = [[20], [21], [20, 21, 22, 23, 24, 25, 26, 27], [22, 23]]


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: int | None) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: n_bytes)


def test_a_set_with_one_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = held("llama")
    # 3 layers × 4 prompts × 8 positions × (5 ids and 5 probabilities of 4 bytes, entropy and log-normaliser) = 4 608 bytes
    free(monkeypatch, 4608)
    logit_lens(model, PROMPTS)
    free(monkeypatch, 4607)
    with forwards(model.hf_model) as calls, pytest.raises(InputError) as caught:
        logit_lens(model, PROMPTS)
    assert calls == [0]
    assert str(caught.value) == (
        "The result needs 0.0 GB (3 layers × 4 prompts × 8 positions × 48 bytes), and 0.0 GB are free. Instead: every prompt takes as "
        "many cells as the longest, prompt 2 with 8 positions (half of them have at most 1): read long ones apart; read fewer layers or "
        "positions, such as positions='last'."
    )
    logit_lens(model, PROMPTS, positions="last")


def test_what_is_kept_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = held("llama")
    width = 4 * model.d_model
    free(monkeypatch, 3 * 8 * (48 + width))
    logit_lens(model, PROMPTS[2:3], keep="residuals")
    free(monkeypatch, 3 * 8 * (48 + width) - 1)
    with pytest.raises(
        InputError, match=r"^keep='residuals' needs .*Instead: without keep='residuals' it is 0.0 GB; read fewer"
    ):
        logit_lens(model, PROMPTS[2:3], keep="residuals")
    with pytest.raises(InputError, match=r"^keep='logits' needs .*Instead: keep='residuals', and lens.decode\(model\)"):
        logit_lens(model, PROMPTS[2:3], keep="logits")


def test_a_cell_takes_what_its_tables_take() -> None:
    tokens = torch.zeros(2, 3, 4, dtype=torch.long)
    question = Question(answers=[], mode="first", tokens=tokens, stats=("kl", "js", "margin"), top_k=7, read_k=7)
    tables = question.tables(5, 6)
    held = [t for t in vars(tables).values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() * t.element_size() for t in held) == question.bytes_of_cell * 5 * 6


def test_a_limit_that_the_system_does_not_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much() -> Any:
        return torch.empty(1 << 60)

    free(monkeypatch, None)
    with pytest.raises(
        InputError, match=r"^The result needs 9.6 GB .*and this process may not have so much. Instead: read fewer"
    ):
        make_room(too_much, 10, [100] * 200_000, 48)

    def wrong() -> Any:
        raise RuntimeError("another fault")

    with pytest.raises(RuntimeError, match="another fault"):
        make_room(wrong, 1, [1], 48)
    assert make_room(lambda: "made", 1, [1], 48) == "made"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back as it likes")
def test_freed_memory_is_given_back() -> None:
    def in_memory() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

    del (large := [torch.ones(7 << 20)])[0]  # having freed 28 MiB, the library keeps what is smaller
    kept = [torch.ones(1 << 20) for _ in range(64)]
    del kept[::2]  # holes of 4 MiB
    before = in_memory()
    room.give_back()
    assert before - in_memory() > 100
    assert not large and len(kept) == 32
