"""A document's plan as a tree: points, forwards, reads, metrics and files, with rows and tokens counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from murano.documents import schema
from murano.documents.answers import encoded, notes
from murano.documents.plan import Measure, Pass, Plan, Point
from murano.documents.rules import BUNDLED

if TYPE_CHECKING:
    from murano.documents.document import Document


def tree(document: Document) -> str:
    """The plan of a document; of the model, only config and tokenizer are read."""
    plan = document.planned()
    return "\n".join(_lines(document, plan, encoded(plan, document.model, document.name)))


def _lines(document: Document, plan: Plan, tokens: list[list[list[int]]]) -> Iterator[str]:
    spec, points, forwards = document.spec, len(plan.points), len(plan.passes)
    yield document.name
    key, source = document.model_key or BUNDLED, str(document.model.source or document.model.model_id)
    model = key if key == source else f"{key} ({source})"
    revision = f" at {spec.model.revision}" if spec.model.revision else ""
    yield f"  model: {model}{revision}, {spec.model.dtype or 'in the dtype of its checkpoint'}"
    if points > 1:
        shared = f"they share model, rows and inputs, so {_forwards(forwards)} instead of {points * forwards}"
        yield f"  points: {points}; {shared}"
    else:
        yield f"  points: 1, {_forwards(forwards)}"
    for one, rows in zip(plan.passes, tokens, strict=True):
        lengths = [len(ids) for ids in rows]
        size = f"{len(lengths)} rows × {_span(lengths)} tokens"
        for_all = f", for {points} points" if points > 1 else ""
        yield f"  {one.step}: observe"
        yield f"    forward on {one.role!r}: {size} of {one.rows}, {sum(lengths)} tokens in all{for_all}"
        for point in plan.points:
            yield from (f"      {line}" for line in _point(one, point))
        yield from (f"    note: {note}" for note in notes(one, document.model.tokenizer))


def _forwards(count: int) -> str:
    return f"{count} forward{'s' if count != 1 else ''} over the rows"


def _point(one: Pass, point: Point) -> Iterator[str]:
    if point.name:
        yield point.name
    indent = "  " if point.name else ""
    for name, read in one.reads.items():
        site, address = one.spec.sites[read.site], one.address(name, point)
        layer = f"[{address.layer}]" if site.component in schema.OF_BLOCKS else ""
        yield f"{indent}read {name!r} at {site.component}{layer} ({address}), pos {read.pos}, as {read.view}"
        for measure in one.measures:
            if measure.read == name:
                yield f"{indent}  {_measure(measure)} → {', '.join(measure.files)}"


def _measure(measure: Measure) -> str:
    fields = ", ".join(f"{name} {field!r}" for name, field in measure.fields.items())
    return f"{measure.name}: {measure.kind}, {fields}"


def _span(lengths: list[int]) -> str:
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low} to {high}"
