"""Document: an experiment that was read and found valid, to be explained and run."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.documents import schema
from murano.documents.errors import DocumentError, Problem
from murano.documents.plan import Plan, check_layers
from murano.documents.reading import plain_problems, read_document
from murano.documents.rules import BUNDLED, problems
from murano.documents.structure import parse
from murano.errors import InputError

if TYPE_CHECKING:
    from murano.documents.runs import DocumentRun
    from murano.model import MuranoModel
    from murano.pipeline import Pipeline


class Document:
    """An experiment as a document.

    Args:
        data: the document as plain values, as JSON has them.
        path: its file, if it has one; its rows are looked for in the same folder, else in the working directory.

    Raises:
        DocumentError: everything that is wrong with it.
    """

    def __init__(self, data: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else None
        found = find_problems(dict(data), self.folder)
        if found:
            raise DocumentError(self.name, found)
        self.data: dict[str, Any] = copy.deepcopy(dict(data))
        spec, _ = parse(self.data)
        assert spec is not None
        self.spec: schema.Spec = spec

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.path.name if self.path is not None else "document"

    @property
    def folder(self) -> Path:
        """Where its rows are looked for."""
        return self.path.parent if self.path is not None else Path()

    @property
    def model_key(self) -> str | None:
        """The model's hub id or folder; ``None`` for the bundled model."""
        key = self.spec.model.key
        return None if key == BUNDLED else key

    @cached_property
    def model(self) -> MuranoModel:
        """The model that it names; its weights load when something first needs them."""
        return self.open_model()

    def open_model(self, backend: str = "eager", **engine_args: Any) -> MuranoModel:
        """The model that it names, on a backend: ``document.run(model=document.open_model("vllm"))``.

        Args:
            backend: ``"eager"`` or ``"vllm"``.
            engine_args: of vLLM's engine.
        """
        from murano.model import MuranoModel

        asked = self.spec.model
        return MuranoModel(self.model_key, backend=backend, dtype=asked.dtype, revision=asked.revision, **engine_args)

    def planned(self, model: MuranoModel | None = None) -> Plan:
        """Points and passes, checked against the model's config; no weights load.

        Args:
            model: the model, if it is held already.

        Raises:
            DocumentError: a layer that the model does not have.
        """
        n_layers = (model if model is not None else self.model).config_layers
        check_layers(self.spec, n_layers, self.name)
        return Plan.of(self.spec, self.folder, n_layers)

    def plan(self) -> str:
        """What :meth:`explain` prints, as a string."""
        from murano.documents.explain import tree

        return tree(self)

    def explain(self) -> None:
        """Print what will be run, as a tree; of the model, only config and tokenizer are read."""
        sys.stdout.write(self.plan() + "\n")

    def pipelines(self, model: MuranoModel | None = None) -> list[Pipeline]:
        """The same as steps, a pipeline for each pass over rows: prompts, one lens for all points, metrics.

        Args:
            model: the model, if it is held already.
        """
        from murano.pipeline import Pipeline

        model = self.check_model(model)
        plan = self.planned(model)
        return [
            Pipeline([*one.reading(model, plan.points), *(one.step_of(measure) for measure in one.measures)])
            for one in plan.passes
        ]

    def run(
        self, out: str | os.PathLike[str] | None = None, *, force: bool = False, model: MuranoModel | None = None
    ) -> DocumentRun:
        """Run it: one forward per batch of rows, whatever the number of points.

        Args:
            out: the folder to write: ``document.json``, ``run.json`` and a folder for each point, with a document of its own and the
                files that the steps save. A run that was interrupted goes on: finished points are not computed again. Without it
                nothing is written.
            force: start over, whatever run the folder holds.
            model: the model, if it is held already.

        Returns:
            The run: metrics by point, and as tables over the swept layers.

        Raises:
            InputError: the folder holds another document's run or something else, or the model is not the document's.
        """
        from murano.documents.run import run_document

        return run_document(self, None if out is None else Path(out), force=force, model=self.check_model(model))

    def check_model(self, model: MuranoModel | None) -> MuranoModel:
        """The document's model; one that was handed in must be that one.

        Raises:
            InputError: it is another.
        """
        from murano.model.loading import parse_dtype

        if model is None:
            return self.model
        asked, given = self.spec.model, model
        same = (str(given.source) if given.source is not None else None) == self.model_key
        same = same and asked.revision in (None, given.revision) and parse_dtype(asked.dtype) in (None, given.dtype)
        if not same:
            revision = f" at {asked.revision}" if asked.revision is not None else ""
            dtype = f" in {asked.dtype}" if asked.dtype is not None else ""
            raise InputError(
                f"{self.name} names the model {self.model_key or BUNDLED!r}{revision}{dtype}, and {given!r} was given: leave model= out."
            )
        return given

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a JSON file.

        Returns:
            The file.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")
        return Path(path)

    def to_json(self) -> str:
        """The document as JSON."""
        return json.dumps(self.data, indent=2, ensure_ascii=False) + "\n"

    def __repr__(self) -> str:
        return f"Document({self.name!r}, model={self.model_key or BUNDLED!r}, steps={list(self.spec.steps)})"


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a document and check it; no model is looked for.

    Args:
        source: a ``.json``, ``.yaml`` or ``.yml`` file, or the document as plain values.

    Raises:
        DocumentError: everything that is wrong with it.
        InputError: the file can't be read.
    """
    if isinstance(source, Mapping):
        return Document(source)
    path = Path(source)
    data = read_document(path)
    if not isinstance(data, dict):
        raise DocumentError(path.name, find_problems(data, path.parent))
    return Document(data, path)


def validate(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Problem, ...]:
    """All that is wrong with a document; nothing if it can be run.

    Args:
        source: as for :func:`load`.

    Raises:
        InputError: the file can't be read.
    """
    try:
        load(source)
    except DocumentError as error:
        return error.problems
    return ()


def find_problems(data: Any, folder: Path) -> list[Problem]:
    """All that is wrong with a document, each problem once, in the order of the document's parts."""
    found = list(plain_problems(data))
    if not found:
        found = [*parse(data)[1], *problems(data, folder)]
    order = {name: index for index, name in enumerate(schema.Spec.model_fields)}
    return sorted(dict.fromkeys(found), key=lambda p: order.get(p.path.partition(".")[0], len(order)))
