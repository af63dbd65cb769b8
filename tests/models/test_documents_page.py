"""The document, the commands and the code of docs/documents.md run, on the bundled model, and show what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from murano.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "documents.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.bundled
def test_the_pages_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (document,) = blocks("yaml")
    Path("weekdays.yaml").write_text(document, encoding="utf-8")
    (commands,) = blocks("console")
    for command in commands.splitlines():
        assert main(shlex.split(command)[1:]) == 0
    assert Path("out/curve.png").is_file()
    names: dict[str, Any] = {}
    for block in blocks("python"):
        capsys.readouterr()
        exec(compile(block, "documents.md", "exec"), names)
    shown = re.search(r"print\(problem\)\n```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown[1]
    row = names["run"].points["layers=29"]["p_answer.json"][0]
    assert (row["row"], f"{row['value']:.2f}", row["token"]) == (0, "0.28", " Tuesday")
    assert [type(step).__name__ for step in names["document"].pipelines()[0]] == [
        "LoadPrompts",
        "LogitLens",
        "TokenProb",
        "Match",
    ]
    assert names["documents"].validate("paris.json") == ()
