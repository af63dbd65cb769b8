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
from murano.documents.errors import DocumentError, Problem, as_path, shown
from murano.documents.models import find_model_folder
from murano.documents.plan import Plan, check_layers
from murano.documents.reading import plain_problems, read_document
from murano.documents.rules import BUNDLED, problems
from murano.documents.structure import parse
from murano.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from murano.documents.runs import DocumentRun
    from murano.model import MuranoModel
    from murano.pipeline import Pipeline


_NO_DOCUMENT = "A document is a .json, .yaml or .yml file, or its values as a dict"


class Document:
    """An experiment as a document.

    Args:
        data: the document as plain values, as JSON has them.
        path: its file, if it has one; rows and a model's folder are looked for beside it, else in the working directory.

    Raises:
        DocumentError: everything that is wrong with it.
        InputError: this is no document at all.
    """

    def __init__(self, data: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
        if not isinstance(data, Mapping):
            raise InputError(f"{_NO_DOCUMENT}, not {_shown(data)}.")
        self.path = as_path(path, "path", "the document's file") if path is not None else None
        found = find_problems(dict(data), self.folder)
        if found:
            raise DocumentError(self.name, found)
        self._data: dict[str, Any] = copy.deepcopy(dict(data))
        spec, _ = parse(self._data)
        assert spec is not None
        self.spec: schema.Spec = spec

    @property
    def data(self) -> dict[str, Any]:
        """The document as plain values: a copy. A document never changes; ``documents.load(data)`` makes another one of what you change."""
        return copy.deepcopy(self._data)

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.path.name if self.path is not None else "document"

    @property
    def folder(self) -> Path:
        """Where its rows, and a model's folder, are looked for."""
        return self.path.parent if self.path is not None else Path()

    @property
    def model_key(self) -> str | None:
        """The model's hub id or folder as the document writes it; ``None`` for the bundled model."""
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

        asked, found = self.spec.model, find_model_folder(self.model_key, self.folder)
        source = self.model_key if found is None else str(found)
        return MuranoModel(source, backend=backend, dtype=asked.dtype, revision=asked.revision, **engine_args)

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
        """Print what will be run, as a tree; of the model, only config and tokenizer are read.

        Raises:
            DocumentError: a layer that the model does not have, or rows that it can't read.
        """
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
            DocumentError: a layer that the model does not have, or rows that it can't read.
            InputError: the folder holds another document's run or something else, or the model is not the document's.
        """
        from murano.documents.run import run_document

        folder = None if out is None else as_path(out, "out", "the folder to write")
        return run_document(self, folder, force=force, model=self.check_model(model))

    def check_model(self, model: MuranoModel | None) -> MuranoModel:
        """The document's model; one that was handed in must be that one.

        Raises:
            InputError: it is another.
        """
        from murano.documents.answers import check_tokenizer
        from murano.model import MuranoModel
        from murano.model.loading import parse_dtype

        if model is None:
            return self.model
        if not isinstance(model, MuranoModel):
            raise InputError(
                f"model= is a MuranoModel, not {_shown(model)}: leave it out, and the document's own is loaded."
            )
        asked, wanted = self.spec.model, parse_dtype(self.spec.model.dtype)
        same = self._names(model.source) and asked.revision in (None, model.revision)
        # The dtype that was asked for comes first: that of the weights is known when they are there.
        if not same or (wanted is not None and wanted != model.dtype_asked and wanted != model.dtype):
            revision = f" at {asked.revision}" if asked.revision is not None else ""
            dtype = f" in {asked.dtype}" if asked.dtype is not None else ""
            raise InputError(
                f"{self.name} names the model {self.model_key or BUNDLED!r}{revision}{dtype}, and {model!r} was given: leave model= out."
            )
        for one in Plan.of(self.spec, self.folder).passes:
            check_tokenizer(model, (one.prompt(index, None) for index in range(len(one.rows.records))))
        return model

    def _names(self, source: Any) -> bool:
        """Whether this is the model that it names."""
        if self.model_key is None or not isinstance(source, (str, os.PathLike)):
            return source is None and self.model_key is None
        found, given = find_model_folder(self.model_key, self.folder), Path(source).expanduser()
        if found is None:
            return str(source) == self.model_key
        return given.exists() and found.samefile(given)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a JSON file.

        Returns:
            The file.

        Raises:
            InputError: the file's name does not end in ``.json``.
            ArtifactError: it can't be written.
        """
        file = as_path(path, "path", "a file that ends in .json")
        if file.suffix.lower() != ".json":
            raise InputError(
                f"A document is saved as JSON, and {str(file)!r} does not end in .json: save({f'{file}.json'!r})."
            )
        try:
            file.write_text(self.to_json(), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ArtifactError(f"Can't write {str(file)!r}: {getattr(error, 'strerror', None) or error}.") from None
        return file

    def to_json(self) -> str:
        """The document as JSON."""
        return json.dumps(self._data, indent=2, ensure_ascii=False) + "\n"

    def __repr__(self) -> str:
        return f"Document({self.name!r}, model={self.model_key or BUNDLED!r}, steps={list(self.spec.steps)})"


def load(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a document and check it; no model is looked for.

    Args:
        source: a ``.json``, ``.yaml`` or ``.yml`` file, or the document as plain values.

    Raises:
        DocumentError: everything that is wrong with it.
        InputError: the file can't be read, or this is neither.
    """
    if isinstance(source, Mapping):
        return Document(source)
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InputError(f"{_NO_DOCUMENT}, not {_shown(source)}.")
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
        InputError: the file can't be read, or this is neither.
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


def _shown(value: object) -> str:
    return f"a {type(value).__name__}, {shown(value)}" if value is not None else "None"
