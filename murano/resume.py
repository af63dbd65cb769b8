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

from murano import keys
from murano.errors import ArtifactError, InputError
from murano.results import Results, StepRecord
from murano.steps.base import Step, step_name

logger = logging.getLogger(__name__)


def dependencies(step: Step, results: Results) -> dict[str, str]:
    """What a step's outputs depend on, by what a user calls it: its class, each argument and input, the versions that compute.

    Args:
        step: the step.
        results: where it reads.
    """
    from murano.artifacts.codec import fingerprint

    def of(value: Any) -> str:
        identity = getattr(value, "identity", None)
        if callable(identity):
            return _digest(identity())
        try:
            return _digest(fingerprint(value))
        except ArtifactError:  # a function, an open file: no data, but its code or its repr still tells a change
            code = getattr(value, "__code__", None)
            return _digest((value.__qualname__, code.co_code, code.co_consts) if code is not None else value)

    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(step)).parameters.items():
        if hasattr(step, name):
            value = getattr(step, name)
            several = parameter.kind is parameter.VAR_KEYWORD and isinstance(value, Mapping)
            arguments |= value if several else {name: value}
    return {
        "the step": f"{type(step).__module__}.{type(step).__qualname__}",
        **{f"argument {name!r}": of(value) for name, value in arguments.items()},
        **{f"input {str(key)!r}": of(results[key]) for key in step.reads},
        **{f"the version of {name}": importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


class Resume:
    """An earlier run of the same pipeline, in which finished work is looked up.

    Args:
        folder: the run's folder; it need not exist yet.

    Raises:
        InputError: it is no folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from murano.artifacts.run import load_run

        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder) or os.path.isfile(folder):
            raise InputError(f"resume={folder!r}: give the folder that Save writes, such as 'murano_outputs/capitals'.")
        self.folder = Path(folder)
        # Beside the run, so that saving the run, which replaces its folder, leaves it alone.
        self.checkpoints = self.folder.parent / f".{self.folder.name}.checkpoints"
        self.earlier: Results = load_run(self.folder) if self._is_run() else Results()
        self.saved: list[str] = []

    def _is_run(self) -> bool:
        return (self.folder / "manifest.json").exists()

    def run(self, step: Step, results: Results) -> Results:
        """Take a step's outputs from the earlier run if nothing that they depend on has changed; else run it."""
        name, mark = step_name(step), ""
        depends: dict[str, str] = {}
        if step.resumable:
            depends = dependencies(step, results)
            mark = _digest(sorted(depends.items()))
            why, found = self._find(step, mark, depends)
            if found:
                for key in step.writes:
                    results[key] = found[str(key)]
                wrote = tuple(map(str, step.writes))
                results.history.append(StepRecord(name, repr(step), 0.0, wrote, mark, skipped=True, depends=depends))
                logger.warning("Skipped %s: %s", name, why)
                return results
            logger.warning("Running %s: %s", name, why)
        results.checkpoint = self._checkpoint(mark) if mark else None
        try:
            results = step(results)
        finally:
            results.checkpoint = None
        results.history[-1] = StepRecord(**{**vars(results.history[-1]), "fingerprint": mark, "depends": depends})
        if keys.OUTPUT_DIR in step.writes:
            self.saved.append(results[keys.OUTPUT_DIR])
        if mark and step.writes:
            self._keep(step, mark, results)
        return results

    def _find(self, step: Step, mark: str, depends: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
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
        if self._checkpoint(mark).exists():
            return "it was stopped in the middle and goes on from its last checkpoint.", {}
        same = [r.depends for r in self.earlier.history if r.name == step_name(step)]
        if not same:
            return "it has not run yet.", {}
        if not any(same):
            return "it was saved by a run without resume, which does not say what it depends on.", {}
        changed = min((_changed(earlier, depends) for earlier in same if earlier), key=len)
        if not changed:
            return f"{self.folder} does not have what it wrote.", {}
        return f"changed since it was saved: {', '.join(changed)}.", {}

    def _checkpoint(self, mark: str) -> Path:
        return self.checkpoints / f"{mark[:32]}.pt"

    def _keep(self, step: Step, mark: str, results: Results) -> None:
        """Save what a step wrote at once, so that a run killed in a later step keeps it."""
        from murano.artifacts.run import save_run

        save_run(Results({key: results[key] for key in step.writes}), self.checkpoints, mark[:32])

    def finished(self) -> None:
        """The pipeline has ended: what was kept for a resume is in its results now. Say so if a resume will not find them."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        folder = os.fspath(self.folder)
        if self.saved and os.path.realpath(folder) not in map(os.path.realpath, self.saved):
            logger.warning(
                "The run was saved into %r, but resume looked into %r: nothing of it will be skipped next time. Write resume=%r.",
                *(self.saved[-1], folder, self.saved[-1]),
            )
        elif not self.saved and not self._is_run():
            logger.warning(
                "Nothing was saved into %r: nothing will be skipped next time. End the pipeline with Save(%r, run_name=%r).",
                *(folder, os.fspath(self.folder.parent), self.folder.name),
            )


def _changed(earlier: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
