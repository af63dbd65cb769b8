"""The step Save and Results.save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from murano import Pipeline, keys, load_logit_lens, load_run
from murano.errors import ArtifactError
from murano.results import Results
from murano.steps.base import step
from murano.steps.save import Save

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
from samples import small_results


def test_save_says_where(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    results = small_results(1)
    run_dir = Save(output_dir="murano_outputs", run_name="logit_lens", model_id="tiny")(results)[keys.OUTPUT_DIR]
    assert run_dir == "murano_outputs/logit_lens"
    reloaded = load_logit_lens(f"{run_dir}/logit_lens/logit_lens.pt")
    assert torch.equal(reloaded.max_probs, results[keys.LOGIT_LENS].max_probs)
    assert keys.OUTPUT_DIR not in load_run(run_dir)
    again = Save(output_dir="murano_outputs", run_name="logit_lens")(load_run(run_dir))[keys.OUTPUT_DIR]
    assert load_run(again)["score"] == 1


def test_save_in_a_pipeline(tmp_path: Path) -> None:
    @step(writes=["score"])
    def score() -> float:
        return 0.5

    pipeline = Pipeline([score, Save(tmp_path, "run")])
    assert pipeline.validate() == ["score", "output_dir"]
    assert f"{tmp_path}/run" in pipeline.plan()
    results = pipeline.run()
    run = load_run(results[keys.OUTPUT_DIR])
    assert run["score"] == 0.5
    assert [record.name for record in run.history] == ["score"]


def test_a_cell_can_be_run_again(tmp_path: Path) -> None:
    results = small_results(1)
    for score in (1, 2, 3):
        results["score"] = score
        Save(tmp_path, "run")(results)
        assert load_run(tmp_path / "run")["score"] == score


def test_default_names_do_not_replace_each_other(tmp_path: Path) -> None:
    one, two = (Save(tmp_path)(small_results(i))[keys.OUTPUT_DIR] for i in (1, 2))
    assert one != two and load_run(one)["score"] == 1 and load_run(two)["score"] == 2


def test_results_save_does_what_save_does(tmp_path: Path) -> None:
    results = small_results(2)
    folder = results.save(tmp_path, "run", model_id="tiny")
    assert folder == str(tmp_path / "run") == results[keys.OUTPUT_DIR]
    assert load_run(folder).metadata["model"]["model_id"] == "tiny"
    with pytest.raises(ArtifactError, match="no results"):
        Results().save(tmp_path, "run")


def test_the_step_reads_back() -> None:
    assert repr(Save()) == "Save()"
    assert repr(Save("out", run_name="a", model_id="m")) == "Save('out', run_name='a', model_id='m')"


@pytest.mark.parametrize("name", ["", ".hidden", "a//b", "x" * 201])
def test_an_unusable_name_is_refused_before_the_first_step_runs(tmp_path: Path, name: str) -> None:
    ran = []
    count = step(writes=["number"])(lambda: ran.append(1))
    with pytest.raises(ArtifactError, match="run_name"):
        Pipeline([count, Save(tmp_path, run_name=name)]).run()
    assert not ran


def test_an_unwritable_folder_is_refused_before_the_first_step_runs() -> None:
    """Linux's /proc takes no folder, not even from root."""
    ran = []

    @step(reads=[], writes=["number"])
    def count() -> int:
        ran.append(1)
        return 1

    with pytest.raises(ArtifactError, match=r"'/proc/murano' can't be written: .* Name another folder"):
        Pipeline([count, Save("/proc/murano", run_name="x")]).run()
    assert not ran


def test_a_run_without_its_manifest_is_told_no_other_name(tmp_path: Path) -> None:
    folder = Path(Save(tmp_path, "run")(small_results(1))[keys.OUTPUT_DIR])
    (folder / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"There is no '.*manifest.json'\. In '.*' there is: ") as caught:
        load_run(folder)
    assert "Did you mean" not in str(caught.value)
