"""The form of a document: what its objects are called and what each field holds."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

#: The newest form of documents that this version reads.
SCHEMA_VERSION = 1

#: Components that are the residual stream, and what Murano calls them.
STREAM = {
    "block_input": "resid_pre",
    "block_output": "resid_post",
    "embeddings": "embeddings",
    "ln_final": "ln_final",
}
#: Components that belong to a block: their sites name layers.
OF_BLOCKS = ("block_input", "block_output", "attention_output", "mlp_output")
Component = Literal[
    "block_input", "block_output", "embeddings", "ln_final", "attention_output", "mlp_output", "lm_head", "logits"
]
Dtype = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]

#: Marks the names that pydantic puts into a path for the form that it took a value for: no key of a document begins so.
MARK = "\0"


class Part(BaseModel):
    """What all parts share: no other fields than those named, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Header(Part):
    """What the document says about itself."""

    description: str = Field(default="", description="a text")
    schema_version: int = Field(default=SCHEMA_VERSION, ge=1, description=f"a whole number from 1 to {SCHEMA_VERSION}")


class ModelSource(Part):
    """The model that is read."""

    key: str | None = Field(description="a hub id, a model's folder, or null or 'bundled' for the bundled model")
    revision: str | None = Field(None, description="a commit, tag or branch on the hub")
    dtype: Dtype | None = Field(None, description="the dtype of the weights; the checkpoint's own without it")


class Role(Part):
    """An input: what the model reads of each row."""

    field: str = Field(description="the field of a row that holds the prompt")
    answers: Literal["as_written", "continued"] = Field(
        "as_written",
        description="how an answer becomes a token: 'as_written' takes the first token of its text alone, 'continued' the first one "
        "of it as it follows the prompt, after a space where one belongs",
    )


def _points_form(value: Any) -> str:
    return f"{MARK}all" if isinstance(value, str) else f"{MARK}list"


Points = Annotated[
    Annotated[list[list[int]], Tag(f"{MARK}list")] | Annotated[Literal["all"], Tag(f"{MARK}all")],
    Discriminator(_points_form),
]


class Sweep(Part):
    """Values that a field takes, one after the other: a point each."""

    sweep: Points = Field(description="a list of points, [[0], [1]], or 'all' layers")

    def layers(self, n_layers: int | None = None) -> list[int]:
        """The layer of each point.

        Args:
            n_layers: what ``"all"`` stands for.
        """
        return list(range(n_layers or 0)) if isinstance(self.sweep, str) else [layer for (layer,) in self.sweep]


def _layers_form(value: Any) -> str:
    return f"{MARK}sweep" if isinstance(value, (dict, Sweep)) else f"{MARK}list"


Layers = Annotated[
    Annotated[list[int], Tag(f"{MARK}list")] | Annotated[Sweep, Tag(f"{MARK}sweep")], Discriminator(_layers_form)
]


class Site(Part):
    """A place in the model."""

    component: Component = Field(description="a component of the model")
    layers: Layers | None = Field(None, description='a layer, [3], or points of a sweep, {"sweep": [[0], [1]]}')


class Read(Part):
    """What is read at a site."""

    site: str = Field(description="the name of a site")
    pos: int = Field(description="the position of a token: 0 is the first, -1 the last")
    input: str = Field(description="the name of a role")
    view: Literal["logits"] | None = Field(None, description="'logits', to read through the final norm and the head")
    featurizer: str | None = Field(None, description="'identity', or nothing")


class Write(Part):
    """What would be written at a site; Murano only observes, and says so."""

    site: str = Field(description="the name of a site")
    pos: int = Field(description="the position of a token")
    input: str | None = Field(None, description="the name of a role")
    operand: str = Field(description="the name of a read")


class TokenProbMetric(Part):
    """The probability of a token."""

    kind: Literal["token_prob"]
    of: str = Field(description="the name of a read")
    token: str = Field(description="the field of a row that holds the token's text")


class MatchMetric(Part):
    """Whether a token is the most probable one: 1 or 0."""

    kind: Literal["match"]
    of: str = Field(description="the name of a read")
    expected: str = Field(description="the field of a row that holds the token's text")


class LogitDiffMetric(Part):
    """The logit of the target less that of the foil."""

    kind: Literal["logit_diff"]
    of: str = Field(description="the name of a read")
    target: str = Field(description="the field of a row that holds the target's text")
    foil: str = Field(description="the field of a row that holds the foil's text")


METRICS: dict[str, type[Part]] = {
    "token_prob": TokenProbMetric,
    "match": MatchMetric,
    "logit_diff": LogitDiffMetric,
}
#: The fields of a metric that name a field of the rows.
TOKEN_FIELDS = {"token_prob": ("token",), "match": ("expected",), "logit_diff": ("target", "foil")}


def metric_kind(value: Any) -> str:
    """The metric that an object is, or comes nearest to."""
    if isinstance(value, Part):
        return str(value.kind)  # type: ignore[attr-defined]
    if not isinstance(value, dict):
        return "token_prob"
    kind = value.get("kind")
    if isinstance(kind, str) and kind in METRICS:
        return kind
    near = difflib.get_close_matches(str(kind), METRICS, n=1, cutoff=0.5)
    by_fields = [name for name, fields in TOKEN_FIELDS.items() if any(field in value for field in fields)]
    return [*near, *by_fields, "token_prob"][0]


Metric = Annotated[
    Annotated[TokenProbMetric, Tag(f"{MARK}token_prob")]
    | Annotated[MatchMetric, Tag(f"{MARK}match")]
    | Annotated[LogitDiffMetric, Tag(f"{MARK}logit_diff")],
    Discriminator(lambda value: MARK + metric_kind(value)),
]


class Intervention(Part):
    """What is read, and how it is scored."""

    reads: dict[str, Read] = Field(min_length=1, description="reads by name")
    metrics: dict[str, Metric] = Field({}, description="metrics by name")
    writes: dict[str, Write] = Field({}, description="nothing: Murano observes")


class Save(Part):
    """A file that a point gets."""

    value: str = Field(description="the name of a metric")
    file_path: str = Field(description="a file's name that ends in .json: its shortest path in the point's folder")


def _rows_form(value: Any) -> str:
    return f"{MARK}list" if isinstance(value, (list, tuple)) else f"{MARK}name"


RowSource = Annotated[
    Annotated[str, Tag(f"{MARK}name")] | Annotated[list[dict[str, Any]], Tag(f"{MARK}list")],
    Discriminator(_rows_form),
]


class StepSpec(Part):
    """One pass over the rows."""

    kind: Literal["observe"] = Field(description="'observe'")
    interventions: str = Field(description="the name of an entry in interventions")
    rows: dict[str, RowSource] = Field(
        min_length=1, description="by role: the name of a data set, 'weekdays/train', or a list of rows"
    )
    saves: list[Save] = Field(min_length=1, description="the files that each point gets")


class Spec(Part):
    """An experiment as a document."""

    model_config = ConfigDict(title="Murano document")

    schema_file: str | None = Field(
        default=None, alias="$schema", description="the file of the JSON Schema, for editors"
    )
    header: Header = Field(default_factory=Header, description="an object")
    model: ModelSource = Field(description="the model that is read")
    roles: dict[str, Role] = Field(min_length=1, description="inputs by name")
    sites: dict[str, Site] = Field(min_length=1, description="places in the model by name")
    interventions: dict[str, Intervention] = Field(min_length=1, description="what is read, by name")
    steps: dict[str, StepSpec] = Field(min_length=1, description="passes over rows, by name")


COMPONENTS: tuple[str, ...] = get_args(Component)


def json_schema() -> dict[str, Any]:
    """The form of a document as a JSON Schema, for editors: ``murano validate --schema > murano.schema.json``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Spec.model_json_schema(),
    }
