"""Codec: any value of an artifact as plain ones, so that a file holds nothing that must be executed to be read.

Plain are ``None``, ``bool``, ``int``, ``float``, ``str``, lists, tuples, string-keyed dicts and tensors; they stay as
they are. Everything else becomes a dict with one tagged key, ``{"murano:address": "L3.resid_post"}``. The same codec
serves ``.pt`` files, JSON and :func:`fingerprint`: they differ in how a tensor is written and in what JSON can't say.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from murano import keys
from murano.address import Address
from murano.artifacts.words import TokenWords
from murano.errors import ArtifactError, nearest
from murano.prompts import Prompt, PromptBatch

C = TypeVar("C", bound=type)

_log = logging.getLogger(__name__)

TAG = "murano:"


class AnotherKind(ArtifactError):
    """A file is whole, and holds something else than what was asked for.

    Args:
        why: what it holds.
        opener: the function that opens it; ``None`` where only its run can be opened.
    """

    def __init__(self, why: str, opener: str | None) -> None:
        super().__init__(why)
        self.opener = opener


@dataclass(frozen=True)
class Form:
    """What packed values are for.

    Args:
        json: whether they must be strict JSON: no tuples, no NaN, no lone surrogates.
        tensor: how a tensor is written.
    """

    json: bool
    tensor: Callable[[Tensor], Any]


# --------------------------------------------------------------------------------------------------------- tensors


def compact(tensor: Tensor) -> Tensor:
    """The same values on the CPU in a storage of their own size: a view does not drag its base along.

    Raises:
        ArtifactError: a tensor that has no plain memory: sparse, quantised or on the meta device.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ArtifactError(f"a {tensor.layout} {tensor.dtype} tensor on {tensor.device} can't be saved: make it dense")
    tensor = tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
    tight = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if tight else tensor.clone(memory_format=torch.contiguous_format)


def _memory(tensor: Tensor) -> Any:
    # Not reshape(-1): a tensor of one element is contiguous whatever its stride says, and view() looks at the stride.
    return compact(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def _tensor_text(tensor: Tensor) -> Any:
    text = base64.b64encode(_memory(tensor)).decode()
    return {f"{TAG}tensor": {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "base64": text}}


def _tensor_digest(tensor: Tensor) -> Any:
    digest = hashlib.sha256(_memory(tensor)).hexdigest()
    return {f"{TAG}tensor": {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}}


def _tensor_of_text(packed: Mapping[str, Any]) -> Tensor:
    data, dtype = bytearray(base64.b64decode(packed["base64"], validate=True)), _dtype(packed["dtype"])
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(packed["shape"])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"the dtype {name!r} is not known to torch {torch.__version__}")
    return dtype


# --------------------------------------------------------------------------------------------- values, there and back


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    fields = {f.name: getattr(prompt, f.name) for f in dataclasses.fields(prompt)}
    shown = {name: value for name, value in fields.items() if value}
    # Lists read better than tagged tuples in prompts.json; _prompt makes tuples of them again.
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Prompt(**known)


def _word_list(words: TokenWords) -> dict[str, Any]:
    known = {token_id: text for token_id, text in words.items() if token_id >= 0}
    return {"ids": torch.tensor(list(known), dtype=torch.int64), "texts": list(known.values())}


#: type → tag, its value as plainer ones, and back. Sets are sorted, so that equal ones are written equally.
_CODECS: tuple[tuple[type[Any], str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (Address, "address", str, Address.parse),
    (TokenWords, "words", _word_list, lambda v: TokenWords(dict(zip(v["ids"].tolist(), v["texts"], strict=True)))),
    (PromptBatch, "prompts", lambda v: [_prompt_fields(p) for p in v], lambda v: PromptBatch(list(map(_prompt, v)))),
    (Prompt, "prompt", _prompt_fields, _prompt),
    (bytes, "bytes", lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    (complex, "complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    (set, "set", lambda v: sorted(v, key=repr), set),
    (frozenset, "frozenset", lambda v: sorted(v, key=repr), frozenset),
    (torch.dtype, "dtype", str, _dtype),
    (torch.device, "device", str, torch.device),
    (PurePath, "path", str, Path),
    (np.ndarray, "array", lambda v: torch.from_numpy(np.array(v)), lambda v: v.numpy()),
)
_UNPACK: dict[str, Callable[[Any], Any]] = {
    **{f"{TAG}{tag}": back for _, tag, _, back in _CODECS},
    f"{TAG}tensor": _tensor_of_text,
    f"{TAG}tuple": tuple,
    f"{TAG}items": lambda v: dict(v),
    f"{TAG}text": lambda v: base64.b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
    f"{TAG}float": float,
    f"{TAG}int": lambda v: int(v, 16),
}


def pack(value: Any, form: Form, where: str = "value") -> Any:
    """A value as plain ones.

    Args:
        value: what is to be saved.
        form: :data:`PT`, :data:`JSON` or :data:`DIGEST`.
        where: the name of the value, for the error.

    Raises:
        ArtifactError: something in it can't be saved as data; the message says where it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return text if not form.json or _clean(text) else _tagged("text", text.encode("utf-8", "surrogatepass"))
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**63 else {f"{TAG}int": hex(number)}
    if isinstance(value, float):
        real = float(value)
        return {f"{TAG}float": repr(real)} if form.json and not math.isfinite(real) else real
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return pack(value.item(), form, where)
    if isinstance(value, Tensor):
        try:
            return form.tensor(value)
        except ArtifactError as error:
            raise ArtifactError(f"{where}: {error}.") from None
    if isinstance(value, (list, tuple)):
        items = [pack(item, form, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {f"{TAG}tuple": items} if form.json else tuple(items)
    for kind, tag, there, _ in _CODECS:
        if isinstance(value, kind):
            try:
                return {f"{TAG}{tag}": pack(there(value), form, where)}
            except (TypeError, ValueError) as error:  # an array of objects, say
                if isinstance(error, ArtifactError):
                    raise
                return _refuse(value, where)
    if isinstance(value, Mapping):
        return _pack_mapping(value, form, where)
    if is_artifact(value):
        return {f"{TAG}artifact": envelope(value, form, where)}
    return _refuse(value, where)


def _pack_mapping(value: Mapping[Any, Any], form: Form, where: str) -> dict[str, Any]:
    natural = all(isinstance(key, str) and _clean(key) for key in value)
    if natural and not (len(value) == 1 and next(iter(value)).startswith(TAG)):  # would be taken for a tag
        return {str.__str__(key): pack(item, form, f"{where}[{key!r}]") for key, item in value.items()}
    return {f"{TAG}items": [[pack(k, form, where), pack(v, form, f"{where}[{k!r}]")] for k, v in value.items()]}


def unpack(packed: Any) -> Any:
    """The value that :func:`pack` packed.

    Raises:
        ArtifactError: a tag that this version does not know.
    """
    if isinstance(packed, dict):
        if len(packed) == 1:
            tag, content = next(iter(packed.items()))
            if isinstance(tag, str) and tag.startswith(TAG):
                if tag == f"{TAG}artifact":
                    return open_envelope(content)
                if tag not in _UNPACK:
                    raise ArtifactError(f"it holds a {tag!r}, which this version of Murano does not know")
                return _UNPACK[tag](unpack(content))
        return {key: unpack(value) for key, value in packed.items()}
    if isinstance(packed, (list, tuple)):
        return type(packed)(unpack(item) for item in packed)
    return packed


def _clean(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:  # lone surrogates
        return False


def _tagged(tag: str, data: bytes) -> dict[str, str]:
    return {f"{TAG}{tag}": base64.b64encode(data).decode()}


def _refuse(value: Any, where: str) -> Any:
    raise ArtifactError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved as data: "
        "keep tensors, numbers, strings, lists, tuples, dicts, addresses or artifacts."
    )


#: For ``.pt`` files: tensors and plain values, as ``torch.load(weights_only=True)`` reads them.
PT = Form(json=False, tensor=compact)
#: For strict JSON: tensors as base64.
JSON = Form(json=True, tensor=_tensor_text)
#: For fingerprints: tensors as digests of their memory.
DIGEST = Form(json=True, tensor=_tensor_digest)


def fingerprint(value: Any) -> str:
    """The SHA-256 of a value: an artifact, prompts, arguments. Equal values have equal fingerprints, on any machine.

    Args:
        value: anything that can be saved; the order of a dict does not matter, bits of floats and dtypes do.

    Raises:
        ArtifactError: something in it can't be saved as data.

    >>> fingerprint({"a": 1, "b": (2,)}) == fingerprint({"b": (2,), "a": 1}) != fingerprint({"a": 1, "b": [2]})
    True
    """
    return digest_of(pack(value, DIGEST))


def digest_of(packed: Any) -> str:
    """The SHA-256 of a JSON value, whatever its formatting and the order of its keys."""
    return hashlib.sha256(
        json.dumps(packed, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


# -------------------------------------------------------------------------------------------------------- artifacts

Migration = Callable[[dict[str, Any]], dict[str, Any]]
_MIGRATIONS: dict[tuple[str, int], Migration] = {}
_CLASSES: dict[str, type[Any]] = {}


def artifact(cls: C) -> C:
    """Make an artifact class known by its schema, so that its files open without naming the class.

    Only classes defined outside Murano need it: Murano's own are found through the keys in :mod:`murano.keys`.
    """
    _CLASSES[cls.SCHEMA] = cls  # type: ignore[attr-defined]
    return cls


def migration(schema: str, from_version: int) -> Callable[[Migration], Migration]:
    """Register the function that turns the fields of ``from_version`` into those of the next version.

    >>> @migration("shouting", from_version=1)
    ... def louder(fields):
    ...     return {**fields, "volume": fields.pop("loudness")}
    """

    def register(function: Migration) -> Migration:
        _MIGRATIONS[schema, from_version] = function
        return function

    return register


def is_artifact(value: Any) -> bool:
    """Whether a value is an artifact: a dataclass with a ``SCHEMA`` and a ``SCHEMA_VERSION``."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "SCHEMA")


def envelope(value: Any, form: Form = PT, where: str = "") -> dict[str, Any]:
    """An artifact as plain values: its schema, the schema's version and its fields, as its dataclass declares them.

    A :class:`TokenWords` among the fields is saved with the words of exactly the ids in the artifact's tensors: the
    integer tensors whose name ends in ``ids``. A field named ``extra`` holds what another version of the artifact saved
    and this one does not know; it goes back to where it came from.

    Raises:
        ArtifactError: something in it can't be saved as data.
    """
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    fields = {**fields.pop("extra", {}), **fields}
    ids = list(_id_tensors(fields))
    where = where or type(value).__name__
    packed = {
        name: pack(TokenWords(item.of(*ids)) if isinstance(item, TokenWords) else item, form, f"{where}.{name}")
        for name, item in fields.items()
    }
    return {"murano": value.SCHEMA, "schema_version": value.SCHEMA_VERSION, "fields": packed}


def _id_tensors(value: Any, name: str = "") -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if name.endswith("ids") and not value.dtype.is_floating_point and value.dtype != torch.bool:
            yield value
    elif isinstance(value, Mapping) and not isinstance(value, TokenWords):
        for key, item in value.items():
            yield from _id_tensors(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _id_tensors(item, name)


def open_envelope(packed: Any, expected: type[Any] | None = None) -> Any:
    """The artifact of an :func:`envelope`, brought up to the present version of its schema.

    Args:
        packed: what :func:`envelope` made.
        expected: the artifact's class; without it, found by the schema's name.

    Raises:
        ArtifactError: it is no envelope, of another or an unknown schema, of a newer version, or lacks a field.
    """
    head = packed if isinstance(packed, dict) else {}
    schema, version, fields = head.get("murano"), head.get("schema_version"), head.get("fields")
    if not isinstance(schema, str) or not isinstance(version, int) or not isinstance(fields, dict):
        raise ArtifactError("it holds no artifact of Murano")
    cls = expected or _class_of(schema)
    if schema != cls.SCHEMA:
        raise AnotherKind(f"it holds a {schema!r}, not a {cls.SCHEMA!r}", "load_artifact")
    check_version(schema, version, cls.SCHEMA_VERSION)
    fields = unpack(fields)
    for step in range(version, cls.SCHEMA_VERSION):
        if (schema, step) not in _MIGRATIONS:
            raise ArtifactError(f"it has version {version} of the {schema!r} schema, and no way leads on from {step}")
        fields = _MIGRATIONS[schema, step](fields)
    declared = {f.name: f for f in dataclasses.fields(cls) if f.init}
    unknown = {name: fields.pop(name) for name in list(fields) if name not in declared}
    missing = [
        name
        for name, f in declared.items()
        if name not in fields and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ArtifactError(f"it lacks {', '.join(map(repr, missing))} of the {schema!r} schema, version {version}")
    if unknown and "extra" in declared:
        fields["extra"] = unknown
    elif unknown:
        _log.warning("%s has no field 'extra' to keep what it does not know: %s", cls.__name__, ", ".join(unknown))
    return cls(**fields)


def check_version(schema: str, saved: Any, known: int) -> None:
    """Refuse what a newer Murano wrote.

    Raises:
        ArtifactError: the message names both versions.
    """
    if not isinstance(saved, int) or saved > known:
        raise ArtifactError(
            f"it was saved with version {saved} of the {schema!r} schema and this Murano reads up to version {known}: "
            "update with pip install -U murano-interp"
        )


def _class_of(schema: str) -> type[Any]:
    if schema in _CLASSES:
        return _CLASSES[schema]
    known = keys.known()
    for key in sorted(known.values(), key=lambda key: key != schema):  # the key of the same name first: fewer imports
        found = key.resolve_type()
        if found is not None and getattr(found, "SCHEMA", None) == schema:
            return found
    raise ArtifactError(
        f"its schema {schema!r} is not known here.{nearest(schema, [*known, *_CLASSES])} Import the module that "
        "defines it and mark the class with @murano.artifacts.codec.artifact, or read it by a Key that names its class"
    )
