"""Every notebook runs from top to bottom, and what it prints is what the stored copy shows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell prints, without the figures that may differ in the last bits from machine to machine."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = "".join(o["text"] for o in cell.outputs if o["output_type"] == "stream" and o["name"] == "stdout")
            texts.append(re.sub(r"(?m)^  (cross test|rows read).*$", "", text))
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(fresh) == printed(stored)
    told = "".join(
        o["text"] for c in fresh.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"
    )
    assert "Warning" not in told and "Error" not in told, told
