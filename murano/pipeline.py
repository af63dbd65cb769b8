"""Pipeline: a chain of steps, checked as a whole before the first one runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from murano.errors import InputError, PipelineError, nearest
from murano.keys import Key
from murano.results import Results
from murano.steps.base import Step, step_name

if TYPE_CHECKING:
    from murano.documents import Document


class Pipeline:
    """Runs steps in order, each reading and writing results under well-known keys.

    Args:
        steps: the steps, in the order in which they run.

    Raises:
        InputError: something in ``steps`` is no step.

    >>> from murano.steps import LoadPrompts
    >>> pipeline = Pipeline([LoadPrompts(["The capital of France is"])])
    >>> pipeline.validate()
    ['prompts']
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        if isinstance(steps, Step):
            steps = [steps]
        self.steps: list[Step] = list(steps)
        for index, step in enumerate(self.steps):
            if isinstance(step, type):
                raise InputError(f"Step {index} is the class {step.__name__}, not a step: write {step.__name__}(…).")
            if not isinstance(step, Step):
                raise InputError(
                    f"Step {index} is a {type(step).__name__}, not a step. "
                    "Derive a class from murano.Step, or wrap a function: murano.step(reads=[…], writes=[…])(function)."
                )

    def validate(self, available: Iterable[str] = ()) -> list[str]:
        """Check the whole chain without running it.

        Args:
            available: keys that are there before the first step, as in ``run(results)``.

        Returns:
            The keys that will exist after the last step, in the order in which they are written.

        Raises:
            PipelineError: a step reads what no earlier step writes, or reads it as another type.
            InputError: a step's own arguments can't be right.
        """
        start = "the results it starts from"
        written: dict[str, tuple[Key[Any] | None, str]] = {
            str(key): (key if isinstance(key, Key) else None, start) for key in available
        }
        for index, step in enumerate(self.steps):
            for key in step.reads:
                self._check_read(index, step, key, written)
            step.check()
            for key in step.writes:
                if str(key) in written and written[str(key)][1] != start:
                    warnings.warn(
                        f"{str(key)!r} is written twice: by {written[str(key)][1]} and by {step_name(step)} "
                        f"(step {index}). The later one replaces the earlier.",
                        stacklevel=3,
                    )
                written[str(key)] = (key, f"{step_name(step)} (step {index})")
        return list(written)

    def _check_read(
        self, index: int, step: Step, key: Key[Any], written: dict[str, tuple[Key[Any] | None, str]]
    ) -> None:
        name = f"{step_name(step)} (step {index})"
        if str(key) not in written:
            later = [i for i in range(index + 1, len(self.steps)) if key in self.steps[i].writes]
            if later:
                hint = f"{step_name(self.steps[later[0]])} (step {later[0]}) writes it: put that one first."
            elif key.written_by:
                hint = f"Add {key.written_by}(…) before it."
            else:
                hint = f"There will be: {', '.join(written) or 'nothing'}.{nearest(key, written)}"
            raise PipelineError(f"{name} reads {str(key)!r}, which no step before it writes. {hint}")
        producer, who = written[str(key)]
        if producer is not None and producer.type_path and key.type_path and producer.type_path != key.type_path:
            raise PipelineError(
                f"{name} reads {str(key)!r} as a {key.type_name}, but {who} writes a {producer.type_name} under that name."
            )

    def run(self, results: Results | None = None, *, resume: str | os.PathLike[str] | None = None) -> Results:
        """Check the chain, then run it.

        Args:
            results: earlier results to go on from; they are extended in place and returned.
            resume: the folder of a saved run, which need not exist yet. Steps whose outputs are there and whose inputs,
                arguments and versions are unchanged are skipped, and said so; a lens that was killed goes on where it
                stopped, with the same result to the bit. Give the folder that ``Save`` writes and call it again after a kill.

        Returns:
            The results, with everything the steps wrote.

        Raises:
            PipelineError: a step reads what no earlier step writes, or reads it as another type.
            InputError: a step's own arguments can't be right, or ``resume`` is no folder.
        """
        results = Results() if results is None else results
        if not isinstance(results, Results):
            results = Results(results)
        self.validate(results)
        if resume is None:
            for step in self.steps:
                results = step(results)
            return results
        from murano.resume import Resume

        earlier = Resume(resume)
        for step in self.steps:
            results = earlier.run(step, results)
        earlier.finished()
        return results

    def plan(self) -> str:
        """What :meth:`explain` prints, as a string."""
        width = max((len(step_name(step)) for step in self.steps), default=0)
        lines = [f"Pipeline of {len(self.steps)} step{'s' if len(self.steps) != 1 else ''}"]
        for index, step in enumerate(self.steps, start=1):
            flow = f"{', '.join(step.reads) or '—'} → {', '.join(step.writes) or '—'}"
            lines.append(f"  {index}. {step_name(step):<{width}}  {flow}")
            lines.extend(f"     {' ' * width} {line}" for line in step.describe().splitlines())
        return "\n".join(lines)

    def explain(self) -> None:
        """Print what will happen, step by step, without loading a model or reading a file."""
        sys.stdout.write(self.plan() + "\n")

    def to_document(self, description: str = "") -> Document:
        """The same as a document, to be reviewed, shared and run again: ``pipeline.to_document().save("lens.json")``.

        It can be had of ``LoadPrompts``, one ``LogitLens`` that reads one component at fixed positions, and ``TokenProb``, ``Match`` and
        ``LogitDiff``; how many tokens the lens keeps is no part of it.

        Args:
            description: what the document says about itself.

        Raises:
            InputError: a step or an argument that documents don't have; it is named.
        """
        from murano.documents.from_pipeline import to_document

        return to_document(self, description)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self.steps))}])"
