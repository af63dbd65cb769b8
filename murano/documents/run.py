"""Running a document: one lens for all points that are left, then a folder for each point."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from murano import keys
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.metric_table import MetricTable
from murano.artifacts.run_save import PACKAGES
from murano.documents.answers import encoded, notes, vocabulary
from murano.documents.folder import RunFolder
from murano.documents.models import find_model_folder
from murano.documents.plan import Measure, Pass, Plan, Point
from murano.documents.runs import DocumentRun, digest
from murano.lens import MAX_BATCH_TOKENS, describe
from murano.model import batching
from murano.results import Results

if TYPE_CHECKING:
    from murano.documents.document import Document
    from murano.model import MuranoModel

logger = logging.getLogger(__name__)

#: What is saved of a point: rows by file.
PointFiles = dict[str, list[dict[str, Any]]]


def run_document(document: Document, out: Path | None, *, force: bool, model: MuranoModel) -> DocumentRun:
    """Run a document; see :meth:`murano.documents.Document.run`."""
    started = time.perf_counter()
    plan = document.planned(model)
    size = vocabulary(model)
    tokens = encoded(plan, model, document.name)
    remarks = [note for one in plan.passes for note in notes(one, model.tokenizer)]
    info = _about(document, plan, remarks)
    inputs = digest([*([one.role, one.rows.sha256] for one in plan.passes), model.identity(), _computing()])
    folder = RunFolder(out, document, inputs, force=force) if out is not None else None
    info["inputs"] = inputs
    if folder is not None:
        info["points"] = folder.kept([point.name for point in plan.points])
    todo = [point for point in plan.points if point.name not in info["points"]]
    if todo != list(plan.points):
        logger.warning("%s has %d of %d points already.", out, len(plan.points) - len(todo), len(plan.points))
    if not todo and folder is not None:
        folder.complete([point.name for point in plan.points])
        return folder.open()
    proof = model.check_readout()
    if vocabulary(model) != size:  # a family whose config does not say it
        encoded(plan, model, document.name)
    info |= {"model": describe(model), "readout": proof.to_dict()}
    if folder is not None:  # not before: a run that is refused leaves nothing
        folder.start(info)
    info["seconds"] = {"model": time.perf_counter() - started}
    started = time.perf_counter()
    read = [
        _read(one, model, todo, folder.checkpoint(i, todo) if folder else None) for i, one in enumerate(plan.passes)
    ]
    # What the lens says of answers of several tokens is among the remarks already.
    remarks += [note for lens, _ in read for note in lens.notes if "read by the first one" not in note]
    info["notes"] = remarks
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    info["seconds"]["forwards"] = time.perf_counter() - started
    info["forwards"] = [_forward(one, rows, proof.pads, todo) for one, rows in zip(plan.passes, tokens, strict=True)]
    started = time.perf_counter()
    info["metrics"] = {
        _stem(file): {
            "step": one.step,
            "metric": measure.name,
            "kind": measure.kind,
            "read": measure.read,
            **measure.fields,
            "unit": table.unit,
            "direction": table.direction,
            "how": table.how,
        }
        for one, (_, tables) in zip(plan.passes, read, strict=True)
        for measure, table in zip(one.measures, tables, strict=True)
        for file in measure.files
    }
    found: dict[str, PointFiles] = {}
    for point in tqdm(todo, desc="points", unit="point", delay=2.0, leave=False):
        files, places = _point(plan.passes, read, point)
        found[point.name] = files
        info["points"][point.name] = {"addresses": places, "layer": point.layer if point.name else None}
        if folder is not None:
            folder.write(point, files, info)
    info["seconds"]["files"] = time.perf_counter() - started
    info["finished"] = True
    if folder is None:
        return DocumentRun(document.data, info, found)
    folder.finish(info, [point.name for point in plan.points])
    return folder.open()


def _read(
    one: Pass, model: MuranoModel, points: Sequence[Point], checkpoint: Path | None
) -> tuple[LogitLensResult, list[MetricTable]]:
    """One lens over the rows for all points, and the metrics of it."""
    results = Results()
    results.checkpoint = checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run passes on what the lens has to say
        results = one.reading(model, points).run(results)
    tables = []
    for measure in one.measures:
        step = one.step_of(measure)
        tables.append(step(results)[step.metric])
    return results[keys.LOGIT_LENS], tables


def _point(
    passes: Sequence[Pass], read: Sequence[tuple[LogitLensResult, list[MetricTable]]], point: Point
) -> tuple[PointFiles, dict[str, str]]:
    """What a point's files hold, and which address each was read at."""
    files: PointFiles = {}
    places: dict[str, str] = {}
    for one, (lens, tables) in zip(passes, read, strict=True):
        for measure, table in zip(one.measures, tables, strict=True):
            address = one.address(measure.read, point).resolve(int(lens.model["n_layers"]))
            rows = list(_rows(lens, measure, table[address].tolist()))
            for file in measure.files:
                files[file], places[_stem(file)] = rows, str(address)
    return files, places


def _rows(lens: LogitLensResult, measure: Measure, values: Sequence[float]) -> Iterator[dict[str, Any]]:
    slots = {"token": measure.of} if measure.kind != "logit_diff" else {"target": "target", "foil": "foil"}
    for row, value in enumerate(values):
        about: dict[str, Any] = {"row": row, "value": value if math.isfinite(value) else None}
        for name, slot in slots.items():
            ids = [i for i in getattr(lens, f"{slot}_ids")[row].tolist() if i >= 0]
            about[name] = _one([lens.words[i] for i in ids])
            about[f"{name}_id"] = _one(ids)
        yield about


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _stem(file: str) -> str:
    return file.removesuffix(".json")


def _forward(one: Pass, tokens: Sequence[Sequence[int]], mix: bool, points: Sequence[Point]) -> dict[str, Any]:
    batches = batching.make_batches(tokens, max_tokens=MAX_BATCH_TOKENS, mix_lengths=mix)
    return {
        "step": one.step,
        "input": one.role,
        "rows": len(tokens),
        "tokens": sum(map(len, tokens)),
        "batches": len(batches),
        "points": [point.name for point in points],
    }


def _about(document: Document, plan: Plan, remarks: Sequence[str]) -> dict[str, Any]:
    """What is known of a run before it."""
    found = find_model_folder(document.model_key, document.folder)
    return {
        "document": {
            "name": document.name,
            "path": None if document.path is None else str(document.path.absolute()),
            "sha256": digest(document.data),
            "description": document.spec.header.description,
            "model_key": document.model_key,
            "model_folder": None if found is None else str(found),
        },
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "finished": False,
        "versions": _versions(),
        "rows": [_rows_of(one) for one in plan.passes],
        "notes": list(remarks),
        "points": {},
    }


def _rows_of(one: Pass) -> dict[str, Any]:
    file = None if one.rows.file is None else str(one.rows.file.absolute())
    return {
        "step": one.step,
        "input": one.role,
        "name": one.rows.name,
        "file": file,
        "rows": len(one.rows.records),
        "sha256": one.rows.sha256,
    }


def _computing() -> dict[str, str]:
    """The versions that the numbers depend on."""
    return {
        name: version for name, version in _versions().items() if name in ("murano-interp", "torch", "transformers")
    }


def _versions() -> dict[str, str]:
    from murano import __version__

    found = {"murano-interp": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault(package, importlib.metadata.version(package))
    return found
