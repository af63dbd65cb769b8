"""What the parts of a document must be to each other: names that are there, views that can be had, rows that hold what is asked.

The rules read plain values and pass over what has not the form that they need, so that all that is wrong is found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from murano.documents import errors
from murano.documents.errors import Problem, shown, spell, unknown
from murano.documents.models import find_model_folder
from murano.documents.rows import Rows, find_rows
from murano.documents.schema import COMPONENTS, OF_BLOCKS, SCHEMA_VERSION, STREAM, TOKEN_FIELDS
from murano.errors import InputError, nearest
from murano.prompts import as_answers, as_prompts

#: How a document names the model that needs no download.
BUNDLED = "bundled"
#: Files that a run writes into every point's folder itself.
TAKEN = ("document.json", "run.json")


def problems(data: Any, folder: Path) -> Iterator[Problem]:
    """All that is wrong between the parts of a document.

    Args:
        data: plain values, of whatever form.
        folder: where its rows are looked for.
    """
    for rule in (_header, _model, _sites, _interventions, _steps):
        yield from rule(data, folder)


def _objects(data: Any, *path: str) -> dict[str, dict[str, Any]]:
    """The named objects at a path; those of another form are left out."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return {n: v for n, v in data.items() if isinstance(v, dict)} if isinstance(data, dict) else {}


def _names(data: Any, *path: str) -> list[str]:
    """The names at a path, whatever they stand for."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return list(data) if isinstance(data, dict) else []


def _name(path: errors.Path, kind: str, name: Any, data: Any, *section: str) -> Iterator[Problem]:
    """The problem of a name that names nothing in a section; an empty or broken section has a problem of its own."""
    known = _names(data, *section)
    if isinstance(name, str) and known and name not in known:
        yield unknown(path, kind, name, known)


def _header(data: Any, folder: Path) -> Iterator[Problem]:
    version = _objects(data).get("header", {}).get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        yield Problem(
            spell(("header", "schema_version")),
            "this document was written for a newer Murano",
            shown(version),
            f"up to {SCHEMA_VERSION}; upgrade with pip install -U murano-interp",
        )


def _model(data: Any, folder: Path) -> Iterator[Problem]:
    model = _objects(data).get("model", {})
    key = model.get("key")
    if isinstance(key, str) and not key.strip():
        yield Problem(
            spell(("model", "key")), "the model's name is empty", shown(key), f"a hub id, a folder or {BUNDLED!r}"
        )
    if "key" in model and key in (None, BUNDLED) and model.get("revision") is not None:
        yield Problem(
            spell(("model", "revision")),
            "the bundled model has no revisions",
            shown(model["revision"]),
            "null, or none",
        )
    elif isinstance(key, str) and model.get("revision") is not None and find_model_folder(key, folder) is not None:
        yield Problem(
            spell(("model", "revision")),
            f"{key!r} is a model on this machine, and only models on the hub have revisions",
            shown(model["revision"]),
            "null, or none",
        )


def _sites(data: Any, folder: Path) -> Iterator[Problem]:
    swept: list[str] = []
    for name, site in _objects(data, "sites").items():
        component, layers, path = site.get("component"), site.get("layers"), ("sites", name, "layers")
        if component in OF_BLOCKS and layers is None:
            yield Problem(
                spell(path), f"{component!r} lies in every block: say in which", allowed='[3], or {"sweep": [[0], [1]]}'
            )
        if component in COMPONENTS and component not in OF_BLOCKS and layers is not None:
            yield Problem(spell(path), f"{component!r} belongs to the whole model and takes no layers", shown(layers))
        points = layers.get("sweep") if isinstance(layers, dict) else None
        if points is not None:
            if swept:
                yield Problem(
                    spell(path),
                    f"one sweep makes a document's points, and sites.{swept[0]} has one",
                    allowed="a single layer, [3], here; or a document for each sweep",
                )
            swept.append(name)
        if isinstance(points, list):
            yield from _points(points, (*path, "sweep"))
        if isinstance(layers, list) and len(layers) != 1:
            yield _one_layer(layers, path)


def _points(points: list[Any], path: errors.Path) -> Iterator[Problem]:
    if not points:
        yield Problem(spell(path), "a sweep with no points", shown(points), "at least one point, [[0], [1]], or 'all'")
    for index, point in enumerate(points):
        if isinstance(point, list) and len(point) != 1:
            yield _one_layer(point, (*path, index))
        elif isinstance(point, list) and point in points[:index]:
            yield Problem(
                spell((*path, index)), f"this point is there already, as [{points.index(point)}]", shown(point)
            )


def _one_layer(layers: list[Any], path: errors.Path) -> Problem:
    several = '{"sweep": [' + ", ".join(f"[{shown(layer)}]" for layer in layers[:4]) + "]}"
    return Problem(
        spell(path),
        "a point reads one layer",
        shown(layers),
        f"one layer, [3]; for each on its own {several}" if layers and path[-1] == "layers" else "one layer, [3]",
    )


def _interventions(data: Any, folder: Path) -> Iterator[Problem]:
    for name, intervention in _objects(data, "interventions").items():
        reads = _objects(intervention, "reads")
        at: errors.Path = ("interventions", name)
        for read_name, read in reads.items():
            yield from _read(data, read_name, read, (*at, "reads", read_name))
        for metric_name, metric in _objects(intervention, "metrics").items():
            yield from _metric(intervention, metric, (*at, "metrics", metric_name))
        for write_name, write in _objects(intervention, "writes").items():
            yield from _write(reads, write_name, write, (*at, "writes", write_name))


def _read(data: Any, name: str, read: Mapping[str, Any], path: errors.Path) -> Iterator[Problem]:
    site, role = read.get("site"), read.get("input")
    yield from _name((*path, "site"), "site", site, data, "sites")
    yield from _name((*path, "input"), "role", role, data, "roles")
    featurizer = read.get("featurizer")
    if read.get("view") == "logits":
        component = _objects(data, "sites").get(str(site), {}).get("component")
        if component in COMPONENTS and component not in STREAM:
            yield Problem(
                spell((*path, "view")),
                f"read {name!r}: view 'logits' projects the residual stream through the head, and {component!r} is not the "
                "residual stream",
                f"'logits' at {component!r}",
                f"a site at one of {sorted(STREAM)}",
            )
        if isinstance(featurizer, str) and featurizer != "identity":
            yield Problem(
                spell((*path, "featurizer")),
                f"read {name!r}: a featurized read cannot also be viewed as logits",
                shown(featurizer),
                "'identity', or no featurizer",
            )
    elif isinstance(featurizer, str) and featurizer != "identity":
        yield Problem(
            spell((*path, "featurizer")), "Murano has no featurizers", shown(featurizer), "'identity', or none"
        )


def _metric(intervention: Any, metric: Mapping[str, Any], path: errors.Path) -> Iterator[Problem]:
    of = metric.get("of")
    yield from _name((*path, "of"), "read", of, intervention, "reads")
    read = _objects(intervention, "reads").get(of) if isinstance(of, str) else None
    if read is not None and read.get("view") is None:
        yield Problem(
            spell((*path, "of")),
            f"a metric scores logits, and read {of!r} has no view",
            shown(of),
            'a read with "view": "logits"',
        )


def _write(reads: Mapping[str, Any], name: str, write: Mapping[str, Any], path: errors.Path) -> Iterator[Problem]:
    operand = write.get("operand")
    if isinstance(operand, str) and reads.get(operand, {}).get("view") == "logits":
        yield Problem(
            spell((*path, "operand")),
            f"write {name!r} takes the read {operand!r}, which is vocabulary-wide and cannot be written back at a site",
            shown(operand),
        )
    else:
        yield Problem(spell(path), "Murano observes: it writes nothing into a model", allowed="no writes")


def _steps(data: Any, folder: Path) -> Iterator[Problem]:
    files: list[str] = []
    for name, step in _objects(data, "steps").items():
        path: errors.Path = ("steps", name)
        asked = step.get("interventions")
        yield from _name((*path, "interventions"), "intervention", asked, data, "interventions")
        intervention = _objects(data, "interventions").get(asked) if isinstance(asked, str) else None
        yield from _rows(data, step, intervention, path, folder)
        saves = step.get("saves")
        for index, save in enumerate(saves if isinstance(saves, list) else []):
            if isinstance(save, dict):
                yield from _save(save, intervention, (*path, "saves", index), files)


def _save(save: Mapping[str, Any], intervention: Any, path: errors.Path, files: list[str]) -> Iterator[Problem]:
    value, file = save.get("value"), save.get("file_path")
    if intervention is not None and not _names(intervention, "metrics"):
        yield Problem(spell((*path, "value")), "there is nothing to save", shown(value), "a metric of the intervention")
    yield from _name((*path, "value"), "metric", value, intervention, "metrics")
    if not isinstance(file, str):
        return
    parts = PurePosixPath(file).parts
    at = spell((*path, "file_path"))
    outside = file.startswith("/") or any(part.startswith(".") for part in parts) or any(c in file for c in "\\\0:\n")
    if outside or not file.endswith(".json") or len(file) > 200:
        yield Problem(
            at,
            "no file in the point's folder" if outside else "results are JSON",
            shown(file),
            "a name such as 'p_answer.json'",
        )
        return
    plain = str(PurePosixPath(file))
    if plain != file:  # readers look a file up under the name that the document gives it
        yield Problem(at, "this path has parts that say nothing", shown(file), shown(plain))
    # Some file systems hold 'P.json' and 'p.json' for one file.
    own = plain.lower()
    taken = next((name for name in TAKEN if _clash(own, name)), None)
    other = next((name for name in files if _clash(own, name.lower())), None)
    if taken is not None:
        yield Problem(at, f"the run writes {taken!r} itself", shown(file), "another name")
    elif other == plain:
        yield Problem(at, "another save has this file", shown(file), "another name")
    elif other is not None and other.lower() == own:
        yield Problem(
            at, f"this differs from the file {other!r} of another save only in case", shown(file), "another name"
        )
    elif other is not None:
        yield Problem(
            at, f"a file can't lie inside another one, and another save has {other!r}", shown(file), "another name"
        )
    files.append(plain)


def _clash(one: str, other: str) -> bool:
    """Whether two files can't both be there: they are one, or one would have to be a folder for the other."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _rows(data: Any, step: Mapping[str, Any], intervention: Any, path: errors.Path, folder: Path) -> Iterator[Problem]:
    roles = _objects(data, "roles")
    given = step.get("rows")
    given = given if isinstance(given, dict) else {}
    reads = _objects(intervention, "reads")
    inputs = {r["input"]: n for n, r in reads.items() if isinstance(r.get("input"), str) and r["input"] in roles}
    for role, read in inputs.items():
        if role not in given and isinstance(step.get("rows"), dict):
            yield Problem(
                spell((*path, "rows")),
                f"read {read!r} needs rows for {role!r}",
                shown(list(given)),
                "rows for every input",
            )
    for role, source in given.items():
        at = (*path, "rows", role)
        yield from _name(at, "role", role, data, "roles")
        if not isinstance(source, (str, list)):
            continue
        try:
            rows = find_rows(source, folder)
        except InputError as error:
            found = shown(source) if isinstance(source, str) else ""
            yield Problem(spell(at), str(error).rstrip("."), found, hint=getattr(error, "hint", ""))
            continue
        field = roles.get(role, {}).get("field")
        if isinstance(field, str):
            yield from _field(rows, field, _is_prompt, f"roles.{role}.field", at)
        yield from _tokens(rows, intervention, role, at, ("interventions", str(step.get("interventions")), "metrics"))


def _tokens(rows: Rows, intervention: Any, role: str, at: errors.Path, where: errors.Path) -> Iterator[Problem]:
    """The fields that metrics take tokens from are there, and are no more than one pass reads."""
    here = [n for n, read in _objects(intervention, "reads").items() if read.get("input") == role]
    metrics = {n: m for n, m in _objects(intervention, "metrics").items() if m.get("of") in here}
    for name, metric in metrics.items():
        for field in TOKEN_FIELDS.get(str(metric.get("kind")), ()):
            if isinstance(metric.get(field), str):
                yield from _field(rows, metric[field], _is_answer, spell((*where, name, field)), at)
        if (
            metric.get("kind") == "logit_diff"
            and isinstance(metric.get("foil"), str)
            and metric.get("target") == metric["foil"]
        ):
            yield Problem(
                spell((*where, name, "foil")), "the target is its own foil", shown(metric["foil"]), "another field"
            )
    answers = answer_fields(metrics)
    for name, field in answers.left_over:
        yield Problem(
            spell((*where, name)),
            f"one pass over rows reads one target and one foil: {answers.target!r} and {answers.foil!r} here",
            shown(field),
            "one of these two; or another step, with an intervention of its own",
        )


@dataclass(frozen=True)
class AnswerFields:
    """The fields that a pass over rows takes answers from.

    Args:
        target: the field of the targets.
        foil: the field of the foils.
        left_over: metrics that ask for a third one, and which.
    """

    target: str | None
    foil: str | None
    left_over: tuple[tuple[str, str], ...]


def answer_fields(metrics: Mapping[str, Mapping[str, Any]]) -> AnswerFields:
    """Which fields hold the targets and foils of a pass.

    Args:
        metrics: those that are scored on it, as plain values.
    """
    # What must be a target or a foil comes first: a probability can be read of either.
    wanted = [
        (name, slot, metric[field])
        for kind, field, slot in (
            ("logit_diff", "target", 0),
            ("match", "expected", 0),
            ("logit_diff", "foil", 1),
            ("token_prob", "token", None),
        )
        for name, metric in metrics.items()
        if metric.get("kind") == kind and isinstance(metric.get(field), str)
    ]
    slots: list[str | None] = [None, None]
    left_over = []
    for name, slot, field in wanted:
        choices = [slot] if slot is not None else [0, 1]
        free = next((c for c in choices if slots[c] == field), next((c for c in choices if slots[c] is None), None))
        if free is None:
            left_over.append((name, field))
        else:
            slots[free] = field
    return AnswerFields(slots[0], slots[1], tuple(left_over))


def _field(
    rows: Rows, field: str, check: Callable[[Any, int], None], asked_by: str, at: errors.Path
) -> Iterator[Problem]:
    """The first row that lacks a field, or holds there what can't be used."""
    for index, record in enumerate(rows.records):
        if field not in record:
            yield Problem(
                spell((*at, index)),
                f"row {index} of {rows} has no field {field!r}, which {asked_by} names",
                ", ".join(map(repr, record)) or "no field at all",
                hint=nearest(field, record),
            )
            return
        try:
            check(record[field], index)
        except InputError as error:
            yield Problem(spell((*at, index, field)), str(error).rstrip("."), shown(record[field]))
            return


def _is_prompt(value: Any, index: int) -> None:
    try:
        as_prompts([value])
    except InputError as error:
        raise InputError(str(error).replace("Prompt 0", f"the prompt of row {index}")) from None


def _is_answer(value: Any, index: int) -> None:
    if not as_answers(value, f"answers[{index}]"):
        raise InputError(f"row {index} has no answer")
