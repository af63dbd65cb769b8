"""The manifest of a run: which files belong to it, and whether they are as they were saved."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from murano.artifacts.folder import find, is_unfinished
from murano.artifacts.store import check_json, check_seal, read_json, reading, sha256_of
from murano.errors import ArtifactError, nearest

MANIFEST, METADATA = "manifest.json", "metadata.json"
#: Versions of the JSON documents of a run.
VERSIONS = {"manifest": 1, "run": 1, "prompts": 1, "value": 1}


def read_head(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files of a run with their sizes and SHA-256, as its manifest lists them, and its metadata.

    Raises:
        ArtifactError: it is no run, or one of the two is damaged; the message says what is still readable.
    """
    try:
        for attempt in (1, 2, 3):
            files = read_manifest(folder)
            with reading(folder / METADATA):
                data = (folder / METADATA).read_bytes()
                if hashlib.sha256(data).hexdigest() == files.get(METADATA, {}).get("sha256"):
                    return files, read_json(data, "run", VERSIONS["run"])
                if attempt == 3:  # else the run was being replaced between reading the one and the other
                    raise ArtifactError("it is damaged or was edited: it does not agree with the run's manifest")
    except ArtifactError as error:
        if not _is_run(folder):
            raise _no_run(folder) from None
        good = [name for name in verify_run(folder).good if "/" in name]
        advice = f" Still readable, each on its own: {', '.join(good)}." if good else ""
        raise ArtifactError(f"{error}{advice}", str(folder)) from None
    raise AssertionError("unreachable")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The files of a run as its manifest lists them, each with ``sha256`` and ``bytes``.

    Raises:
        ArtifactError: the manifest is missing or damaged, or names a file outside the run.
    """
    path = folder / MANIFEST
    with reading(path):
        files: dict[str, Any] = read_json(path.read_bytes(), "manifest", VERSIONS["manifest"])["files"]
        for name in files:
            if name.startswith("/") or ".." in re.split(r"[/\\]", name) or (os.name == "nt" and ":" in name):
                raise ArtifactError(f"it names a file outside the run: {name!r}")
        return files


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / MANIFEST) or os.path.isfile(folder / METADATA)


def _no_run(folder: Path) -> ArtifactError:
    name = repr(str(folder))
    if not os.path.exists(folder):
        written_by = f" Save({str(folder.parent)!r}, {folder.name!r}) would write it."
        message = f"There is no run {name}.{_list_runs(folder.parent, folder.name) or written_by}"
    elif not os.path.isdir(folder):
        message = f"{name} is a file, and a run is a folder. Open one artifact with load_artifact({name})."
    elif not os.access(folder, os.R_OK | os.X_OK):
        message = f"Can't read {name}: permission denied."
    elif is_unfinished(folder):
        message = f"{name} is what a killed process left of a run that it was saving: it can be removed."
    else:
        message = f"{name} is no run: it has no {MANIFEST}.{_list_runs(folder)}"
    return ArtifactError(message, str(folder))


def _runs_in(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(e.name for e in os.scandir(folder) if not e.name.startswith(".") and Path(e, MANIFEST).is_file())
    return []


def _list_runs(folder: Path, wanted: str = "") -> str:
    runs = _runs_in(folder)
    hint = nearest(wanted, runs) if wanted else ""
    return f"{hint} Runs in {str(folder)!r}: {', '.join(runs[:10])}{', …' if len(runs) > 10 else ''}." if runs else ""


@dataclass(frozen=True)
class RunCheck:
    """What :func:`verify_run` found.

    Args:
        folder: the run.
        good: the files that are as they were saved.
        faults: the others, and what is wrong with each.
    """

    folder: Path
    good: tuple[str, ...]
    faults: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether the whole run is as it was saved."""
        return not self.faults

    def __str__(self) -> str:
        if self.ok:
            return f"{self.folder}: all {len(self.good)} files are as they were saved."
        damaged = len(self.faults)
        lines = [
            f"{self.folder}: {damaged} of {len(self.good) + damaged} files {'is' if damaged == 1 else 'are'} damaged."
        ]
        lines += [f"  {name}: {fault}" for name, fault in self.faults.items()]
        return "\n".join([*lines, f"Still readable: {', '.join(self.good) or 'nothing'}."])


def verify_run(path: str | os.PathLike[str]) -> RunCheck:
    """Compare every file of a run with what was saved.

    Without a readable manifest each file is checked by the seal that it carries itself.

    Args:
        path: the run's folder.

    Raises:
        ArtifactError: it is no run.
    """
    with reading(path):
        folder = find(path)
    if not _is_run(folder):
        raise _no_run(folder)
    faults: dict[str, str] = {}
    try:
        expected: Mapping[str, Any] = read_manifest(folder)
    except ArtifactError as error:
        faults[MANIFEST] = str(error)
        sealed = (p for p in folder.rglob("*") if p.suffix in (".pt", ".json") and p.name != MANIFEST and p.is_file())
        expected = {p.relative_to(folder).as_posix(): None for p in sorted(sealed)}
    good = [] if faults else [MANIFEST]
    for name, saved in expected.items():
        try:
            with open(folder / name, "rb") as file:
                _check_file(file, name, saved)
            good.append(name)
        except Exception as error:
            faults[name] = "missing" if isinstance(error, FileNotFoundError) else str(error)
    return RunCheck(folder, tuple(good), faults)


def _check_file(file: BinaryIO, name: str, saved: Mapping[str, Any] | None) -> None:
    if saved is not None:
        if sha256_of(file) != saved["sha256"]:
            size = file.seek(0, os.SEEK_END)
            cut = f", it has {size} bytes instead of {saved['bytes']}" if size != saved["bytes"] else ""
            raise ArtifactError(f"its bytes are not those that were saved{cut}")
    elif name.endswith(".pt"):
        check_seal(file)
    else:
        check_json(file.read())
