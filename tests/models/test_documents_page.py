"""The code and the commands of docs/documents.md run, on the bundled model, and show what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from murano.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "documents.md").read_text(encoding="utf-8")


@pytest.mark.bundled
def test_the_pages_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL)
    for language, block in blocks:
        capsys.readouterr()
        if language == "python":
            exec(compile(block, "documents.md", "exec"), names)
            continue
        for command in block.splitlines():
            assert main(shlex.split(command)[1:]) == 0
    assert Path("out/curve.png").is_file()
    assert capsys.readouterr().out in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    row = names["run"].points["layers=29"]["p_answer.json"][0]
    assert (row["row"], f"{row['value']:.2f}", row["token"]) == (0, "0.28", " Tuesday")
    steps = names["document"].pipelines()[0]
    assert [type(step).__name__ for step in steps] == ["LoadPrompts", "LogitLens", "TokenProb", "Match"]
    assert names["documents"].validate("paris.json") == ()
