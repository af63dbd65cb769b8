"""What a document comes to: points, the passes over rows that serve them, and the steps of each pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.address import Address
from murano.documents import schema
from murano.documents.errors import DocumentError, Problem, spell
from murano.documents.rows import Rows, find_rows
from murano.documents.rules import answer_fields
from murano.errors import InputError

if TYPE_CHECKING:
    from murano.pipeline import Pipeline
    from murano.prompts import Prompt, PromptBatch
    from murano.steps.metrics import MetricStep


@dataclass(frozen=True)
class Point:
    """One value of the sweep, or the whole document where nothing is swept.

    Args:
        name: of its folder, ``"layers=3"``; empty where nothing is swept.
        site: the swept site.
        layer: what it takes there, as the document writes it.
    """

    name: str = ""
    site: str = ""
    layer: int = 0


@dataclass(frozen=True)
class Measure:
    """One metric.

    Args:
        name: as the document calls it.
        kind: ``"token_prob"``, ``"match"`` or ``"logit_diff"``.
        read: the read that it scores.
        of: ``"target"`` or ``"foil"``: where the pass holds its token.
        fields: what the document says the token is, ``{"token": "base_answer"}``.
        files: that it is saved in.
    """

    name: str
    kind: str
    read: str
    of: str
    fields: Mapping[str, str]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Pass:
    """One pass over the rows of one input: a forward per batch, whatever the number of points.

    Args:
        step: the document's step.
        role: the input.
        spec: the document.
        rows: what is read.
        target: the field of the targets.
        foil: the field of the foils.
        reads: what is read, by name.
        measures: the metrics.
    """

    step: str
    role: str
    spec: schema.Spec
    rows: Rows
    target: str | None
    foil: str | None
    reads: Mapping[str, schema.Read]
    measures: tuple[Measure, ...]

    @property
    def positions(self) -> list[int]:
        """The positions that are read, in the order of the lens's position axis."""
        return list(dict.fromkeys(read.pos for read in self.reads.values()))

    def address(self, read: str, point: Point) -> Address:
        """Where a read lies at a point."""
        name = self.reads[read].site
        site = self.spec.sites[name]
        component = schema.STREAM[site.component]
        if site.component not in schema.OF_BLOCKS:
            return Address(None, component)
        return Address(point.layer if name == point.site else _only(site), component)

    def addresses(self, points: Sequence[Point], n_layers: int | None) -> list[Address]:
        """Every place that is read at these points, once."""
        found = [self.address(m.read, point) for point in points for m in self.measures]
        return list(dict.fromkeys(a if n_layers is None else a.resolve(n_layers) for a in found))

    def prompts(self, tokenizer: Any) -> PromptBatch:
        """The rows as prompts with their answers.

        Raises:
            InputError: an answer that becomes no token; the row is named.
        """
        from murano.prompts import PromptBatch

        return PromptBatch([self.prompt(index, tokenizer) for index in range(len(self.rows.records))])

    def prompt(self, index: int, tokenizer: Any) -> Prompt:
        """A row as a prompt with its answers.

        Args:
            index: of the row.
            tokenizer: the model's; without one the answers stay as they are written.

        Raises:
            InputError: an answer that becomes no token.
        """
        from murano.prompts import as_prompts

        role, record = self.spec.roles[self.role], self.rows.records[index]
        written = tokenizer is not None and role.answers == "as_written"
        answers: dict[str, Any] = {
            name: [[_first(a, field, tokenizer) for a in listed(record[field])] if written else record[field]]
            for name, field in (("targets", self.target), ("foils", self.foil))
            if field is not None
        }
        found: Prompt = as_prompts([record[role.field]], **answers)[0]
        return found

    def step_of(self, measure: Measure) -> MetricStep:
        """The step that computes a metric."""
        from murano.steps import LogitDiff, Match, TokenProb

        position = self.reads[measure.read].pos
        options: dict[str, Any] = {} if position == -1 else {"position": position}
        if measure.kind == "token_prob":
            return TokenProb(**({"of": "foil"} if measure.of == "foil" else {}), **options)
        return {"match": Match, "logit_diff": LogitDiff}[measure.kind](**options)

    def reading(self, model: Any, points: Sequence[Point]) -> Pipeline:
        """The steps that read these points: prompts, then one lens for all of them.

        Args:
            model: a :class:`~murano.MuranoModel`.
            points: which ones.
        """
        from murano.pipeline import Pipeline
        from murano.steps import LoadPrompts, LogitLens

        lens = LogitLens(
            model, self.addresses(points, model.config_layers), self.positions, top_k=1, apart=True, product="tiles"
        )
        return Pipeline([LoadPrompts(self.prompts(model.tokenizer)), lens])


@dataclass(frozen=True)
class Plan:
    """All that a document comes to.

    Args:
        points: what is saved, each in a folder of its own.
        passes: what is run.
    """

    points: tuple[Point, ...]
    passes: tuple[Pass, ...]

    @classmethod
    def of(cls, spec: schema.Spec, folder: Path, n_layers: int | None = None) -> Plan:
        """The plan of a document.

        Args:
            spec: the document.
            folder: where its rows are looked for.
            n_layers: of the model: what ``"all"`` stands for.
        """
        passes = []
        for name, step in spec.steps.items():
            intervention = spec.interventions[step.interventions]
            saved = {m: tuple(save.file_path for save in step.saves if save.value == m) for m in intervention.metrics}
            used = {m: metric for m, metric in intervention.metrics.items() if saved[m]}
            roles = dict.fromkeys(intervention.reads[metric.of].input for metric in used.values())
            for role in roles:
                here = {m: metric for m, metric in used.items() if intervention.reads[metric.of].input == role}
                plain = {m: metric.model_dump() for m, metric in here.items()}
                answers = answer_fields(plain)
                measures = [
                    Measure(
                        m,
                        metric.kind,
                        metric.of,
                        "foil" if plain[m].get("token") not in (None, answers.target) else "target",
                        {f: plain[m][f] for f in schema.TOKEN_FIELDS[metric.kind]},
                        saved[m],
                    )
                    for m, metric in here.items()
                ]
                source = step.rows[role]
                found = find_rows(source, folder)
                reads = {m.read: intervention.reads[m.read] for m in measures}
                passes.append(Pass(name, role, spec, found, answers.target, answers.foil, reads, tuple(measures)))
        return cls(tuple(_points(spec, n_layers)), tuple(passes))


def _points(spec: schema.Spec, n_layers: int | None) -> list[Point]:
    for name, site in spec.sites.items():
        if isinstance(site.layers, schema.Sweep):
            return [Point(f"layers={layer}", name, layer) for layer in site.layers.layers(n_layers)]
    return [Point()]


def listed(answers: Any) -> list[Any]:
    """The answers that a field of a row holds, one or several."""
    return answers if isinstance(answers, list) else [answers]


def _first(answer: str | int, field: str, tokenizer: Any) -> int:
    """The first token of an answer as it is written."""
    ids = [answer] if isinstance(answer, int) else tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"has {answer!r} in {field!r}, which becomes no token at all")
    return int(ids[0])


def _only(site: schema.Site) -> int:
    assert isinstance(site.layers, list)
    return site.layers[0]


def at_point(data: dict[str, Any], point: Point) -> dict[str, Any]:
    """A document with its sweep set to one point: it can be run alone.

    Args:
        data: the document as plain values.
        point: one of its points.
    """
    if not point.name:
        return data
    sites = {**data["sites"], point.site: {**data["sites"][point.site], "layers": [point.layer]}}
    return {**data, "sites": sites}


def check_layers(spec: schema.Spec, n_layers: int | None, name: str) -> None:
    """Refuse layers that a model does not have.

    Args:
        spec: the document.
        n_layers: of the model, as its config counts them; ``None`` where it does not.
        name: of the document, for the error.

    Raises:
        DocumentError: all of them, with their paths.
    """
    found: list[Problem] = []
    for site_name, site in spec.sites.items():
        path = ("sites", site_name, "layers")
        if isinstance(site.layers, schema.Sweep) and site.layers.sweep == "all":
            if n_layers is None:
                found.append(
                    Problem(
                        spell((*path, "sweep")),
                        "this family's layers can't be counted before its weights load",
                        "'all'",
                        "the points one by one, [[0], [1]]",
                    )
                )
            continue
        if n_layers is None or site.layers is None:
            continue
        if isinstance(site.layers, schema.Sweep):
            listed: list[tuple[tuple[str | int, ...], int]] = [
                (("sweep", i, 0), layer) for i, layer in enumerate(site.layers.layers())
            ]
        else:
            listed = [((0,), _only(site))]
        seen: dict[int, int] = {}
        for inner, layer in listed:
            where = (*path, *inner)
            if not -n_layers <= layer < n_layers:
                allowed = f"0 to {n_layers - 1}, or -1 for the last"
                found.append(Problem(spell(where), f"the model has {n_layers} layers", str(layer), allowed))
            elif layer % n_layers in seen:
                found.append(Problem(spell(where), f"this is layer {seen[layer % n_layers]} once more", str(layer)))
            seen[layer % n_layers] = layer
    if found:
        raise DocumentError(name, found)
