"""A sweep over all layers of the bundled model: one forward per batch, and the numbers of the lens that one would write by hand."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.documents import SEED, changed

from murano import documents, keys, logit_lens
from murano.metrics import logit_diff, match, token_prob
from murano.model import MuranoModel
from murano.pipeline import Pipeline
from murano.prompt_files import shipped_prompts
from murano.prompts import PromptBatch
from murano.steps import LoadPrompts, LogitLens, TokenProb

pytestmark = pytest.mark.bundled

#: The lens of seed 002 on the bundled model: all its layers, on the shipped weekdays.
WEEKDAYS = changed(("model", {"key": "bundled", "dtype": "fp32"}), ("sites.resid.layers.sweep", "all"))


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(dtype="fp32")


@pytest.mark.filterwarnings("ignore:.*several tokens")
def test_one_forward_per_batch_and_the_lens_own_numbers(
    tmp_path: Path, model: MuranoModel, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = PromptBatch(sorted(shipped_prompts("facts"), key=lambda p: len(p.text))[:100])
    facts = [{"input": p.text, "target": list(p.targets), "foil": list(p.foils)} for p in prompts]
    diff = {"kind": "logit_diff", "of": "lens", "target": "target", "foil": "foil"}
    document = documents.load(
        changed(
            ("roles.base.answers", "continued"),
            ("steps.lens.rows.base", facts),
            ("interventions.lens.metrics.p_answer.token", "target"),
            ("interventions.lens.metrics.top1.expected", "target"),
            ("interventions.lens.metrics.diff", diff),
            ("steps.lens.saves.2", {"value": "diff", "file_path": "diff.json"}),
            base=WEEKDAYS,
        )
    )
    caplog.set_level(logging.INFO, "murano.reader")
    run = document.run(tmp_path / "out", model=model)
    forwards = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Forward of")]
    assert len(forwards) == run.info["forwards"][0]["batches"]
    assert all(line.endswith("read at 30 places") for line in forwards)
    assert list(run.points) == [f"layers={layer}" for layer in range(30)]
    lens = logit_lens(model, prompts, positions="last", top_k=1)
    for name, table in (("p_answer", token_prob(lens)), ("top1", match(lens)), ("diff", logit_diff(lens))):
        ours = run.table(name)
        assert ours.addresses == table.addresses
        torch.testing.assert_close(ours.values, table.values, rtol=2e-5, atol=2e-4 if name == "diff" else 1e-6)


def test_the_weekdays_that_are_shipped(tmp_path: Path, model: MuranoModel) -> None:
    document = documents.load(WEEKDAYS)
    assert "note" not in document.plan()
    run = document.run(model=model)
    assert run.info["notes"] == []
    p, top1 = run.table("p_answer").values.mean(0), run.table("top1").values.mean(0)
    # The answer appears in the last layers: nothing at half depth, the first choice of most rows at the end.
    assert float(p[14]) < 0.01
    assert float(top1[-1]) > 0.5
    assert float(p[-1]) > 0.2
    # One point alone gives the same numbers to the bit as in the sweep over thirty.
    alone = documents.load(changed(("sites.resid.layers", [29]), base=WEEKDAYS)).run(model=model)
    assert alone.points[""] == run.points["layers=29"]
    by_hand = Pipeline(
        [
            LoadPrompts(["Today is Monday. Tomorrow will be"], targets=["Tuesday"]),
            LogitLens(model, [-1], "last"),
            TokenProb(),
        ]
    ).run()
    assert run.points["layers=29"]["p_answer.json"][0]["value"] == pytest.approx(
        float(by_hand[keys.TOKEN_PROB].values), rel=2e-5
    )


def test_the_seed_is_on_the_bundled_model_with_its_model_alone_changed(model: MuranoModel) -> None:
    document = documents.load(changed(("model", {"key": None})))
    assert document.data["sites"] == SEED["sites"]
    assert "points: 2; they share" in document.plan()
    assert "model: bundled (SmolLM2-135M-Instruct)" in document.plan()
