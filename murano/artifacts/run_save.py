"""Saving a run: all results, what made them and the manifest, in a folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from murano import keys
from murano.artifacts.codec import is_artifact
from murano.artifacts.folder import Taken, check_name, new_folder
from murano.artifacts.run_items import are_paths, copy_plots, write_item
from murano.artifacts.run_manifest import MANIFEST, METADATA, VERSIONS, read_manifest
from murano.artifacts.store import json_bytes, sha256_of, writing
from murano.errors import ArtifactError

_log = logging.getLogger(__name__)

PACKAGES = ("murano-interp", "torch", "transformers", "nnterp", "nnsight", "tokenizers", "numpy", "vllm")


def save_run(
    results: Mapping[str, Any],
    output_dir: str | os.PathLike[str] = "murano_outputs",
    run_name: str | None = None,
    *,
    model_id: str | None = None,
    overwrite: bool = True,
) -> Path:
    """Save all results as the run ``<output_dir>/<run_name>``.

    The folder is there whole or not at all: a run of the same name stays as it is until the new one is complete, and
    files that somebody else put into it stay in it.

    Args:
        results: what steps wrote. A value that can't be saved as data (a model, a function) is left out with a warning.
        output_dir: the folder of runs.
        run_name: the run's folder in it; without one, the first result's name with date and time, never used before.
        model_id: the model's name, when the artifacts do not say it.
        overwrite: whether a run of the same name may be replaced.

    Returns:
        The run's folder.

    Raises:
        ArtifactError: there is nothing to save, the name is unusable, the folder can't be written or is being written.
    """
    names = [str(key) for key in results if key != keys.OUTPUT_DIR]
    if not names:
        raise ArtifactError("There are no results to save. Run a pipeline first: Pipeline([…]).run().")
    if run_name is not None:
        return _save_as(results, Path(output_dir), run_name, model_id, overwrite)
    first = next((name for name in names if name != keys.PROMPTS), names[0])
    default = f"{first}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    for number in itertools.count(1):
        with contextlib.suppress(Taken):
            name = default if number == 1 else f"{default}.{number}"
            return _save_as(results, Path(output_dir), name, model_id, overwrite=False)
    raise AssertionError("unreachable")


def _save_as(
    results: Mapping[str, Any], output_dir: Path, run_name: str, model_id: str | None, overwrite: bool
) -> Path:
    parts = check_run_name(run_name)
    folder = output_dir.joinpath(*parts)
    with writing(folder):
        for parent in itertools.islice(folder.parents, len(parts) - 1):
            if (parent / MANIFEST).exists():
                raise ArtifactError(
                    f"{str(parent)!r} is a run, and a run can't be saved inside another: choose another run_name"
                )
        with new_folder(folder, _owned, replace=overwrite) as new:
            _fill(new, results, run_name, model_id)
    return folder


def check_run_name(run_name: str) -> list[str]:
    """The folders that a run's name leads through, the last one its own.

    Raises:
        ArtifactError: one of them can't be the name of a folder.
    """
    parts = run_name.split("/") if isinstance(run_name, str) else [run_name]
    return [check_name(part, "run_name" if len(parts) == 1 else "In run_name, the part") for part in parts]


def _fill(folder: Path, results: Mapping[str, Any], run_name: str, model_id: str | None) -> None:
    """Write all of a run into an empty folder, the manifest last."""
    saved: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    values = {str(key): results[key] for key in results if key != keys.OUTPUT_DIR}
    _check_keys(values)
    for key, value in values.items():
        if key == keys.PLOTS and are_paths(value):
            saved[key] = {"schema": "plots", "files": copy_plots(folder / "plots", value)}
            continue
        try:
            saved[key] = {**write_item(folder, key, value), "type": type(value).__name__}
        except ArtifactError as error:
            if is_artifact(value):  # a model or a function among the results is no loss; an artifact would be
                raise
            left_out[key] = f"{type(value).__module__}.{type(value).__qualname__}"
            _log.warning("Result %r is left out of the saved run: %s", key, error)
    (folder / METADATA).write_bytes(
        json_bytes("run", VERSIONS["run"], _metadata(results, values, saved, left_out, run_name, model_id))
    )
    files = {
        path.relative_to(folder).as_posix(): _describe(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / MANIFEST).write_bytes(json_bytes("manifest", VERSIONS["manifest"], {"files": files}))


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": sha256_of(file), "bytes": path.stat().st_size}


def _check_keys(names: Iterable[str]) -> None:
    taken = {MANIFEST: "the manifest", METADATA: "the metadata"}
    for name in names:
        check_name(name, "The result")
        if name.casefold() in taken:  # some file systems, and some zips, know no case
            raise ArtifactError(
                f"The result {name!r} would be saved over {taken[name.casefold()]}: give it another key."
            )
        taken[name.casefold()] = f"the result {name!r}"


def _owned(folder: Path) -> set[str] | None:
    """The files that belong to the run in a folder; ``None`` if there is no run in it."""
    try:
        return {*read_manifest(folder), MANIFEST}
    except ArtifactError:
        return None


def _metadata(
    results: Mapping[str, Any],
    values: Mapping[str, Any],
    saved: Mapping[str, Any],
    left_out: Mapping[str, str],
    run_name: str,
    model_id: str | None,
) -> dict[str, Any]:
    models = [m for value in values.values() if isinstance(m := getattr(value, "model", None), Mapping)]
    model = {"model_id": None, "revision": None, "dtype": None, "device": None, **(models[0] if models else {})}
    history = getattr(results, "history", [])
    readouts = {
        key: r for key, value in values.items() if isinstance(r := getattr(value, "readout", None), Mapping) and r
    }
    return {
        "run_name": run_name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": _readable({**model, **({"model_id": model_id} if model_id is not None else {})}),
        "steps": [asdict(record) for record in history],
        "seconds": sum(record.seconds for record in history),
        "readout": _readable(readouts),
        "artifacts": dict(saved),
        "left_out": dict(left_out),
        "seeds": {"torch": torch.initial_seed(), "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")},
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": _git_commit(),
    }


def _readable(value: Any) -> Any:
    """Anything as strict JSON for a human reader; what JSON can't say is written as text."""
    if isinstance(value, Mapping):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_readable(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _git_commit() -> str | None:
    """The commit of the working directory's repository, if it is in one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
        return done.stdout.strip() or None if done.returncode == 0 else None
    return None
