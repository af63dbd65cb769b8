"""Loading a model: what is shown meanwhile, and what is refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers.utils import logging as bars

from murano.artifacts.model_name import model_name
from murano.model import MuranoModel
from murano.model.loading import Source, load_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a folder."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("hub_silent", [False, True])
def test_a_folder_loads_in_silence_and_leaves_the_bars_as_they_were(
    folder: Path, hub_silent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (disable_progress_bars if hub_silent else enable_progress_bars)()
    try:
        assert MuranoModel(folder).hf_model.training is False
        assert capfd.readouterr().err == ""
        assert (bars.is_progress_bar_enabled(), are_progress_bars_disabled()) == (True, hub_silent)
    finally:
        enable_progress_bars()


def test_a_folder_goes_by_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MuranoModel(folder).model_id == MuranoModel(f"{folder}/").model_id == "tiny"
    held = MuranoModel(folder).hf_model
    assert held.name_or_path == str(folder)
    assert MuranoModel(held, tokenizer=tiny_tokenizer()).model_id == "tiny"
    monkeypatch.chdir(folder)
    assert MuranoModel(".").model_id == "tiny"
    assert MuranoModel(folder).identity() != MuranoModel(".").identity(), "where it lies is part of which it is"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/mnt/runs/tuned/checkpoint-100/", "checkpoint-100"),
        ("runs/2026/tuned", "tuned"),
        ("~/tuned", "tuned"),
        ("C:\\runs\\tuned", "tuned"),
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46", "Qwen/Qwen3-8B"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_names_of_models(given: str, name: str) -> None:
    assert model_name(given) == name


def test_who_has_switched_the_bars_off_finds_them_off(folder: Path) -> None:
    bars.disable_progress_bar()
    try:
        assert MuranoModel(folder).hf_model.training is False
        assert not bars.is_progress_bar_enabled()
    finally:
        bars.enable_progress_bar()


@pytest.mark.parametrize("local", [True, False])
def test_a_download_shows_its_bars(folder: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    shown = []

    def load(*args: Any, **options: Any) -> Any:
        shown.append(bars.is_progress_bar_enabled())
        return tiny_model("llama")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    load_weights(Source("some/model", str(folder), local=local), None, None, None)
    assert shown == [not local]
