"""The form of a document checked against the schema: pydantic finds, this file says it in a document's own words."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from murano.documents import errors, schema
from murano.documents.errors import Problem, shown, spell
from murano.errors import nearest

#: Types of pydantic's errors, and what they ask for.
_TYPES = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse(data: Any) -> tuple[schema.Spec | None, list[Problem]]:
    """A document's parts, or all that is wrong with its form.

    Args:
        data: plain values.
    """
    try:
        return schema.Spec.model_validate(data), []
    except ValidationError as error:
        found = [(e["type"], _problem(e, data)) for e in error.errors(include_url=False)]
    # A field that is only misspelt is not missing as well.
    meant = {p.path.rpartition(".")[0] + p.hint for kind, p in found if kind == "extra_forbidden"}
    return None, [
        p
        for kind, p in found
        if kind != "missing" or p.path.rpartition(".")[0] + f" Did you mean {p.path.rpartition('.')[2]!r}?" not in meant
    ]


def part_at(path: errors.Path, data: Any) -> type[schema.Part] | None:
    """The schema's part that lies at a path; ``None`` where there is none."""
    shape = tuple(part if i in _NAMED.get(len(path), ()) else "*" for i, part in enumerate(path))
    if shape == ("interventions", "*", "metrics", "*"):
        return schema.METRICS[schema.metric_kind(_at(data, path))]
    return _PARTS.get(shape)


#: Where each part lies; ``*`` stands for a name that the document gives, or for an index.
_PARTS: dict[tuple[str | int, ...], type[schema.Part]] = {
    (): schema.Spec,
    ("header",): schema.Header,
    ("model",): schema.ModelSource,
    ("roles", "*"): schema.Role,
    ("sites", "*"): schema.Site,
    ("sites", "*", "layers"): schema.Sweep,
    ("interventions", "*"): schema.Intervention,
    ("interventions", "*", "reads", "*"): schema.Read,
    ("interventions", "*", "writes", "*"): schema.Write,
    ("steps", "*"): schema.StepSpec,
    ("steps", "*", "saves", "*"): schema.Save,
}
#: The places in a path of some length where the schema's own names stand.
_NAMED = {1: (0,), 2: (0,), 3: (0, 2), 4: (0, 2)}


def _at(data: Any, path: errors.Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _problem(error: Any, data: Any) -> Problem:
    kind, path = error["type"], tuple(p for p in error["loc"] if not (isinstance(p, str) and p.startswith(schema.MARK)))
    found = error["input"]
    part = part_at(path[:-1], data) if path else schema.Spec
    fields = {field.alias or name: field for name, field in part.model_fields.items()} if part is not None else {}
    name = path[-1] if path else ""
    described = fields[name].description if name in fields else None
    if kind == "extra_forbidden":
        known = list(fields)
        return Problem(
            spell(path), f"there is no field {shown(name)} here", shown(found), ", ".join(known), nearest(name, known)
        )
    if name == "kind" and part is not None and part in schema.METRICS.values():
        allowed = " or ".join(map(repr, schema.METRICS))
        what = "a metric needs its kind" if kind == "missing" else "there is no such metric"
        return Problem(
            spell(path), what, "" if kind == "missing" else shown(found), allowed, _near(found, schema.METRICS)
        )
    if kind == "missing":
        return Problem(spell(path), "this field is missing", allowed=described or "")
    if kind == "literal_error":
        known = _choices(fields[name].annotation if name in fields else None)
        allowed = " or ".join(map(repr, known)) or described or ""
        return Problem(spell(path), "unknown value", shown(found), allowed, _near(found, known))
    if kind in ("too_short", "greater_than_equal"):
        what = "there must be at least one" if kind == "too_short" else "too small"
        return Problem(spell(path), what, shown(found), described or "")
    if kind in _TYPES:
        return Problem(spell(path), f"this must be {_TYPES[kind]}", shown(found), described or _inner(path))
    return Problem(spell(path), str(error["msg"]).rstrip("."), shown(found), described or "")


def _inner(path: errors.Path) -> str:
    """What may stand in the lists and objects that are no part of their own."""
    if "layers" in path[2:3]:
        return 'layers are whole numbers: [3], or {"sweep": [[0], [1]]}'
    if "rows" in path[2:3]:
        return "the name of a data set, 'weekdays/train', or a list of rows"
    return f"names and the objects they stand for: {', '.join(list(schema.Spec.model_fields)[1:])}" if not path else ""


def _near(found: object, known: Any) -> str:
    return nearest(found, known) if isinstance(found, str) else ""


def _choices(annotation: Any) -> list[str]:
    """The texts that a field may hold."""
    arguments = getattr(annotation, "__args__", ())
    return [a for a in arguments if isinstance(a, str)] + [t for a in arguments for t in _choices(a)]
