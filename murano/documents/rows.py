"""Rows: the data sets that documents name, found beside the document or in the package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from murano.documents.errors import shown
from murano.errors import InputError, nearest
from murano.prompt_files import SHIPPED, read_records

ENDINGS = (".json", ".jsonl")


@dataclass(frozen=True)
class Rows:
    """The rows of one input.

    Args:
        name: as the document calls them; empty for rows that stand in the document itself.
        file: where they were found.
        records: the rows.
    """

    name: str
    file: Path | None
    records: tuple[Mapping[str, Any], ...]

    @property
    def sha256(self) -> str:
        """Of the rows' content, whatever the formatting of their file."""
        return hashlib.sha256(json.dumps(self.records, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __str__(self) -> str:
        return self.name or "the document's own rows"


class NoSuchRows(InputError):
    """A name that names no rows; ``hint`` has the nearest that does."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def find_rows(source: str | Sequence[Mapping[str, Any]], folder: Path) -> Rows:
    """The rows that a document names.

    They are looked for in the document's folder, as ``data/<name>.json`` (or ``.jsonl``) and ``<name>.json``, and as
    ``data/<name>.json`` beside that folder; then, for a document in a folder that a run wrote, where that run found them; then
    among those that the package ships.

    Args:
        source: a name, ``"weekdays/train"``, or the rows themselves.
        folder: the document's.

    Raises:
        InputError: there are no such rows, they can't be read, or are no longer those of the run.
    """
    if not isinstance(source, str):
        return Rows("", None, _checked(list(source), "the list"))
    parts = PurePosixPath(source).parts
    if not parts or source.startswith("/") or ".." in parts or any(c in source for c in "\\\0:"):
        raise InputError("rows are named by a path inside the document's folder, 'weekdays/train'")
    folder = Path(os.path.abspath(folder))
    places = [folder / "data", folder, folder.parent / "data"]
    files = [place / f"{source}{ending}" for place in places for ending in ENDINGS]
    found = next((file for file in files if _is_file(file)), None) or _of_run(source, folder)
    if found is None:
        found = next((f for ending in ENDINGS if _is_file(f := SHIPPED / f"{source}{ending}")), None)
    if found is None:
        known = [*_names(folder / "data"), *_names(SHIPPED)]
        looked = ", ".join(os.path.relpath(file, folder) for file in files)
        raise NoSuchRows(
            f"there are no such rows: {str(folder)!r} has none of {looked}, and the package ships {', '.join(_names(SHIPPED))}",
            nearest(source, known),
        )
    try:
        records = [record for _, record in read_records(found)]
    except RecursionError:
        raise InputError(f"{found.name} is nested too deeply") from None
    except ValueError as error:
        raise InputError(str(error).rstrip(".")) from None
    return Rows(source, found, _checked(records, found.name))


def _checked(records: Sequence[Any], name: str) -> tuple[Mapping[str, Any], ...]:
    if not records:
        raise InputError(f"{name} has no rows")
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise InputError(f"row {index} of {name} is no object but {shown(record)}")
    return tuple(records)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _names(folder: Path) -> list[str]:
    """The data sets of a folder, by their names."""
    files = [f for ending in ENDINGS for f in folder.glob(f"**/*{ending}")] if folder.is_dir() else []
    return sorted({f.relative_to(folder).with_suffix("").as_posix() for f in files})


def _of_run(name: str, folder: Path) -> Path | None:
    """Where the run found its rows whose folder this is, or is a point of."""
    for place in (folder, folder.parent):
        try:
            rows = json.loads((place / "run.json").read_text(encoding="utf-8"))["rows"]
            about = next(r for r in rows if r["name"] == name)
            file, digest = Path(about["file"]), about["sha256"]
        except (OSError, ValueError, LookupError, TypeError, StopIteration):
            continue
        if not _is_file(file):
            continue
        if Rows(name, file, tuple(r for _, r in read_records(file))).sha256 != digest:
            raise InputError(
                f"{str(file)!r} has changed since {str(place)!r} was run: put the rows as they were beside the document, "
                f"as data/{name}.json"
            )
        return file
    return None
