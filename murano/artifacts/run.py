"""Run folders: everything that a run left behind, in one folder that is complete or not there.

::

    <output_dir>/<run_name>/
      metadata.json              what was run, on what, with which versions; which artifact is in which file
      logit_lens/logit_lens.pt   one folder per artifact
      prompts/prompts.json
      plots/heatmap.png
      manifest.json              the SHA-256 of each file above

:func:`save_run` writes one, :func:`load_run` opens one, :func:`verify_run` checks one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, overload

from murano import keys
from murano.artifacts.codec import AnotherKind, is_artifact
from murano.artifacts.folder import find
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.run_items import read_item
from murano.artifacts.run_manifest import METADATA, RunCheck, read_head, read_manifest, verify_run
from murano.artifacts.run_save import save_run
from murano.artifacts.store import reading, sha256_of
from murano.errors import ArtifactError
from murano.keys import Key
from murano.prompts import PromptBatch
from murano.results import Results, StepRecord

__all__ = [
    "RunCheck",
    "RunResults",
    "load_logit_lens",
    "load_prompts",
    "load_result",
    "load_run",
    "save_run",
    "verify_run",
]

T = TypeVar("T")


@dataclass(frozen=True)
class _Deferred:
    """A result that is still in its file."""

    folder: Path
    file: str
    kind: str
    sha256: str

    def open(self, expected: type[Any] | None) -> Any:
        path = self.folder / self.file
        with reading(path), open(path, "rb") as file:
            if sha256_of(file) == self.sha256:
                return read_item(file, self.file, expected)
            if read_manifest(self.folder).get(self.file, {}).get("sha256") != self.sha256:
                raise ArtifactError("the run was saved again since it was opened, open it again with load_run")
            raise ArtifactError("it is damaged or was edited: it does not agree with the run's manifest")


class RunResults(Results):
    """Results of a saved run; each artifact is opened when it is first read.

    :attr:`folder` is where the run is, :attr:`metadata` what ``metadata.json`` says about it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folder: Path | None = None
        self.metadata: dict[str, Any] = {}

    # dict's own methods would hand out what is not opened yet; dict(results) asks keys() and [] because of __iter__.

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    @overload
    def __getitem__(self, key: Key[T], /) -> T: ...
    @overload
    def __getitem__(self, key: str, /) -> Any: ...
    def __getitem__(self, key: str, /) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Deferred):
            value = value.open(key.resolve_type() if isinstance(key, Key) else None)
            dict.__setitem__(self, str(key), value)  # whatever was saved under that name, it can be opened
        return value

    def get(self, key: str, default: Any = None, /) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def setdefault(self, key: str, default: Any = None, /) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            self[key]
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        if self:
            self[next(reversed(self))]
        return super().popitem()

    def __eq__(self, other: object) -> bool:
        return dict(self) == (dict(other) if isinstance(other, Mapping) else other)

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return Results(self) | other

    def __repr__(self) -> str:
        there = {key: dict.__getitem__(self, key) for key in self}
        shown = (f"{key}: {v.kind if isinstance(v, _Deferred) else type(v).__name__}" for key, v in there.items())
        return f"Results({', '.join(shown)}; from {str(self.folder)!r})"


def load_run(path: str | os.PathLike[str]) -> RunResults:
    """Open a saved run: every result under its key, ready for plots, metrics and further steps.

    Each artifact is read from its file, and checked, when it is first used.

    Args:
        path: the run's folder.

    Raises:
        ArtifactError: it is no run, an unfinished or a damaged one; the message says what is still readable.
    """
    with reading(path):
        folder = Path(os.path.abspath(find(path)))  # the working directory may change before an artifact is opened
    files, metadata = read_head(folder)
    results = RunResults()
    results.folder, results.metadata = folder, metadata
    with reading(folder / METADATA):
        for key, entry in metadata["artifacts"].items():
            names = entry.get("files", [entry.get("file")])
            if any(name not in files for name in names):
                raise ArtifactError(f"it names a file that is not in the manifest: {names}")
            value = (
                [str(folder / name) for name in names]
                if entry["schema"] == "plots"
                else _Deferred(folder, names[0], entry["type"], files[names[0]]["sha256"])
            )
            dict.__setitem__(results, key, value)  # its type is seen when it is opened
        results.history = [_record(step) for step in metadata["steps"]]
    return results


def _record(step: Mapping[str, Any]) -> StepRecord:
    known = {f.name for f in fields(StepRecord)}  # a later version may have written more
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in step.items() if k in known}
    return StepRecord(**values)


def load_result(path: str | os.PathLike[str], key: Key[T]) -> T:
    """Open one result.

    Args:
        path: its file, or the folder of a run that has it.
        key: which one, ``keys.LOGIT_LENS``.

    Raises:
        ArtifactError: there is no such file or run, it is damaged, or it holds something else.
        MissingKeyError: the run has no such result; the message lists what it has.
    """
    with reading(path):
        found = find(path)
        if found.is_dir():
            return load_run(path)[key]
        if not found.exists():  # perhaps a writer of its run was killed at the worst moment
            found = find(found.parent.parent) / found.parent.name / found.name
        with open(found, "rb") as file:
            expected = key.resolve_type()
            value: T = read_item(file, found.name, expected)
        if expected is not None and not isinstance(value, expected):
            opener = "load_artifact" if is_artifact(value) else None
            opener = "load_prompts" if isinstance(value, PromptBatch) else opener
            raise AnotherKind(f"it holds a value of the type {type(value).__name__}, not {expected.__name__}", opener)
        return value


def load_logit_lens(path: str | os.PathLike[str]) -> LogitLensResult:
    """Open a saved logit lens: its ``.pt`` file, or the folder of a run that has one. See :func:`load_result`."""
    return load_result(path, keys.LOGIT_LENS)


def load_prompts(path: str | os.PathLike[str]) -> PromptBatch:
    """Open saved prompts: ``prompts.json``, or the folder of a run that has them. See :func:`load_result`."""
    return load_result(path, keys.PROMPTS)
