"""The items of a run: one result in one file, as JSON where a human can read it, as ``.pt`` otherwise."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from torch import Tensor

from murano.artifacts.codec import JSON, Form, artifact, is_artifact, pack, unpack
from murano.artifacts.run_manifest import VERSIONS
from murano.artifacts.store import json_bytes, read, read_json, write
from murano.errors import ArtifactError
from murano.prompts import PromptBatch

_log = logging.getLogger(__name__)


@artifact
@dataclass(frozen=True, eq=False)
class Value:
    """A result that is no artifact and does not go into JSON: a tensor, or something that holds one."""

    SCHEMA: ClassVar[str] = "value"
    SCHEMA_VERSION: ClassVar[int] = 1

    value: Any
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_item(folder: Path, key: str, value: Any) -> dict[str, Any]:
    """Write one result into its own folder.

    Returns:
        The schema of the file and its path in the run.

    Raises:
        ArtifactError: it can't be saved as data.
    """
    (folder / key).mkdir()
    if isinstance(value, PromptBatch):
        return _write_document(folder, key, "prompts", pack(value, JSON, key))
    if is_artifact(value):
        return _write_pt(folder, key, value)
    with contextlib.suppress(ArtifactError, RecursionError):
        return _write_document(folder, key, "value", pack(value, _JSON_WITHOUT_TENSORS, key))
    try:
        return _write_pt(folder, key, Value(value))
    except (ArtifactError, RecursionError) as error:
        shutil.rmtree(folder / key)
        if isinstance(error, RecursionError):
            raise ArtifactError(f"{key} holds itself, or is nested too deeply.") from None
        raise ArtifactError(str(error).replace("Value.value", key, 1)) from None


def _no_tensor(tensor: Tensor) -> Any:
    raise ArtifactError("a tensor does not go into JSON")


_JSON_WITHOUT_TENSORS = Form(json=True, tensor=_no_tensor)


def _write_document(folder: Path, key: str, kind: str, packed: Any) -> dict[str, Any]:
    file = f"{key}/{key}.json"
    content = packed["murano:prompts"] if kind == "prompts" else packed
    (folder / file).write_bytes(json_bytes(kind, VERSIONS[kind], {kind: content}))
    return {"schema": kind, "file": file}


def _write_pt(folder: Path, key: str, value: Any) -> dict[str, Any]:
    file = f"{key}/{key}.pt"
    with open(folder / file, "x+b") as out:
        write(out, value)
    return {"schema": value.SCHEMA, "file": file}


def read_item(file: BinaryIO, name: str, expected: type[Any] | None) -> Any:
    """A result from its file, ``.json`` or ``.pt``."""
    file.seek(0)
    if name.endswith(".json"):
        return _read_document(file.read())
    value = read(file, expected if hasattr(expected, "SCHEMA") else None)
    return value.value if isinstance(value, Value) else value


def _read_document(data: bytes) -> Any:
    kind = "prompts" if b'"murano": "prompts"' in data[:200] else "value"
    content = read_json(data, kind, VERSIONS[kind])[kind]
    return unpack({"murano:prompts": content} if kind == "prompts" else content)


def are_paths(value: Any) -> bool:
    """Whether a value is a list of paths: the figures that ``Plot`` wrote."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in value)


def copy_plots(folder: Path, paths: Sequence[Any]) -> list[str]:
    """Copy figures into the run; two of the same name from different folders both stay."""
    names: dict[str, None] = {}
    for source in dict.fromkeys(Path(path) for path in paths):
        if not source.is_file():
            _log.warning("The plot %r is not there any more: it is left out.", str(source))
            continue
        name = source.name
        for number in itertools.count(2):
            if name.casefold() not in {taken.casefold() for taken in names}:
                break
            name = f"{source.stem}_{number}{source.suffix}"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / name)
        names[name] = None
    return [f"plots/{name}" for name in names]
