"""The store: everything comes back bit for bit, nothing is executed, and what is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from murano.address import Address
from murano.artifacts import codec, store
from murano.artifacts.codec import DIGEST, JSON, PT, artifact, fingerprint, migration, pack, unpack
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.store import load_artifact, save_artifact
from murano.artifacts.words import TokenWords
from murano.errors import ArtifactError
from murano.prompts import Prompt, PromptBatch

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
from samples import small_lens

COMMON = settings(
    max_examples=int(os.environ.get("MURANO_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@artifact
@dataclass(frozen=True, eq=False)
class Anything:
    """An artifact that holds whatever it is given."""

    SCHEMA: ClassVar[str] = "anything"
    SCHEMA_VERSION: ClassVar[int] = 1

    value: Any
    extra: Mapping[str, Any] = field(default_factory=dict)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal bit for bit and type for type."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and raw(one) == raw(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (one != one and other != other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, TokenWords):
        return dict(one) == dict(other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(*keys) and same(one[keys[0]], other[keys[1]]) for keys in zip(one, other, strict=True)
        )
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten())
    return flat.view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------------------- round trips

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@st.composite
def tensors(draw: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, shape: Any = None) -> torch.Tensor:
    """A tensor of any bits (so with NaN, infinities and negative zeros), some of them views of a larger storage."""
    dtype = draw(st.sampled_from(dtypes))
    size = draw(shape if shape is not None else st.lists(st.integers(0, 3), max_size=4).map(tuple))
    count = int(np.prod(size)) if size else 1
    if dtype is torch.bool:
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype)
    else:
        width = torch.empty(0, dtype=dtype).element_size()
        data = draw(st.binary(min_size=count * width, max_size=count * width))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(size)
    return torch.stack([tensor, tensor], -1)[..., 0] if draw(st.booleans()) else tensor


TEXTS = st.text(st.characters(), max_size=8) | st.text(st.characters(categories=("Cs", "Cc", "Zs", "So")), max_size=4)
ODD = st.sampled_from([Address(3), Address(None, "embeddings"), torch.bfloat16, torch.device("cpu"), 1 + 2j])
NUMBERS = st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats()
LEAVES = st.none() | NUMBERS | TEXTS | st.binary(max_size=8) | tensors() | ODD
KEYS = TEXTS | st.integers() | st.tuples(st.integers(), TEXTS) | st.just("murano:address") | st.just(Address(1))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(st.integers() | TEXTS, max_size=3)
    ),
    max_leaves=8,
)


def reload(value: Any) -> Any:
    file = io.BytesIO()
    store.write(file, value)
    return store.read(file)


@COMMON
@given(VALUES)
def test_any_value_comes_back_from_a_file(value: Any) -> None:
    assert same(reload(Anything(value)).value, value)


@COMMON
@given(VALUES)
def test_any_value_comes_back_from_strict_json(value: Any) -> None:
    text = store.json_bytes("value", 1, {"value": pack(value, JSON)})
    assert same(unpack(store.read_json(text, "value", 1)["value"]), value)


@st.composite
def lenses(draw: Any) -> LogitLensResult:
    layers, prompts, positions = draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 4))
    k = draw(st.integers(1, 3))
    cell, ids = (layers, prompts, positions), st.integers(-1, 40)

    def of(values: Any, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(size))
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype).reshape(size)

    floats = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return LogitLensResult(
        addresses=tuple(Address(layer) for layer in range(layers)),
        top_ids=of(ids, (*cell, k), draw(st.sampled_from([torch.int64, torch.int32]))),
        top_probs=draw(tensors((floats,), st.just((*cell, k)))),
        entropy=draw(tensors((floats,), st.just(cell))),
        log_normalizer=draw(tensors((floats,), st.just(cell))),
        input_ids=of(ids, (prompts, positions), torch.int64),
        attention_mask=of(st.booleans(), (prompts, positions), torch.bool),
        position_index=of(ids, (prompts, positions), torch.int64),
        words=TokenWords(decode=lambda token_id: draw(TEXTS)),
        model=draw(st.dictionaries(TEXTS, LEAVES, max_size=2)),
        stats=draw(st.dictionaries(TEXTS, tensors((floats,), st.just(cell)), max_size=2)),
        notes=tuple(draw(st.lists(TEXTS, max_size=2))),
    )


@COMMON
@given(lenses())
def test_any_lens_comes_back_from_a_file(lens: LogitLensResult) -> None:
    loaded = reload(lens)
    for f in dataclasses.fields(lens):
        if f.name != "words":
            assert same(getattr(loaded, f.name), getattr(lens, f.name)), f.name
    assert dict(loaded.words) == {-1: "", **lens.words.of(lens.top_ids, lens.input_ids)}
    assert fingerprint(loaded) == fingerprint(lens)


def test_prompts_come_back_as_they_were() -> None:
    batch = PromptBatch(
        [
            Prompt(text="a", metadata={"pair": (1, float("inf")), "ids": torch.arange(2)}),
            Prompt(messages=({"role": "user", "content": "\ud800 日本"},)),
            Prompt(token_ids=(1, 2)),
        ]
    )
    packed = pack(batch, JSON)
    assert json.loads(json.dumps(packed, allow_nan=False)) == packed
    back = unpack(packed)
    assert same(back[0].metadata, batch[0].metadata)
    assert list(back)[1:] == list(batch)[1:]
    assert same(reload(Anything(batch)).value[0].metadata, batch[0].metadata)


def test_what_is_nearly_plain_becomes_plain() -> None:
    value = {
        "float": np.float32(0.5),
        "int": np.int64(3),
        "bool": np.bool_(True),
        "array": np.arange(3),
        "path": Path("a"),
    }
    back = reload(Anything(value)).value
    assert back["float"] == 0.5 and type(back["float"]) is float
    assert back["int"] == 3 and type(back["int"]) is int
    assert back["bool"] is True
    assert isinstance(back["array"], np.ndarray) and (back["array"] == np.arange(3)).all()
    assert back["path"] == Path("a")


def test_artifacts_may_hold_artifacts() -> None:
    back = reload(Anything({"before": small_lens(1), "after": [small_lens(2)]})).value
    assert same(back["before"].entropy, small_lens(1).entropy)
    assert back["after"][0].input_words[0] == [" word 2"] * 4


def test_a_file_is_as_big_as_its_data(tmp_path: Path) -> None:
    base = torch.zeros(1_000_000)
    save_artifact(tmp_path / "a.pt", Anything([base[:10], base.view(1000, 1000)[:, 3], torch.zeros(5).expand(3, 5)]))
    assert (tmp_path / "a.pt").stat().st_size < 10_000


def test_only_the_words_that_occur_are_saved() -> None:
    assert dict(reload(small_lens(5)).words) == {-1: "", 5: " word 5"}


def test_any_torch_program_can_read_a_file(tmp_path: Path) -> None:
    save_artifact(tmp_path / "a.pt", small_lens(3))
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content["murano"] == "logit_lens" and content["schema_version"] == 1
    assert same(content["fields"]["entropy"], small_lens(3).entropy)
    assert zipfile.is_zipfile(tmp_path / "a.pt")


def test_what_requires_grad_or_came_from_inference_mode_is_saved() -> None:
    with torch.inference_mode():
        inferred = torch.arange(6.0).reshape(2, 3)[:, 1]
    back = reload(Anything([inferred, torch.nn.Parameter(torch.ones(2))])).value
    assert same(back, [torch.tensor([1.0, 4.0]), torch.ones(2)])


# ------------------------------------------------------------------------------------------------------ fingerprints


def test_fingerprints_tell_values_apart() -> None:
    values = [
        1,
        True,
        1.0,
        "1",
        None,
        [1],
        (1,),
        {"a": 1},
        {"a": 2},
        Address(1),
        "L1.resid_post",
        0.0,
        -0.0,
        float("nan"),
    ]
    values += [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, 2),
        torch.ones(2),
        small_lens(1),
        small_lens(2),
    ]
    assert len({fingerprint(value) for value in values}) == len(values)


def test_fingerprints_are_stable() -> None:
    assert fingerprint({"b": (1, None), "a": torch.arange(4)[::2]}) == fingerprint(
        {"a": torch.tensor([0, 2]), "b": (1, None)}
    )
    for_ever = "1237d7a637590accbc76586f20e22adf26631d85c4e04577ceef30d1be0bec85"
    assert fingerprint({"layers": "all", "top_k": 5}) == for_ever


def test_a_digest_does_not_hold_the_tensor() -> None:
    assert len(json.dumps(pack(torch.zeros(10_000), DIGEST))) < 200


# ---------------------------------------------------------------------------------------------------------- versions


@artifact
@dataclass(frozen=True, eq=False)
class Shout:
    """An artifact that has changed twice."""

    SCHEMA: ClassVar[str] = "shout"
    SCHEMA_VERSION: ClassVar[int] = 3

    text: str
    volume: int
    language: str = "en"
    extra: Mapping[str, Any] = field(default_factory=dict)


@migration("shout", from_version=1)
def _(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "loudness": len(fields["text"])}


@migration("shout", from_version=2)
def _(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "volume": fields.pop("loudness")}


def saved_by_another(path: Path, version: int, fields: dict[str, Any], monkeypatch: Any, schema: str = "shout") -> Path:
    """A sealed file as another version of Murano would have written it."""
    with monkeypatch.context() as patch:
        envelope = {"murano": schema, "schema_version": version, "fields": pack(fields, PT)}
        patch.setattr(store, "envelope", lambda value: envelope)
        return save_artifact(path, None)


def test_older_versions_are_brought_up_to_date(tmp_path: Path, monkeypatch: Any) -> None:
    for version, fields in (
        (1, {"text": "abc"}),
        (2, {"text": "abc", "loudness": 3}),
        (3, {"text": "abc", "volume": 3}),
    ):
        shout = load_artifact(saved_by_another(tmp_path / "a.pt", version, fields, monkeypatch), Shout)
        assert (shout.text, shout.volume, shout.language) == ("abc", 3, "en")


def test_a_newer_version_is_refused_with_both_versions(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved_by_another(tmp_path / "a.pt", 7, {"text": "abc"}, monkeypatch)
    with pytest.raises(ArtifactError, match=r"a\.pt.*version 7.*up to version 3.*pip install -U"):
        load_artifact(path)


def test_a_version_without_a_way_on_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved_by_another(tmp_path / "a.pt", 0, {"text": "abc"}, monkeypatch)
    with pytest.raises(ArtifactError, match="version 0 of the 'shout' schema, and no way leads on from 0"):
        load_artifact(path)


def test_unknown_fields_are_kept_and_saved_again(tmp_path: Path, monkeypatch: Any) -> None:
    fields = {"text": "a", "volume": 1, "pitch": (440.0, torch.ones(1))}
    shout = load_artifact(saved_by_another(tmp_path / "a.pt", 3, fields, monkeypatch), Shout)
    assert same(shout.extra, {"pitch": (440.0, torch.ones(1))})
    save_artifact(tmp_path / "b.pt", shout)
    assert same(load_artifact(tmp_path / "b.pt").extra, shout.extra)
    assert "pitch" in torch.load(tmp_path / "b.pt", weights_only=True)["fields"]


def test_a_missing_field_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ArtifactError, match="lacks 'volume' of the 'shout' schema"):
        load_artifact(saved_by_another(tmp_path / "a.pt", 3, {"text": "a"}, monkeypatch))


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    save_artifact(tmp_path / "a.pt", Shout("a", 1))
    with pytest.raises(ArtifactError, match=r"a\.pt.*holds a 'shout', not a 'logit_lens'"):
        load_artifact(tmp_path / "a.pt", LogitLensResult)
    path = saved_by_another(tmp_path / "b.pt", 1, {}, monkeypatch, schema="logit_lense")
    with pytest.raises(ArtifactError, match="schema 'logit_lense' is not known here. Did you mean 'logit_lens'"):
        load_artifact(path)


def test_a_field_without_a_place_is_logged(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    @artifact
    @dataclass
    class Closed:
        SCHEMA: ClassVar[str] = "closed"
        SCHEMA_VERSION: ClassVar[int] = 1

    load_artifact(saved_by_another(tmp_path / "a.pt", 1, {"more": 1}, monkeypatch, schema="closed"))
    assert "more" in caplog.text


# ---------------------------------------------------------------------------------------------------- what is refused


class Evil:
    """Creates a file when it is unpickled without care."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: Any) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Evil(canary)))
    assert canary.exists()
    canary.rmdir()
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Evil(canary)))
    torch.save({"murano": "logit_lens", "schema_version": 1, "fields": Evil(canary)}, tmp_path / "torch.pt")
    torch.save([Evil(canary)], tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with monkeypatch.context() as patch:  # with a right seal, as somebody who means harm would write it
        patch.setattr(store, "envelope", lambda value: value)
        save_artifact(tmp_path / "sealed.pt", {"murano": "logit_lens", "schema_version": 1, "fields": Evil(canary)})
    for name in ("pickle", "torch", "legacy", "sealed"):
        with pytest.raises(ArtifactError, match=f"{name}.pt"):
            load_artifact(tmp_path / f"{name}.pt")
        assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"hello, I am a text", "begins with b'hello, I'"),
        (b"PK\x03\x04" + bytes(200), "cut short or damaged, or a file of torch or zip that Murano did not write"),
        (b"x" * 200 + store._SEAL + b"0" * 64, "do not agree with the SHA-256"),
    ],
)
def test_what_is_no_artifact_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ArtifactError, match="a.pt") as caught:
        load_artifact(tmp_path / "a.pt")
    assert reason in str(caught.value)


def test_every_single_damage_is_noticed(tmp_path: Path) -> None:
    path = save_artifact(tmp_path / "a.pt", Anything(torch.arange(5)))
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        with pytest.raises(ArtifactError):
            store.read(io.BytesIO(data[:length]))
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(ArtifactError):
            store.read(io.BytesIO(damaged))
    with pytest.raises(ArtifactError):
        store.read(io.BytesIO(data + b"\0"))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    save_artifact(tmp_path / "logit_lens.pt", small_lens())
    with pytest.raises(ArtifactError, match=r"There is no '.*logit_lense.pt'. Did you mean 'logit_lens.pt'"):
        load_artifact(tmp_path / "logit_lense.pt")
    with pytest.raises(ArtifactError, match="is a folder: open a run with load_run"):
        load_artifact(tmp_path)
    with pytest.raises(ArtifactError):
        load_artifact("a\0b")


def test_what_is_no_data_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"Anything\.value\['f'\]\[1\] is a builtins.function.*can't be saved"):
        save_artifact(tmp_path / "a.pt", Anything({"f": [1, lambda: 0]}))
    with pytest.raises(ArtifactError, match=r"Anything\.value: a torch.sparse_coo.*make it dense"):
        save_artifact(tmp_path / "a.pt", Anything(torch.eye(2).to_sparse()))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(ArtifactError, match="a.pt"):
        save_artifact(tmp_path / "a.pt", Anything(cyclic))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = save_artifact(tmp_path / "a.pt", small_lens(1))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ArtifactError, match=r"Can't save .*a\.pt.*No space left on device"):
            save_artifact(path, small_lens(2))
    assert load_artifact(path).input_ids.unique().tolist() == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="Can't save"):
        save_artifact(tmp_path / "file" / "a.pt", small_lens())


def test_json_may_be_reformatted_but_not_changed() -> None:
    data = store.json_bytes("value", 1, {"value": [1, 2, {"a": "é\ud800"}]})
    assert store.read_json(json.dumps(json.loads(data)).encode(), "value", 1) == {"value": [1, 2, {"a": "é\ud800"}]}
    with pytest.raises(ArtifactError, match="damaged or was edited"):
        store.read_json(data.replace("é".encode(), b"e"), "value", 1)
    for damaged in (b"", data[:-5], b"[" * 100_000, b"{}", b"\xff\xfe", b"[1]"):
        with pytest.raises(ArtifactError):
            store.read_json(damaged, "value", 1)
    with pytest.raises(ArtifactError, match="version 1 of the 'value' schema and this Murano reads up to version 0"):
        store.read_json(data, "value", 0)


def test_a_tag_of_the_future_is_refused() -> None:
    with pytest.raises(ArtifactError, match="murano:hologram"):
        unpack({"murano:hologram": 1})
    with pytest.raises(ArtifactError, match="torch.load"):
        unpack({"murano:dtype": "torch.load"})
    assert codec.TAG == "murano:"


@pytest.mark.parametrize("call", [lambda lens: save_artifact(lens, "lens.pt"), load_artifact])
def test_what_is_no_path_is_refused(call: Any) -> None:
    with pytest.raises(
        ArtifactError, match=r"^A path was expected, not a Prompt: the path comes first, as in save_art"
    ):
        call(Prompt(text="a"))
