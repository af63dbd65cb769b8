"""Going on with a run that was stopped: which steps need not run again, and where a long one stopped."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murano.errors import ArtifactError
from murano.results import Results, StepRecord
from murano.steps.base import Step, step_name

logger = logging.getLogger(__name__)


def step_fingerprint(step: Step, results: Results) -> str:
    """What a step's outputs depend on: its class and arguments, what it reads, the model, and the versions that compute.

    Args:
        step: the step.
        results: where it reads.
    """
    from murano.artifacts.codec import fingerprint

    def of(value: Any) -> str:
        identity = getattr(value, "identity", None)
        if callable(identity):
            return str(identity())
        try:
            return fingerprint(value)
        except ArtifactError:  # a function, an open file: no data, but its code or its repr still tells a change
            code = getattr(value, "__code__", None)
            return repr((value.__qualname__, code.co_code, code.co_consts)) if code is not None else repr(value)

    arguments = {
        name: of(getattr(step, name)) for name in inspect.signature(type(step)).parameters if hasattr(step, name)
    }
    parts = {
        "step": f"{type(step).__module__}.{type(step).__qualname__}",
        "arguments": arguments,
        "reads": {str(key): of(results[key]) for key in step.reads},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


class Resume:
    """An earlier run of the same pipeline, in which finished work is looked up.

    Args:
        folder: the run's folder; it need not exist yet.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from murano.artifacts.run import load_run

        self.folder = Path(folder)
        # Beside the run, so that saving the run, which replaces its folder, leaves it alone.
        self.checkpoints = self.folder.parent / f".{self.folder.name}.checkpoints"
        self.earlier: Results = load_run(self.folder) if (self.folder / "manifest.json").exists() else Results()

    def run(self, step: Step, results: Results) -> Results:
        """Take a step's outputs from the earlier run if nothing that they depend on has changed; else run it."""
        name, mark = step_name(step), ""
        if step.resumable:
            mark = step_fingerprint(step, results)
            why, found = self._find(step, mark)
            if found:
                for key in step.writes:
                    results[key] = found[str(key)]
                results.history.append(
                    StepRecord(name, repr(step), 0.0, tuple(map(str, step.writes)), mark, skipped=True)
                )
                logger.warning("Skipped %s: %s", name, why)
                return results
            logger.warning("Running %s: %s", name, why)
        results.checkpoint = self.checkpoints / f"{mark[:32]}.pt" if mark else None
        try:
            results = step(results)
        finally:
            results.checkpoint = None
        results.history[-1] = StepRecord(**{**vars(results.history[-1]), "fingerprint": mark})
        if mark and step.writes:
            self._keep(step, mark, results)
        return results

    def _find(self, step: Step, mark: str) -> tuple[str, Mapping[str, Any]]:
        for record in self.earlier.history:
            if record.fingerprint == mark and all(key in self.earlier for key in step.writes):
                return (
                    f"{self.folder} has what it writes, and its inputs, arguments and versions are unchanged.",
                    self.earlier,
                )
        kept = self.checkpoints / mark[:32]
        if kept.exists():
            from murano.artifacts.run import load_run

            return "it had finished when the run was stopped.", load_run(kept)
        same = [r for r in self.earlier.history if r.name == step_name(step)]
        if same:
            return "its inputs, its arguments or a version have changed since it was saved.", {}
        return "it has not run yet.", {}

    def _keep(self, step: Step, mark: str, results: Results) -> None:
        """Save what a step wrote at once, so that a run killed in a later step keeps it."""
        from murano.artifacts.run import save_run

        save_run(Results({key: results[key] for key in step.writes}), self.checkpoints, mark[:32])

    def finished(self) -> None:
        """The pipeline has ended: what was kept for a resume is in its results now."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
