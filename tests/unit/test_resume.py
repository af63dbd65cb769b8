"""Resume: finished steps are skipped, changed ones run again, a killed lens goes on where it stopped."""

from __future__ import annotations

import importlib.metadata
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
from murano.artifacts.store import load_artifact, save_artifact
from murano.errors import ArtifactError, InputError
from murano.lens import LensInterrupted, logit_lens
from murano.prompts import Prompt
from murano.reader import Reader
from murano.steps import LoadPrompts, LogitLens, Save, step

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
    assert "Running Add: changed since it was saved: argument 'number'." in caplog.messages


def test_what_has_changed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    @step(reads=[keys.PROMPTS], writes=["count"])
    def count(prompts: Any) -> int:
        return len(prompts)

    def run(*prompts: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Pipeline([LoadPrompts(list(prompts)), count, Save(tmp_path, run_name="run")]).run(resume=tmp_path / "run")
        return [message.partition(": ")[2] for message in caplog.messages]

    assert run("a") == ["it has not run yet."] * 2
    assert run("a", "b") == [
        "changed since it was saved: argument 'prompts'.",
        "changed since it was saved: input 'prompts'.",
    ]
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "torch" else version(name))
    assert run("a", "b") == ["changed since it was saved: the version of torch."] * 2
    assert run("a") == [
        "changed since it was saved: argument 'prompts'.",
        "changed since it was saved: input 'prompts'.",
    ]
    assert [message.partition("has ")[2] for message in run("a")] == [
        "what it writes, and its inputs, arguments and versions are unchanged."
    ] * 2


def test_a_run_that_was_saved_without_resume_is_not_said_to_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline([Add(2), Save(tmp_path, run_name="run")])
    pipeline.run()
    with caplog.at_level(logging.WARNING):
        pipeline.run(resume=tmp_path / "run")
    assert caplog.messages == [
        "Running Add: it was saved by a run without resume, which does not say what it depends on."
    ]


@pytest.mark.parametrize("resume", [5, True, "", b"run"])
def test_what_is_no_folder_is_refused_before_anything_runs(resume: Any) -> None:
    Add.ran = 0
    with pytest.raises(InputError, match=f"resume={resume!r}: give the folder that Save writes"):
        Pipeline([Add(2)]).run(resume=resume)
    assert Add.ran == 0


def test_a_folder_that_save_does_not_write_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Add.ran = 0
    with caplog.at_level(logging.WARNING):
        Pipeline([Add(2), Save("out", run_name="run")]).run(resume="out/rnu")
    assert caplog.messages[1:] == [
        "The run was saved into 'out/run', but resume looked into 'out/rnu': nothing of it will be skipped next time. "
        "Write resume='out/run'."
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Pipeline([Add(2)]).run(resume="out/rnu")
    assert caplog.messages[1:] == [
        "Nothing was saved into 'out/rnu': nothing will be skipped next time. "
        "End the pipeline with Save('out', run_name='rnu')."
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Pipeline([Add(2), Save(tmp_path / "out", run_name="run")]).run(resume="out/run")
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("Skipped Add")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run"]


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
    model: MuranoModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stop_after: int,
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
    kept = "run.checkpoints.* keeps" if stop_after > 8 else "nothing was kept: a checkpoint is saved every 8 batches"
    with pytest.raises(LensInterrupted, match=rf"stopped after \d+ of 60 prompts; .*{kept}"):
        lens_pipeline(model, tmp_path).run(resume=tmp_path / "run")
    before, calls = calls, 1_000_000
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resumed = lens_pipeline(model, tmp_path).run(resume=tmp_path / "run")[keys.LOGIT_LENS]
    goes_on = "it was stopped in the middle and goes on from its last checkpoint."
    assert f"Running LogitLens: {goes_on if stop_after > 8 else 'it has not run yet.'}" in caplog.messages
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


def test_a_checkpoint_never_takes_the_place_of_something_else(model: MuranoModel, tmp_path: Path) -> None:
    mine = tmp_path / "lens.ckpt"
    logit_lens(model, PROMPTS, checkpoint=mine)
    table, weights, of_lens, inside = (tmp_path / name for name in ("data.csv", "w.pt", "l.pt", "data.csv/new.ckpt"))
    table.write_text("precious,data\n")
    torch.save({"w": torch.ones(3)}, weights)
    save_artifact(of_lens, logit_lens(model, PROMPTS[:2]))
    instead = "Choose another file, or delete this one to start over.$"
    for path, why in (
        (table, f"'.*data.csv' is no checkpoint of a lens. {instead}"),
        (weights, f"'.*w.pt' is no checkpoint of a lens. {instead}"),
        (of_lens, f"'.*l.pt' is no checkpoint of a lens. {instead}"),
        (str(mine), f"'.*lens.ckpt' is of another lens: its prompts or arguments were not these. {instead}"),
        (tmp_path, "is a folder: give the name of a file in it.$"),
        (5, "checkpoint=5: give the name of a file"),
    ):
        before = path.read_bytes() if isinstance(path, Path) and path.is_file() else None
        with pytest.raises(InputError, match=why):
            logit_lens(model, PROMPTS[:2], checkpoint=path)  # type: ignore[arg-type]
        assert before is None or Path(str(path)).read_bytes() == before
    with pytest.raises(
        ArtifactError, match=r"data.csv' can't be written: Not a directory \(.*data.csv\). Name another folder.$"
    ):
        logit_lens(model, PROMPTS[:2], checkpoint=inside)
    with pytest.raises(InputError, match="is of another lens"):
        logit_lens(model, PROMPTS, top_k=3, checkpoint=mine)
    assert load_artifact(mine).sections > 0


@pytest.mark.parametrize("left", [0, 600, -1])
def test_what_is_left_of_a_damaged_checkpoint_is_replaced(
    model: MuranoModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    path = tmp_path / "lens.ckpt"
    whole = logit_lens(model, PROMPTS, checkpoint=path)
    path.write_bytes(path.read_bytes()[:left])
    with caplog.at_level(logging.WARNING):
        again = logit_lens(model, PROMPTS, checkpoint=path)
    assert any(message.startswith("Starting over: Can't read ") for message in caplog.messages)
    assert fingerprint(again) == fingerprint(whole)
    assert load_artifact(path).sections > 0


def test_options_are_known_by_their_names(model: MuranoModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(**options: Any) -> Any:
        caplog.clear()
        lens = LogitLens(model, positions="last", **options)
        return Pipeline([LoadPrompts(PROMPTS), lens, Save(str(tmp_path), "run")]).run(resume=tmp_path / "run")

    with caplog.at_level(logging.WARNING):
        results = run(product="tiles", max_batch_tokens=64)
        assert results.history[1].call.endswith("positions='last', product='tiles', max_batch_tokens=64)")
        run(product="tiles", max_batch_tokens=64)
        assert any(message.startswith("Skipped LogitLens") for message in caplog.messages)
        run(product="tiles", max_batch_tokens=32)
        assert "Running LogitLens: changed since it was saved: argument 'max_batch_tokens'." in caplog.messages


def test_killed_at_random_moments(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "campaigns" / "resume_campaign.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "12"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong results: 0" in done.stdout
