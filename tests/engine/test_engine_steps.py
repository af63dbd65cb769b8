"""Documents, metrics, saved runs, figures and the command line on an engine: the same as on the eager backend, by one argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_lens import CLOSE, PROMPTS

from murano import MuranoModel, Pipeline, documents, keys, load_run
from murano.errors import InputError
from murano.steps import LoadPrompts, LogitAttribution, LogitLens, Plot, Save, TokenProb
from murano.steps.base import Step

SWEEP: dict[str, Any] = {
    "model": {"key": "bundled"},
    "roles": {"base": {"field": "input"}},
    "sites": {"resid": {"component": "block_output", "layers": {"sweep": [[0], [15], [29]]}}},
    "interventions": {
        "lens": {
            "reads": {"lens": {"site": "resid", "pos": -1, "input": "base", "view": "logits"}},
            "metrics": {"p_answer": {"kind": "token_prob", "of": "lens", "token": "base_answer"}},
        }
    },
    "steps": {
        "lens": {
            "kind": "observe",
            "interventions": "lens",
            "rows": {"base": "weekdays/train"},
            "saves": [{"value": "p_answer", "file_path": "p_answer.json"}],
        }
    },
}


@pytest.fixture(scope="module")
def model(engines: Callable[..., Any]) -> Any:
    return engines()


def test_a_pipeline_moves_by_its_model(model: Any, tmp_path: Path) -> None:
    def results(of: Any, name: str) -> Any:
        steps: list[Step] = [
            LoadPrompts(PROMPTS[:4], targets=["Paris"] * 4, foils=["Rome"] * 4),
            LogitLens(of, [0, 15, 29], stats=["margin", "kl"]),
            TokenProb(),
            Plot(output_dir=tmp_path / name),
            Save(tmp_path / name),
        ]
        return Pipeline(steps).run()

    found, expected = results(model, "engine"), results(MuranoModel(dtype="float32"), "eager")
    probs = [r[keys.TOKEN_PROB].values for r in (found, expected)]
    torch.testing.assert_close(*probs, rtol=0, atol=CLOSE, equal_nan=True)
    lenses = [r[keys.LOGIT_LENS] for r in (found, expected)]
    assert torch.equal(lenses[0].top_ids, lenses[1].top_ids)
    for name in ("margin", "kl"):
        torch.testing.assert_close(*(lens.stats[name] for lens in lenses), rtol=0, atol=2e-3, equal_nan=True)
    assert len(found[keys.PLOTS]) == len(expected[keys.PLOTS]) > 0
    again = load_run(found[keys.OUTPUT_DIR])[keys.LOGIT_LENS]
    torch.testing.assert_close(again.top_probs, lenses[0].top_probs, rtol=0, atol=0, equal_nan=True)


def test_a_document(model: Any, tmp_path: Path) -> None:
    document = documents.load(SWEEP)
    found = document.run(tmp_path / "engine", model=model)
    expected = document.run(tmp_path / "eager")
    assert list(found.points) == list(expected.points) == ["layers=0", "layers=15", "layers=29"]
    for name, files in expected.points.items():
        for mine, theirs in zip(found.points[name]["p_answer.json"], files["p_answer.json"], strict=True):
            assert abs(mine["value"] - theirs["value"]) < CLOSE
            assert mine["token_id"] == theirs["token_id"]
    assert found.info["readout"]["path"] == "vllm"
    # What another backend read is not taken for one's own.
    assert document.run(tmp_path / "engine").info["readout"]["path"] != "vllm"


def test_attribution_needs_the_weights(model: Any) -> None:
    with pytest.raises(InputError, match=r"LogitAttribution needs the weights in this process.*Use MuranoModel\(\)"):
        LogitAttribution(model)


def test_the_command_line(tmp_path: Path) -> None:
    """In a process of its own: an engine takes a process's memory with it."""
    engine = ["--backend", "vllm", "--engine", '{"kv_cache_memory_bytes": 67108864}']
    asked = ["lens", "The capital of France is", "--layers", "28,29", "--json", *engine]
    lens = json.loads(murano(*asked))
    assert "Paris" in json.dumps(lens)
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(SWEEP))
    murano("run", str(file), "--out", str(tmp_path / "out"), *engine)
    assert (tmp_path / "out" / "layers=29" / "p_answer.json").exists()


def murano(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "murano", *arguments], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
