"""Resume: finished steps are skipped, changed ones run again, a killed lens goes on where it stopped."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import Key, MuranoModel, Pipeline, Results, Step, keys
from murano.artifacts.codec import fingerprint
from murano.lens import LensInterrupted
from murano.prompts import Prompt
from murano.reader import Reader
from murano.steps import LoadPrompts, LogitLens, Save

TOTAL: Key[int] = Key("total", int, written_by="Add")
PROMPTS = [Prompt(token_ids=tuple(range(20, 23 + i % 5))) for i in range(60)]


class Add(Step):
    """Adds a number to what is there; counts how often it really ran."""

    writes = (TOTAL,)
    ran = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def run(self, results: Results) -> Mapping[str, Any]:
        type(self).ran += 1
        return {TOTAL: self.number}


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(tiny_model("llama"), tokenizer=tiny_tokenizer())


def lens_pipeline(model: MuranoModel, folder: Path, **options: Any) -> Pipeline:
    lens = LogitLens(model, max_batch_tokens=12, **options)
    return Pipeline([LoadPrompts(PROMPTS), lens, Save(folder, run_name="run")])


def test_a_finished_step_is_skipped_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Add.ran = 0
    pipeline = Pipeline([Add(2), Save(tmp_path, run_name="run")])
    first = pipeline.run(resume=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        second = pipeline.run(resume=tmp_path / "run")
    assert (first[TOTAL], second[TOTAL], Add.ran) == (2, 2, 1)
    assert [record.skipped for record in second.history] == [True, False]
    assert any("Skipped Add" in message and "unchanged" in message for message in caplog.messages)


def test_a_changed_argument_runs_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Add.ran = 0
    Pipeline([Add(2), Save(tmp_path, run_name="run")]).run(resume=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        results = Pipeline([Add(3), Save(tmp_path, run_name="run")]).run(resume=tmp_path / "run")
    assert (results[TOTAL], Add.ran) == (3, 2)
    assert any("Running Add" in message and "changed" in message for message in caplog.messages)


def test_changed_prompts_run_the_lens_again(model: MuranoModel, tmp_path: Path) -> None:
    def run(ids: tuple[int, ...]) -> Results:
        steps = [LoadPrompts([Prompt(token_ids=ids)]), LogitLens(model), Save(tmp_path, run_name="run")]
        return Pipeline(steps).run(resume=tmp_path / "run")

    run((20, 21, 22))
    again, other = run((20, 21, 22)), run((20, 21, 23))
    assert [record.skipped for record in again.history] == [True, True, False]
    assert [record.skipped for record in other.history] == [False, False, False]
    assert other[keys.LOGIT_LENS].input_ids.tolist() == [[20, 21, 23]]


@pytest.mark.parametrize("stop_after", [1, 9, 20])
def test_an_interrupted_lens_goes_on_with_an_equal_result(
    model: MuranoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    whole = lens_pipeline(model, tmp_path / "whole").run(resume=tmp_path / "whole" / "run")[keys.LOGIT_LENS]
    read, calls = Reader.read, 0

    def stopping(self: Reader, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            raise KeyboardInterrupt
        read(self, *args)

    monkeypatch.setattr(Reader, "read", stopping)
    with pytest.raises(LensInterrupted, match=r"stopped after \d+ of 60 prompts"):
        lens_pipeline(model, tmp_path).run(resume=tmp_path / "run")
    before, calls = calls, 1_000_000
    resumed = lens_pipeline(model, tmp_path).run(resume=tmp_path / "run")[keys.LOGIT_LENS]
    assert fingerprint(resumed) == fingerprint(whole)
    assert torch.equal(resumed.top_ids, whole.top_ids)
    done_before = (before - 1) // 8 * 8  # whole sections of eight batches are kept
    assert calls - 1_000_000 == 31 - done_before  # of 31 batches
    assert not list(tmp_path.glob(".run.checkpoints"))


def test_a_checkpointed_lens_equals_a_plain_one(model: MuranoModel, tmp_path: Path) -> None:
    plain = Pipeline([LoadPrompts(PROMPTS), LogitLens(model, max_batch_tokens=12)]).run()[keys.LOGIT_LENS]
    kept = lens_pipeline(model, tmp_path).run(resume=tmp_path / "run")[keys.LOGIT_LENS]
    torch.testing.assert_close(kept.top_probs, plain.top_probs, atol=1e-6, rtol=0, equal_nan=True)
    assert torch.equal(kept.top_ids, plain.top_ids)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "campaigns" / "resume_campaign.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "12"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong results: 0" in done.stdout
