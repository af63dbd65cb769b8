"""Loading a model: what is shown meanwhile, and what is refused before."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as bars

from murano.artifacts.model_name import model_name
from murano.errors import InputError, ModelError
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
        return tiny_model("llama"), {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    load_weights(Source("some/model", str(folder), local=local), None, None, None)
    assert shown == [not local]


def _copy(folder: Path, to: Path, **config: Any) -> Path:
    """A folder with another config."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return to


def test_weights_that_are_missing_are_named_and_not_made_up(folder: Path, tmp_path: Path) -> None:
    config = tiny_model("llama").config
    config.tie_word_embeddings = False
    classifier = tmp_path / "classifier"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(classifier)
    tiny_tokenizer().save_pretrained(classifier)
    with pytest.raises(ModelError) as caught:
        MuranoModel(classifier).hf_model  # noqa: B018 - it loads
    assert str(caught.value) == (
        f"The weights of {str(classifier)!r} lack 1 tensor ('lm_head.weight') of LlamaForCausalLM: these would be random numbers. "
        "It was saved as LlamaForSequenceClassification: give the causal language model itself."
    )
    deeper = _copy(folder, tmp_path / "deeper", num_hidden_layers=5)
    with pytest.raises(ModelError) as caught:
        MuranoModel(deeper).check_readout()
    assert re.search(r"lack \d\d tensors \('model\.layers\.3\.[\w.]+', '[\w.]+', '[\w.]+', …\) of", str(caught.value))
    assert str(caught.value).endswith("Is its config.json that of these weights?")


def test_weights_of_another_shape_are_named(folder: Path, tmp_path: Path) -> None:
    wider = _copy(folder, tmp_path / "wider", vocab_size=300)
    with pytest.raises(ModelError) as caught:
        MuranoModel(wider).hf_model  # noqa: B018
    assert str(caught.value) == (
        f"The weights of {str(wider)!r} have another shape of 2 tensors ('lm_head.weight' ([256, 32], not [300, 32]), "
        "'model.embed_tokens.weight' ([256, 32], not [300, 32])) of LlamaForCausalLM: these would be random numbers. "
        "Is its config.json that of these weights?"
    )


def test_tied_and_superfluous_weights_are_no_fault(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "tied")
    tiny_tokenizer().save_pretrained(tmp_path / "tied")
    assert MuranoModel(tmp_path / "tied").check_readout().exact
    fewer = _copy(tmp_path / "tied", tmp_path / "fewer", n_layer=2, num_hidden_layers=2)
    assert MuranoModel(fewer).n_layers == 2


def test_buffers_that_are_missing_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("apertus")
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("act_fn.eps")}
    model.save_pretrained(tmp_path, state_dict=state)
    tiny_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "murano"):
        MuranoModel(tmp_path).hf_model  # noqa: B018
    assert "lack 3 buffers ('model.layers.0.mlp.act_fn.eps', " in caplog.text


def test_a_gguf_file_that_lacks_weights(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    for name, value in (
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("head_count", 4),
        ("head_count_kv", 4),
        ("vocab_size", 8),
    ):
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", torch.randn(8, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"The weights of 'tiny' lack \d+ tensors \(.*\) of LlamaForCausalLM"):
        MuranoModel(file, tokenizer=tiny_tokenizer()).hf_model  # noqa: B018


def test_a_tokenizer_by_its_folder(folder: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for model in (
        MuranoModel(folder, tokenizer=str(tmp_path / "tokenizer")),
        MuranoModel(tiny_model("llama"), tokenizer=folder),
    ):
        assert model.tokenizer("The city")["input_ids"] == tiny_tokenizer()("The city")["input_ids"]
    with pytest.raises(ModelError, match=r"There is no tokenizer's folder '.*tokenize'. Did you mean '.*tokenizer'\?"):
        MuranoModel(folder, tokenizer=str(tmp_path / "tokenize"))
    with pytest.raises(InputError, match=r"^tokenizer=3 is no tokenizer. Give a folder, a hub id or AutoTokenizer"):
        MuranoModel(folder, tokenizer=3)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
def test_a_folder_without_a_tokenizer(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer.* Give one: MuranoModel\(…, tokenizer='folder or hub id'\).$"):
        MuranoModel(tmp_path).tokenizer  # noqa: B018


def test_a_device_is_a_device_map(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^MuranoModel takes no 'device': write device_map='cuda'.$"):
        MuranoModel(folder, device="cuda")
    with pytest.raises(InputError, match=r"takes no 'dtyp'. Did you mean 'dtype'\? It takes: .*vLLM's engine"):
        MuranoModel(folder, dtyp="float32")
