"""A pipeline as a document, where a document can say what it does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.documents.answers import check_tokenizer
from murano.documents.document import Document
from murano.documents.models import find_model_folder
from murano.documents.rules import BUNDLED
from murano.documents.schema import OF_BLOCKS, STREAM
from murano.errors import InputError
from murano.prompts import Prompt
from murano.readout.request import parse_layers, parse_positions
from murano.steps import LoadPrompts, LogitDiff, LogitLens, Match, Step, TokenProb
from murano.steps.metrics import MetricStep

if TYPE_CHECKING:
    from murano.pipeline import Pipeline

#: The fields of the rows: no metadata keeps one of these names.
FIELDS = ("input", "target", "foil")
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def to_document(pipeline: Pipeline, description: str = "") -> Document:
    """The document of a pipeline; see :meth:`murano.Pipeline.to_document`."""
    steps = list(pipeline)
    shape = "LoadPrompts, LogitLens, then TokenProb, Match or LogitDiff"
    # Not a class derived from one of these: what it does otherwise would be lost.
    if len(steps) < 3 or type(steps[0]) is not LoadPrompts or type(steps[1]) is not LogitLens:
        raise InputError(
            f"A document is made of {shape}; here is {', '.join(type(s).__name__ for s in steps) or 'no step'}."
        )
    prompts, lens, scores = steps[0], steps[1], steps[2:]
    assert isinstance(prompts, LoadPrompts) and isinstance(lens, LogitLens)
    for number, step in enumerate(scores, start=3):
        if type(step) not in (TokenProb, Match, LogitDiff):
            raise InputError(
                f"{type(step).__name__} (step {number}) has no place in a document, which is made of {shape}."
            )
    _check_lens(lens)
    positions = parse_positions(lens.positions)
    if positions is None:
        raise InputError(
            "A document reads fixed positions, and positions='all' are not: LogitLens(model, positions=[-1])."
        )
    reads: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for step in scores:
        position = _position(step, positions)
        read = "lens" if position == positions[-1] else f"lens_at_{position}"
        reads[read] = {"site": "stream", "pos": position, "input": "base", "view": "logits"}
        kind, fields = _metric(step)
        name = next(n for n in (kind, *(f"{kind}_{i}" for i in range(2, 99))) if n not in metrics)
        metrics[name] = {"kind": kind, "of": read, **fields}
    return Document(
        {
            "header": {"description": description},
            "model": _model(lens.model, prompts.prompts),
            "roles": {"base": {"field": "input", "answers": "continued"}},
            "sites": {"stream": _site(lens)},
            "interventions": {"lens": {"reads": reads, "metrics": metrics}},
            "steps": {
                "lens": {
                    "kind": "observe",
                    "interventions": "lens",
                    "rows": {"base": [_row(prompt) for prompt in prompts.prompts]},
                    "saves": [{"value": name, "file_path": f"{name}.json"} for name in metrics],
                }
            },
        }
    )


def _check_lens(lens: LogitLens) -> None:
    for name, value in (("stats", lens.stats), ("keep", lens.keep)):
        if value:
            raise InputError(
                f"A document has no place for LogitLens({name}={value!r}): it saves metrics of the answers."
            )
    if lens.target_mode != "first":
        raise InputError(f"A document reads an answer by its first token, not with target_mode={lens.target_mode!r}.")
    extra = [name for name in lens.options if name != "apart" and (name, lens.options[name]) != ("product", "torch")]
    if extra:
        raise InputError(f"A document has no place for LogitLens({extra[0]}={lens.options[extra[0]]!r}).")


def _model(model: Any, prompts: Iterable[Prompt]) -> dict[str, Any]:
    if model.source is not None and not isinstance(model.source, str) and not hasattr(model.source, "__fspath__"):
        raise InputError(
            "A document names its model, and this one was handed in as an object: save it into a folder, and MuranoModel(folder)."
        )
    if model._source is not None and model._source.trust_remote_code:
        raise InputError(
            "A document never lets code run that comes with a model, and this one may: trust_remote_code=True. Leave it out, if "
            "transformers knows the family."
        )
    check_tokenizer(model, prompts)
    dtype = model.dtype_asked
    if dtype is not None and str(dtype) not in _DTYPES:
        raise InputError(f"A document has no dtype {dtype}: {', '.join(_DTYPES)}.")
    # By its whole path, so that the document can be saved and run anywhere.
    folder = None if model.source is None else find_model_folder(str(model.source), Path())
    found = {"key": BUNDLED if model.source is None else str(folder or model.source)}
    if model.source is not None and folder is None and model.revision is not None:
        found["revision"] = model.revision
    return found | ({"dtype": _DTYPES[str(dtype)]} if dtype is not None else {})


def _site(lens: LogitLens) -> dict[str, Any]:
    """The component that is read, and a sweep over its layers."""
    names = {murano: name for name, murano in STREAM.items()}
    if isinstance(lens.layers, str) and lens.layers == "all":
        return {"component": names["resid_post"], "layers": {"sweep": "all"}}
    addresses = parse_layers(lens.layers, lens.model.config_layers)
    components = list(dict.fromkeys(address.component for address in addresses))
    if len(components) != 1 or components[0] not in names or not addresses:
        raise InputError(
            f"A document sweeps the layers of one component of {', '.join(names)}, not of {', '.join(components) or 'none'}: "
            f"layers={lens.layers!r}."
        )
    name = names[components[0]]
    sweep = {"layers": {"sweep": [[address.layer] for address in addresses]}}
    return {"component": name, **(sweep if name in OF_BLOCKS else {})}


def _position(step: Step, positions: tuple[int, ...]) -> int:
    """The position in its prompt that a metric is of."""
    assert isinstance(step, MetricStep)
    position = int(step.options.get("position", -1))
    if position not in positions:
        raise InputError(f"{step!r} is of position {position}, which is not read: positions={list(positions)}.")
    return position


def _metric(step: Step) -> tuple[str, dict[str, str]]:
    """Its kind in a document, and the fields that it takes tokens from."""
    assert isinstance(step, MetricStep)
    if isinstance(step, TokenProb):
        return "token_prob", {"token": step.options.get("of", "target")}
    if isinstance(step, Match):
        return "match", {"expected": "target"}
    return "logit_diff", {"target": "target", "foil": "foil"}


def _row(prompt: Prompt) -> dict[str, Any]:
    rest = {name: value for name, value in prompt.metadata.items() if name not in FIELDS}
    text: Any = prompt.text or [dict(m) for m in prompt.messages] or list(prompt.token_ids)
    answers = {
        name: given[0] if len(given) == 1 else list(given)
        for name, given in (("target", prompt.targets), ("foil", prompt.foils))
        if given
    }
    return {"input": text, **answers, **rest}
