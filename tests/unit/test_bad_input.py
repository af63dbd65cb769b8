"""What can't be read is refused by one clear error, before any forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reading import forwards
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano import keys
from murano.errors import ArtifactError, InputError, ModelError, MuranoError
from murano.lens import logit_lens
from murano.model import MuranoModel
from murano.model.loading import check_devices
from murano.pipeline import Pipeline
from murano.steps import LoadPrompts, LogitLens, Save


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    model = MuranoModel(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    assert model.check_readout().exact
    model.ending  # noqa: B018 - found by a forward of its own
    return model


@pytest.fixture(autouse=True)
def no_forward(model: MuranoModel) -> Iterator[None]:
    """Nothing in this file may run the model, except where it says so."""
    with forwards(model.hf_model) as ran:
        yield
    assert ran == [0]


def refuse(error: type[MuranoError], message: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "There are no prompts."),
        ([""], "Prompt 0 is empty: ''"),
        (["The city", "   "], "Prompt 1 holds only whitespace"),
        ([None], "Prompt 0 is a NoneType"),
        (["The city", [20] * 161], "Prompt 1 has 161 tokens, but the model's context is 160"),
        (
            [[20, 256]],
            "Prompt 0 has token id 256, but the model embeds ids 0 to 255 only: this tokenizer does not belong to this model",
        ),
    ],
)
def test_prompts(model: MuranoModel, prompts: Any, message: str) -> None:
    refuse(InputError, message, lambda: logit_lens(model, prompts))
    if len(prompts) > 1:
        refuse(InputError, ". With on_error='skip' it is left out.", lambda: logit_lens(model, prompts))
    refuse(InputError, message, lambda: model.capture(prompts, 0))
    refuse(InputError, message, lambda: Pipeline([LoadPrompts(prompts), LogitLens(model)]).run())


def test_a_prompt_as_long_as_the_context_is_read(model: MuranoModel) -> None:
    with forwards(model.hf_model) as ran:
        assert len(model._encode_all([[20] * 160])[0]) == 160
    assert ran == [0]


def test_a_bare_string_is_one_prompt(model: MuranoModel) -> None:
    assert LoadPrompts("The city")()[keys.PROMPTS].texts == ["The city"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (99, "Layer 99 is outside the model, which has 3 layers: use 0 to 2, or -1 for the last."),
        ([0, 3], "Layer 3 is outside the model"),
        (-4, "Layer -4 is outside the model"),
        ("foo", "Unknown component 'foo'"),
        (["L0.resid_pst"], "Unknown component 'resid_pst'. Did you mean 'resid_post'?"),
        ([0, 0], "'L0.resid_post' is named twice in layers=[0, 0]."),
        ([2, -1], "'L2.resid_post' is named twice in layers=[2, -1]."),
        (["all", 1], "'L1.resid_post' is named twice"),
        ([], "layers=[] names no layer."),
        (range(0), "names no layer."),
        (1.5, "layers=1.5 is neither 'all' nor a layer nor a list of layers."),
        (None, "layers=None is neither 'all' nor a layer"),
        ([True], "True is not a layer or an address"),
        ("L0.attn_out", "A lens can't be put on 'L0.attn_out'"),
        ("mlp_output[2]", "A lens can't be put on 'L2.mlp_out'"),
        ("logits", "it is already over the vocabulary"),
    ],
)
def test_layers(model: MuranoModel, layers: Any, message: str) -> None:
    refuse(InputError, message, lambda: logit_lens(model, [[20, 21]], layers=layers))
    refuse(InputError, message, lambda: Pipeline([LoadPrompts([[20, 21]]), LogitLens(model, layers=layers)]).run())


@pytest.mark.parametrize("top_k", [0, -1, 257, 1.0, None, "5", True])
def test_top_k(model: MuranoModel, top_k: Any) -> None:
    message = f"top_k={top_k!r}: it must be a whole number from 1"
    refuse(InputError, message, lambda: logit_lens(model, [[20, 21]], top_k=top_k))
    refuse(InputError, message, lambda: Pipeline([LoadPrompts([[20, 21]]), LogitLens(model, top_k=top_k)]).run())


def test_top_k_beyond_the_vocabulary_names_its_size(model: MuranoModel) -> None:
    refuse(InputError, "from 1 to 256, the size of the vocabulary", lambda: logit_lens(model, [[20]], top_k=257))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ("first", "positions='first' is unknown. Use 'all', 'last', or token indices"),
        ([], "positions is empty"),
        (1.5, "positions=1.5 is unknown"),
        ([0, "x"], "positions=[0, 'x'] is unknown"),
        ([0, 2], "Prompt 0 has 2 tokens, so it has no position 2"),
        (-3, "Prompt 0 has 2 tokens, so it has no position -3"),
    ],
)
def test_positions(model: MuranoModel, positions: Any, message: str) -> None:
    refuse(InputError, message, lambda: logit_lens(model, [[20, 21]], positions=positions))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "everything"}, "keep='everything' is unknown. Use keep='residuals' or keep='logits'."),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown. Use on_error='raise' or on_error='skip'."),
        ({"max_chunk_bytes": 100}, "max_chunk_bytes=100 has no room for one row of logits: use at least 1024."),
    ],
)
def test_options(model: MuranoModel, options: dict[str, Any], message: str) -> None:
    refuse(InputError, message, lambda: logit_lens(model, [[20, 21]], **options))


def test_unknown_options_and_no_model(model: MuranoModel) -> None:
    refuse(InputError, "LogitLens takes no 'topk'", lambda: LogitLens(model, topk=3))
    refuse(InputError, "LogitLens needs a MuranoModel, not a GPT2LMHeadModel", lambda: LogitLens(model.hf_model))
    refuse(InputError, "LogitLens needs a MuranoModel, not a str", lambda: LogitLens("gpt2"))


def test_sources(tmp_path: Path, model: MuranoModel) -> None:
    refuse(ModelError, "is no model folder: it has no config.json. It holds: nothing.", lambda: MuranoModel(tmp_path))
    (tmp_path / "weights.gguf").touch()
    refuse(ModelError, "Give the file itself", lambda: MuranoModel(tmp_path))
    refuse(ModelError, "There is no model folder", lambda: MuranoModel(tmp_path / "missing"))
    text = tmp_path / "model.bin"
    text.write_text("x")
    refuse(ModelError, "is a file, but not a .gguf file", lambda: MuranoModel(text))
    refuse(ModelError, "is neither a folder nor a hub id", lambda: MuranoModel("no spaces/in ids"))
    refuse(ModelError, "'' names no model. Give a folder, a .gguf file or a hub id", lambda: MuranoModel(""))
    refuse(
        ModelError, "A model is a folder, a file, a hub id or a transformers model, not a int", lambda: MuranoModel(3)
    )  # type: ignore[arg-type]
    refuse(InputError, "A model that is already loaded needs its tokenizer", lambda: MuranoModel(model.hf_model))
    refuse(InputError, "'float31' is no dtype", lambda: MuranoModel(tmp_path, dtype="float31"))


@pytest.mark.parametrize(
    ("device_map", "n_devices", "message"),
    [
        ("cuda", 0, "device_map='cuda': torch finds no CUDA devices on this machine. Without device_map"),
        ("cuda:2", 2, "device_map='cuda:2': torch finds 2 CUDA devices on this machine."),
        ({"": torch.device("cuda", 0)}, 0, "torch finds no CUDA devices"),
        ("gpu", 1, "device_map='gpu': 'gpu' is no device. Use 'auto', 'cpu', 'cuda' or 'cuda:1'."),
        (0, 0, "device_map=0: "),
        (1.5, 1, "device_map=1.5: 1.5 is no device"),
    ],
)
def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_map: Any, n_devices: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
    refuse(InputError, message, lambda: MuranoModel(tmp_path, device_map=device_map))


@pytest.mark.parametrize("device_map", [None, "auto", "cpu", "cuda:1", {"a": "cpu", "b": "disk"}])
def test_devices_that_are(monkeypatch: pytest.MonkeyPatch, device_map: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(device_map)


def test_a_folder_with_a_damaged_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="The config of .* can't be loaded"):
        MuranoModel(tmp_path)


def test_a_model_that_is_no_causal_lm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(
        ModelError, match=r"is a 'vit' model, which is no causal language model.*gpt2 and llama among them"
    ):
        MuranoModel(tmp_path)


def test_layers_are_refused_before_the_weights_load(tmp_path: Path) -> None:
    module = tiny_model("llama")
    module.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    model = MuranoModel(tmp_path)
    refuse(InputError, "Layer 7 is outside the model, which has 3 layers", lambda: LogitLens(model, layers=7))
    refuse(InputError, "A lens can't be put on 'L0.mlp_out'", lambda: LogitLens(model, layers="L0.mlp_out"))
    with pytest.raises(ModelError, match="The weights of .* can't be loaded"):
        logit_lens(model, "The city")


@pytest.mark.parametrize("kind", ["file", "device"])
def test_an_output_folder_that_cannot_be_written(model: MuranoModel, tmp_path: Path, kind: str) -> None:
    results = LoadPrompts([[20, 21]])()
    blocked = tmp_path / "blocked"
    blocked.write_text("in the way")
    target = blocked if kind == "file" else Path("/proc/nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError) as caught:
        Save(output_dir=target, run_name="run")(results)
    assert str(target) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert blocked.read_text() == "in the way"
    assert keys.OUTPUT_DIR not in results


def test_a_truncated_or_foreign_file(tmp_path: Path) -> None:
    from murano import load_logit_lens

    foreign = tmp_path / "foreign.pt"
    torch.save({"a": torch.ones(2)}, foreign)
    with pytest.raises(ArtifactError, match=r"foreign\.pt"):
        load_logit_lens(foreign)
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes(foreign.read_bytes()[:200])
    with pytest.raises(ArtifactError, match=r"truncated\.pt"):
        load_logit_lens(truncated)
    with pytest.raises(ArtifactError, match=r"missing\.pt"):
        load_logit_lens(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"product": "trch"}, "product='trch' is unknown. Did you mean 'torch'"),
        ({"product": None}, "product=None is unknown. Use product='auto'"),
        ({"keep": ("logits",)}, "keep=.* is unknown. Use keep='residuals' or keep='logits'"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown"),
        ({"apart": "no"}, "apart='no' must be True or False"),
        ({"max_chunk_bytes": "32MB"}, "max_chunk_bytes='32MB': it must be a whole number"),
        ({"max_chunk_bytes": 1.5}, "max_chunk_bytes=1.5: it must be a whole number"),
        ({"max_chunk_bytes": True}, "max_chunk_bytes=True: it must be a whole number"),
        ({"max_chunk_bytes": -1}, "max_chunk_bytes=-1: it must be a whole number"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0: it must be a whole number"),
        ({"topk": 3}, "takes no 'topk'. Did you mean 'top_k'"),
    ],
)
def test_options_are_checked_when_the_step_is_made(model: MuranoModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LogitLens(model, **options)
    if "topk" not in options:
        with pytest.raises(InputError, match=message):
            logit_lens(model, "a b", **options)
