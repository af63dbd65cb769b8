"""The code of docs/exactness.md runs, on the bundled model, and shows what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


@pytest.mark.bundled
def test_the_pages_code(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert torch.equal(names["logits"], list(names["stream"].values())[-1])
    assert torch.equal(names["bare"], names["logits"])
    assert names["word"] == " London"
    out = capsys.readouterr().out
    assert "cross test on 3 × 7 tokens in float32: equal to the bit" in out
