"""Run folders: complete or not there, checked, lazy, and safe to name, move, damage and overwrite."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.lenses import make_generation

from murano import Key, keys, load_artifact
from murano.artifacts import folder as folders
from murano.artifacts import run as runs
from murano.artifacts.codec import artifact
from murano.artifacts.run import load_logit_lens, load_prompts, load_result, load_run, save_run, verify_run
from murano.artifacts.run_items import read_item
from murano.errors import ArtifactError, InputError, MissingKeyError
from murano.prompts import as_prompts
from murano.results import Results
from murano.show import show

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"
sys.path.insert(0, str(CAMPAIGNS))
from samples import small_lens, small_results, versions_in  # noqa: E402


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


# ----------------------------------------------------------------------------------------------- what is in the folder


def test_a_run_comes_back_whole(tmp_path: Path) -> None:
    results = small_results(7)
    folder = save_run(results, tmp_path, "run", model_id="tiny")
    assert folder == tmp_path / "run"
    assert tree(folder) == [
        "logit_lens/logit_lens.pt",
        "manifest.json",
        "metadata.json",
        "prompts/prompts.json",
        "score/score.json",
        "table/table.pt",
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]
    run = load_run(folder)
    assert list(run) == list(results)
    assert versions_in(run) == {7}
    assert run[keys.PROMPTS] == results[keys.PROMPTS]
    assert run["score"] == 7 and torch.equal(run["table"], results["table"])
    assert run.history == results.history
    assert run[keys.LOGIT_LENS].input_words[0] == [" word 7"] * 4
    assert torch.equal(load_logit_lens(folder).entropy, results[keys.LOGIT_LENS].entropy)
    assert torch.equal(load_logit_lens(folder / "logit_lens" / "logit_lens.pt").entropy, small_lens(7).entropy)
    assert load_prompts(folder / "prompts" / "prompts.json") == load_prompts(folder) == results[keys.PROMPTS]
    assert load_result(folder / "score" / "score.json", Key("score")) == 7


def test_metadata_says_what_made_the_run(tmp_path: Path) -> None:
    results = small_results(1)
    lens = results[keys.LOGIT_LENS]
    results[keys.LOGIT_LENS] = dataclasses.replace(lens, readout={**lens.readout, "worst": float("nan")})
    about = strict(save_run(results, tmp_path, "run", model_id="given") / "metadata.json")
    assert about["model"] == {
        "model_id": "given",
        "revision": "abc",
        "dtype": "float32",
        "device": "cpu",
        "n_layers": 2,
    }
    assert about["readout"]["logit_lens"] == {"exact": True, "max_difference": 0.0, "worst": "nan"}
    assert about["steps"][0]["call"] == "LogitLens(model, top_k=3)" and about["seconds"] == 0.25
    assert about["packages"]["torch"] == torch.__version__
    assert about["seeds"]["torch"] == torch.initial_seed()
    assert {"created", "git_commit", "python", "platform"} <= set(about)
    assert strict(tmp_path / "run" / "manifest.json")["files"].keys() == set(tree(tmp_path / "run")) - {"manifest.json"}


def test_prompts_are_readable_by_humans(tmp_path: Path) -> None:
    folder = save_run(small_results(1), tmp_path, "run")
    assert strict(folder / "prompts" / "prompts.json")["prompts"] == [{"text": "prompt 1"}, {"text": "another 日本語"}]
    assert '"text": "another 日本語"' in (folder / "prompts" / "prompts.json").read_text(encoding="utf-8")


def test_what_is_no_data_is_left_out_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    folder = save_run(Results(model=lambda: 0, score=0.5, pair=(1, float("nan")), cyclic=cyclic), tmp_path, "run")
    assert "Result 'model' is left out of the saved run: model is a builtins.function" in caplog.text
    assert "Result 'cyclic' is left out of the saved run: cyclic holds itself" in caplog.text
    run = load_run(folder)
    assert list(run) == ["score", "pair"] and run["pair"][0] == 1 and run["pair"][1] != run["pair"][1]
    assert run.metadata["left_out"] == {"model": "builtins.function", "cyclic": "builtins.list"}


def test_an_artifact_is_never_left_out(tmp_path: Path) -> None:
    @artifact
    @dataclass
    class Odd:
        SCHEMA: ClassVar[str] = "odd"
        SCHEMA_VERSION: ClassVar[int] = 1
        value: Any

    with pytest.raises(ArtifactError, match=r"Odd\.value is a builtins.function"):
        save_run(Results(odd=Odd(lambda: 0)), tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, eq=False)
class Mine:
    SCHEMA: ClassVar[str] = "mine"
    SCHEMA_VERSION: ClassVar[int] = 1
    value: Any
    extra: dict[str, Any] = field(default_factory=dict)


MINE: Key[Mine] = Key("mine", Mine)


def test_a_users_own_artifact_opens_by_its_key(tmp_path: Path) -> None:
    folder = save_run(Results(mine=Mine(torch.ones(2))), tmp_path, "run")
    with pytest.raises(ArtifactError, match="schema 'mine' is not known here"):
        load_run(folder)["mine"]
    assert load_run(folder)[MINE].value.tolist() == [1, 1]
    assert load_result(folder, MINE).value.tolist() == [1, 1]


def test_plots_are_copied_in(tmp_path: Path) -> None:
    for place in ("a", "b", "out/run"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "lens.png").write_text(place)
    results = small_results(1)
    results[keys.PLOTS] = [str(tmp_path / place / "lens.png") for place in ("a", "b", "out/run")] + ["gone.png"]
    folder = save_run(results, tmp_path / "out", "run")
    plots = load_run(folder)[keys.PLOTS]
    assert [Path(path).name for path in plots] == ["lens.png", "lens_2.png", "lens_3.png"]
    assert [Path(path).read_text() for path in plots] == ["a", "b", "out/run"]
    assert (folder / "lens.png").read_text() == "out/run"  # what lay there before stays there
    save_run(load_run(folder), tmp_path / "out", "run")
    assert [Path(path).read_text() for path in load_run(folder)[keys.PLOTS]] == ["a", "b", "out/run"]


def test_a_run_can_be_zipped_moved_and_opened(tmp_path: Path) -> None:
    save_run(small_results(3), tmp_path / "here", "run")
    shutil.make_archive(str(tmp_path / "run"), "zip", tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    shutil.unpack_archive(tmp_path / "run.zip", tmp_path / "there")
    assert versions_in(load_run(tmp_path / "there" / "run")) == {3} and verify_run(tmp_path / "there" / "run").ok


# ------------------------------------------------------------------------------------------------------------- loading


def test_results_of_a_run_are_opened_when_they_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_run(small_results(1), tmp_path, "run")
    opened: list[str] = []

    def noted(file: Any, name: str, expected: Any) -> Any:
        opened.append(name)
        return read_item(file, name, expected)

    monkeypatch.setattr(runs, "read_item", noted)
    run = load_run(folder)
    assert "logit_lens" in run and len(run) == 4 and "logit_lens: LogitLensResult" in repr(run)
    assert opened == []
    assert run["score"] == 1 and run["score"] == 1
    assert opened == ["score/score.json"]


def test_a_run_is_a_dict_in_every_way(tmp_path: Path) -> None:
    folder = save_run(Results(a=1, b=[2], c="3"), tmp_path, "run")
    whole = {"a": 1, "b": [2], "c": "3"}
    unpacked: dict[str, Any] = {**load_run(folder)}
    assert dict(load_run(folder)) == unpacked == load_run(folder) == Results(load_run(folder)) == whole
    assert load_run(folder).copy() == whole and load_run(folder) | {"d": 4} == {**whole, "d": 4}
    assert {"d": 4} | load_run(folder) == {"d": 4, **whole}
    assert list(load_run(folder).items()) == list(whole.items()) and list(load_run(folder).values()) == [1, [2], "3"]
    run = load_run(folder)
    assert run.get("b") == [2] and run.get("z") is None and run.get("z", 5) == 5
    assert run.setdefault("c", "x") == "3" and run.setdefault("d", 4) == 4
    assert run.pop("b") == [2] and run.pop("b", 0) == 0 and run.popitem() == ("d", 4)
    assert run == {"a": 1, "c": "3"} and run != {"a": 1}
    with pytest.raises(KeyError):
        run.pop("b")


def test_a_missing_result_lists_what_is_there(tmp_path: Path) -> None:
    folder = save_run(Results(score=1, scores=[2]), tmp_path, "run")
    with pytest.raises(MissingKeyError, match=r"No result 'logit_lens'.*'score', 'scores'"):
        load_logit_lens(folder)
    with pytest.raises(MissingKeyError, match=r"'\.\./x'"):
        load_run(folder)["../x"]
    with pytest.raises(InputError, match="'logit_lens' is a LogitLensResult, not a str"):
        save_run(Results(logit_lens="text"), tmp_path, "text")


def test_a_file_that_holds_something_else_says_what_opens_it(tmp_path: Path) -> None:
    folder = save_run(
        Results({"generation_lens": make_generation(), "prompts": as_prompts(["a"]), "score": 1, "t": torch.ones(2)}),
        tmp_path,
        "run",
    )
    generation, prompts = f"{folder}/generation_lens/generation_lens.pt", f"{folder}/prompts/prompts.json"
    whole = "The file is whole:"
    for call, path, message in (
        (
            load_logit_lens,
            generation,
            f"it holds a 'generation_lens', not a 'logit_lens'. {whole} load_artifact({generation!r}) opens it, load_run the run "
            "that it is in.",
        ),
        (
            load_prompts,
            generation,
            f"it holds a value of the type GenerationLensResult, not PromptBatch. {whole} load_artifact({generation!r}) opens it, ",
        ),
        (
            load_logit_lens,
            prompts,
            f"it holds a value of the type PromptBatch, not LogitLensResult. {whole} load_prompts({prompts!r}) opens it, ",
        ),
        (
            load_logit_lens,
            f"{folder}/score/score.json",
            f"it holds a value of the type int, not LogitLensResult. {whole} load_run the",
        ),
        (
            load_prompts,
            f"{folder}/t/t.pt",
            f"it holds a value of the type Tensor, not PromptBatch. {whole} load_run the run",
        ),
    ):
        with pytest.raises(ArtifactError) as caught:
            call(path)
        assert str(caught.value).startswith(f"Can't read {path!r}: {message}")
    assert load_artifact(generation).n_prompts == load_run(folder)[keys.GENERATION_LENS].n_prompts


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    save_run(Results(a=1), tmp_path, "first_run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"is no run: it has no manifest.json. Runs in .*: first_run\."):
        load_run(tmp_path)
    with pytest.raises(ArtifactError, match=r"There is no run .*Did you mean 'first_run'"):
        load_run(tmp_path / "first_rum")
    with pytest.raises(ArtifactError, match="is a file, and a run is a folder"):
        load_run(tmp_path / "file")
    with pytest.raises(ArtifactError):
        load_run("a\0b")
    for name in ("first_rum", "file", "."):
        with pytest.raises(ArtifactError):
            verify_run(tmp_path / name)
    with pytest.raises(ArtifactError, match=r"There is no '.*lens.pt'"):
        load_logit_lens(tmp_path / "lens.pt")


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(small_results(1), "out", "run")
    run = load_run("out/run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert versions_in(run) == {1}


def test_a_run_that_was_saved_again_is_not_mixed(tmp_path: Path) -> None:
    save_run(small_results(1), tmp_path, "run")
    run = load_run(tmp_path / "run")
    assert run["score"] == 1
    save_run(small_results(2), tmp_path, "run")
    with pytest.raises(ArtifactError, match="the run was saved again since it was opened"):
        run[keys.LOGIT_LENS]


# -------------------------------------------------------------------------------------------------------------- naming


@pytest.mark.parametrize(
    "name",
    ["../x", "/tmp/x", "a/../../x", "a/..", "..", ".", "", " ", "a\0b", "a//b", ".hidden", "a\\b", "a\nb", "x/", 3],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ArtifactError, match="run_name"):
        save_run(Results(a=1), tmp_path / "out", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".x", "manifest.json", "Metadata.JSON", "a\0b"])
def test_a_result_whose_name_leads_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    error, said = (ArtifactError, "The result") if key else (InputError, "'' is no name of a result")
    with pytest.raises(error, match=said):
        save_run(Results({key: 1, "b": 2}), tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_names_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="'A' would be saved over the result 'a'"):
        save_run(Results(a=1, A=2), tmp_path, "run")


@pytest.mark.parametrize("name", ["a b", "été", "v1.2", "a:b", "gpt2/lens", "-x", "%s{}"])
def test_odd_names_that_lead_nowhere_else_are_allowed(tmp_path: Path, name: str) -> None:
    folder = save_run(Results({name.replace("/", "_"): 1}), tmp_path, name)
    assert list(load_run(folder).values()) == [1] and folder == tmp_path / name


def test_a_run_inside_a_run_is_refused(tmp_path: Path) -> None:
    save_run(Results(a=1), tmp_path, "run")
    with pytest.raises(ArtifactError, match="is a run, and a run can't be saved inside another"):
        save_run(Results(a=1), tmp_path, "run/inner")


def test_a_default_name_is_never_used_twice(tmp_path: Path) -> None:
    made = {save_run(small_results(i), tmp_path).name for i in range(3)}
    assert len(made) == 3 and all(name.startswith("logit_lens_20") for name in made)
    assert sorted(versions_in(load_run(tmp_path / name)).pop() for name in made) == [0, 1, 2]


# --------------------------------------------------------------------------------------------------------- overwriting


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: Any, monkeypatch: Any) -> str:
    """Both ways of swapping folders: in one step, and in two where the file system knows no better."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return str(request.param)


def test_saving_again_replaces_the_run_and_keeps_what_others_put_there(tmp_path: Path, swap: str) -> None:
    save_run(Results(old=1, a=1), tmp_path, "run")
    (tmp_path / "run" / "notes.md").write_text("mine")
    (tmp_path / "run" / "more").mkdir()
    (tmp_path / "run" / "more" / "x.csv").write_text("mine too")
    (tmp_path / "run" / "link").symlink_to("more")
    save_run(Results(a=2), tmp_path, "run")
    assert dict(load_run(tmp_path / "run")) == {"a": 2}
    assert tree(tmp_path / "run") == ["a/a.json", "manifest.json", "metadata.json", "more/x.csv", "notes.md"]
    assert os.readlink(tmp_path / "run" / "link") == "more"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert verify_run(tmp_path / "run").ok


def test_overwriting_can_be_forbidden(tmp_path: Path) -> None:
    save_run(Results(a=1), tmp_path, "run")
    with pytest.raises(ArtifactError, match="There is a .*run' already"):
        save_run(Results(a=2), tmp_path, "run", overwrite=False)
    assert load_run(tmp_path / "run")["a"] == 1


def test_a_folder_of_something_else_is_not_taken_over(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(folders, "MAX_FOREIGN_FILES", 3)
    (tmp_path / "project").mkdir()
    for i in range(5):
        (tmp_path / "project" / f"{i}.py").write_text("")
    with pytest.raises(ArtifactError, match="is no run and is in use for something else"):
        save_run(Results(a=1), tmp_path, "project")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ArtifactError, match="is no run and is in use for something else"):
        save_run(Results(a=1), tmp_path, "here")
    assert len(tree(tmp_path)) == 5


def test_a_symlink_to_a_run_stays_one(tmp_path: Path) -> None:
    save_run(Results(a=1), tmp_path / "big_disk", "run")
    (tmp_path / "run").symlink_to(tmp_path / "big_disk" / "run")
    save_run(Results(a=2), tmp_path, "run")
    assert (tmp_path / "run").is_symlink() and load_run(tmp_path / "big_disk" / "run")["a"] == 2


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with folders.new_folder(tmp_path / "run", lambda folder: None) as new:
        with pytest.raises(
            ArtifactError, match=rf"is being written by process {os.getpid()} on .*choose another run_name"
        ):
            save_run(Results(a=1), tmp_path, "run")
        (new / "whole").write_text("")
    assert tree(tmp_path) == ["run/whole"]


def test_many_writers_do_not_mix(tmp_path: Path, swap: str) -> None:
    refused: list[str] = []

    def write(version: int) -> None:
        for _ in range(4):
            try:
                save_run(small_results(version), tmp_path, "run")
            except ArtifactError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=write, args=(version,)) for version in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(versions_in(load_run(tmp_path / "run"))) == 1 and verify_run(tmp_path / "run").ok
    assert all("is being written by" in message for message in refused)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: Any) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    left = tmp_path / ".run.unfinished-123-0123abcd"  # perhaps of a writer that is alive: it is left alone
    left.mkdir()
    monkeypatch.setattr("murano.artifacts.folder.fcntl.flock", no_locks)
    for version in (1, 2):
        save_run(small_results(version), tmp_path, "run")
        assert versions_in(load_run(tmp_path / "run")) == {version}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [left.name, "run"]


def test_what_a_killed_writer_left_is_recognised_and_removed(tmp_path: Path) -> None:
    save_run(Results(a=1), tmp_path, "run")
    left = tmp_path / ".run.unfinished-123-0123abcd"
    shutil.copytree(tmp_path / "run", left)
    (left / "manifest.json").unlink()
    (left / "metadata.json").unlink()
    (tmp_path / ".run.lock").write_text("process 123 on elsewhere")
    other = tmp_path / ".run.unfinished-1-0123abcd.unfinished-123-0123abcd"  # of another run with an odd name
    other.mkdir()
    with pytest.raises(ArtifactError, match="what a killed process left"):
        load_run(left)
    assert load_run(tmp_path / "run")["a"] == 1
    save_run(Results(a=2), tmp_path, "run")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([other.name, "run"])


def test_a_run_between_two_renames_is_found(tmp_path: Path) -> None:
    save_run(small_results(1), tmp_path, "run")
    aside = tmp_path / ".run.previous-123-0123abcd"
    (tmp_path / "run").rename(aside)
    assert load_logit_lens(tmp_path / "run" / "logit_lens" / "logit_lens.pt").input_ids[0, 0] == 1
    (tmp_path / "run").rename(aside)
    assert versions_in(load_run(tmp_path / "run")) == {1} and not aside.exists()
    (tmp_path / "run").rename(aside)
    with folders._lock(tmp_path / "run"):  # the writer is alive: it is read where it is
        assert versions_in(load_run(tmp_path / "run")) == {1} and aside.exists()
    save_run(small_results(2), tmp_path, "run")
    assert versions_in(load_run(tmp_path / "run")) == {2} and not aside.exists()


# ------------------------------------------------------------------------------------------- what can't be written


def test_a_folder_that_can_not_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    for output_dir, name in ((tmp_path / "file", "run"), (tmp_path, "file"), (tmp_path / "file" / "deeper", "run")):
        with pytest.raises(ArtifactError, match="Can't save"):
            save_run(Results(a=1), output_dir, name)
    for name in ("x" * 300, "a/" + "x" * 300, "é" * 101):
        with pytest.raises(ArtifactError, match="is too long: (300|202) bytes, where 200 are allowed.$") as caught:
            save_run(Results(a=1), tmp_path, name)
        assert len(str(caught.value)) < 100
    assert tree(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "in the way"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: Any, swap: str) -> None:
    save_run(Results(a=1), tmp_path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in ("old", "new", "deep/er"):
        with pytest.raises(ArtifactError, match=rf"Can't save '.*{name}': No space left on device"):
            save_run(Results(a=2), tmp_path, name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]
    assert load_run(tmp_path / "old")["a"] == 1


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no results to save"):
        save_run(Results(), tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- integrity


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return save_run(small_results(1), tmp_path, "run")


def flip(path: Path, position: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_damaged_artifact_is_named_and_the_rest_is_readable(run_folder: Path) -> None:
    flip(run_folder / "logit_lens" / "logit_lens.pt")
    (run_folder / "score" / "score.json").unlink()
    check = verify_run(run_folder)
    assert not check.ok and set(check.faults) == {"logit_lens/logit_lens.pt", "score/score.json"}
    assert check.faults["score/score.json"] == "missing" and "prompts/prompts.json" in check.good
    run = load_run(run_folder)
    with pytest.raises(ArtifactError, match=r"logit_lens\.pt.*damaged"):
        run[keys.LOGIT_LENS]
    with pytest.raises(ArtifactError, match=r"There is no .*score\.json"):
        run["score"]
    assert len(run[keys.PROMPTS]) == 2


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json"])
@pytest.mark.parametrize("damage", ["flip", "empty", "missing"])
def test_a_damaged_head_says_what_is_still_readable(run_folder: Path, name: str, damage: str) -> None:
    {"flip": flip, "empty": lambda path: path.write_bytes(b""), "missing": Path.unlink}[damage](run_folder / name)
    with pytest.raises(
        ArtifactError, match=rf"{name}.*Still readable.*logit_lens/logit_lens\.pt, prompts/prompts\.json"
    ):
        load_run(run_folder)
    assert name in verify_run(run_folder).faults
    assert load_logit_lens(run_folder / "logit_lens" / "logit_lens.pt").input_ids[0, 0] == 1


def test_an_edited_file_is_not_taken_for_the_saved_one(run_folder: Path) -> None:
    path = run_folder / "prompts" / "prompts.json"
    path.write_text(path.read_text(encoding="utf-8").replace("prompt 1", "prompt 2"), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"prompts\.json.*damaged or was edited"):
        load_run(run_folder)[keys.PROMPTS]
    with pytest.raises(ArtifactError, match=r"prompts\.json.*damaged or was edited"):
        load_prompts(path)


def test_a_manifest_can_not_lead_out_of_the_run(run_folder: Path) -> None:
    from murano.artifacts.store import json_bytes

    files = {"../../etc/passwd": {"sha256": "0" * 64, "bytes": 1}}
    (run_folder / "manifest.json").write_bytes(json_bytes("manifest", 1, {"files": files}))
    with pytest.raises(ArtifactError, match="names a file outside the run"):
        load_run(run_folder)
    assert "manifest.json" in verify_run(run_folder).faults


def test_metadata_of_another_kind_is_one_error(run_folder: Path) -> None:
    from murano.artifacts.run_save import _describe
    from murano.artifacts.store import json_bytes

    for kind, version, content in (("run", 1, {}), ("run", 9, {}), ("value", 1, {}), ("run", 1, {"artifacts": [1]})):
        (run_folder / "metadata.json").write_bytes(json_bytes(kind, version, content))
        files = {"metadata.json": _describe(run_folder / "metadata.json")}
        (run_folder / "manifest.json").write_bytes(json_bytes("manifest", 1, {"files": files}))
        with pytest.raises(ArtifactError, match=r"metadata\.json"):
            load_run(run_folder)


def test_show_tells_what_is_in_a_run(run_folder: Path) -> None:
    text = show(run_folder)
    for part in (
        "tiny",
        "revision abc",
        "LogitLens(model, top_k=3)",
        "logit_lens/logit_lens.pt",
        "exact True (whether the logits that were read equal the model's own to the bit)",
        "\n             max_difference 0 (between the two, of one logit)\n",
        "torch",
    ):
        assert part in text
    n_files = sum(path.is_file() for path in run_folder.rglob("*"))
    assert f", {n_files} files, " in text
    assert f": all {n_files} files are as they were saved." in show(run_folder, verify=True)
    flip(run_folder / "table" / "table.pt")
    damaged = show(run_folder, verify=True)
    assert f": 1 of {n_files} files is damaged." in damaged
    assert "table/table.pt: its bytes are not those that were saved" in damaged
    with pytest.raises(ArtifactError):
        show(run_folder.parent)


def test_a_run_of_the_first_version_opens_for_ever() -> None:
    folder = Path(__file__).parents[1] / "data" / "run_v1"
    assert verify_run(folder).ok
    run = load_run(folder)
    assert list(run) == ["prompts", "logit_lens", "score", "pair", "table", "plots"]
    lens = run[keys.LOGIT_LENS]
    assert run[keys.PROMPTS].texts == ["The capital of France is", "日本"]
    assert [str(address) for address in lens.addresses] == ["embeddings", "L0.resid_post", "L1.resid_post"]
    assert lens.input_words[1] == ["", "", "日", "本"] and lens.predicted_words[-1][0][-1] == " Paris"
    assert lens.max_probs[-1, 0, -1].item() == 0.75 and lens.max_probs[0, 1, 0].isnan()
    assert lens.entropy.dtype == torch.float32 and lens.stats["rank"].dtype == torch.bfloat16
    assert lens.model["model_id"] == "tiny" and lens.notes == ("made by tests/data/make_run_v1.py",)
    assert run["score"] == 0.75 and run["pair"] == (1, float("inf")) and run["table"].shape == (0, 3)
    assert Path(run[keys.PLOTS][0]).read_bytes().startswith(b"\x89PNG")
    assert run.history[1].call == "LogitLens(model, layers='all', top_k=2)"


# ----------------------------------------------------------------------------------- short versions of the campaigns


def campaign(script: str, *arguments: str) -> dict[str, Any]:
    root = str(CAMPAIGNS.parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_short_fault_campaign() -> None:
    report = campaign("fault_campaign.py", "--kills", "20", "--every", "11", "--seed", "1")
    assert report["kills"] >= 20 and report["bad_runs"] == report["lost_runs"] == 0


def test_short_damage_campaign() -> None:
    report = campaign("damage_campaign.py", "--files", "150", "--seed", "1")
    assert report["files"] >= 150 and report["wrong"] == report["executed"] == 0


def test_nothing_is_logged_when_all_is_well(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG, logger="murano"):
        versions_in(load_run(save_run(small_results(1), tmp_path, "run")))
    assert caplog.records == []
