"""Pipeline: a chain of steps, checked as a whole before the first one runs."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from murano.errors import InputError, MuranoError, PipelineError, nearest
from murano.keys import Key, as_key
from murano.results import Results, as_results
from murano.steps.base import Step, step_name

if TYPE_CHECKING:
    from murano.documents import Document


logger = logging.getLogger(__name__)


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
        if isinstance(steps, (type, str)) or not isinstance(steps, Iterable):
            given = f"the class {steps.__name__}" if isinstance(steps, type) else repr(steps)
            raise InputError(
                f"A pipeline is made of a list of steps, not of {given:.80}: Pipeline([LoadPrompts(…), …])."
            )
        self.steps: list[Step] = list(steps)
        for index, step in enumerate(self.steps, start=1):
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
            PipelineError: a step reads what no earlier step writes, or reads it as another type; or it draws what is there, and all
                of it is written later.
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
            if step.takes_all:
                self._check_place(index, step, written)
            for key in step.writes:
                if str(key) in written and written[str(key)][1] != start:
                    warnings.warn(
                        f"{str(key)!r} is written twice: by {written[str(key)][1]} and by {self._called(index)}. "
                        "The later one replaces the earlier.",
                        stacklevel=3,
                    )
                written[str(key)] = (key, self._called(index))
        return list(written)

    def _called(self, index: int) -> str:
        """How a step is named in messages: numbers count from 1, as in :meth:`explain`."""
        return f"{step_name(self.steps[index])} (step {index + 1})"

    def _check_place(self, index: int, step: Step, written: dict[str, tuple[Key[Any] | None, str]]) -> None:
        """Of a step that works on all that is there: warn of what comes too late for it, and for any later one of its kind.

        Raises:
            PipelineError: all of it comes too late.
        """
        last = next(i for i in reversed(range(len(self.steps))) if self.steps[i].takes_all == step.takes_all)
        late = [
            i
            for i in range(last + 1, len(self.steps))
            if not self.steps[i].takes_all and any(step.takes(key) for key in self.steps[i].writes)
        ]
        if not late or index != last:
            return
        message = (
            f"{self._called(index)} comes before {self._called(late[0])}: what that one writes is not {step.takes_all}."
        )
        if not any(step.takes(as_key(key or name)) for name, (key, _) in written.items()):
            raise PipelineError(f"{message} Put {self._called(late[-1])} first.")
        warnings.warn(f"{message} Put {step_name(step)} last.", stacklevel=4)

    def _check_read(
        self, index: int, step: Step, key: Key[Any], written: dict[str, tuple[Key[Any] | None, str]]
    ) -> None:
        name = self._called(index)
        if str(key) not in written:
            later = [i for i in range(index + 1, len(self.steps)) if key in self.steps[i].writes]
            if later:
                hint = f"{self._called(later[0])} writes it: put that one first."
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
            InputError: a step's own arguments can't be right, what is there already shows that a later step will fail (metrics of
                targets that no prompt has), or ``resume`` is no folder.
        """
        results = as_results(results)
        self.validate(results)
        if resume is None:
            return self._run_steps(results, lambda step, results: step(results))
        from murano.resume import Resume

        earlier = Resume(resume)
        results = self._run_steps(results, earlier.run)
        earlier.finished()
        return results

    def _run_steps(self, results: Results, run: Callable[[Step, Results], Results]) -> Results:
        for index, step in enumerate(self.steps):
            self._check_ahead(index, results)
            try:
                results = run(step, results)
            except MuranoError:
                raise
            except Exception as error:  # of a step of the user's own: its traceback says where, and this in which step
                logger.error("%s raised %s: %s", self._called(index), type(error).__name__, error)
                raise
        return results

    def _check_ahead(self, index: int, results: Results) -> None:
        """Let every step from ``index`` on look at what is there: what dooms it is said before anything slow happens."""
        for later in range(index, len(self.steps)):
            try:
                self.steps[later].check_ahead(results, self.steps[index:later])
            except InputError as error:
                raise InputError(f"{self._called(later)}: {error}") from None

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
