"""Step: what every step is. A step of one's own derives from it, or wraps a function with :func:`step`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from murano.errors import InputError, MissingKeyError, PipelineError
from murano.keys import Key
from murano.results import Results, StepRecord


class Step:
    """One step of a pipeline: reads some keys, writes some keys.

    A subclass names its keys and implements :meth:`run`:

    >>> SHOUTED: Key[list[str]] = Key("shouted", list, written_by="Shout")
    >>> class Shout(Step):
    ...     reads = (Key("prompts"),)
    ...     writes = (SHOUTED,)
    ...     def run(self, results):
    ...         return {SHOUTED: [prompt.text.upper() for prompt in results["prompts"]]}
    """

    #: Keys that must be there before the step runs.
    reads: Sequence[Key[Any]] = ()
    #: Keys that are there after it.
    writes: Sequence[Key[Any]] = ()
    #: Whether what it writes can be taken from an earlier run; not if it does something besides, such as writing files.
    resumable: bool = True

    def run(self, results: Results) -> Mapping[str, Any] | None:
        """Do the step's work.

        Args:
            results: what earlier steps wrote; not to be changed.

        Returns:
            One value for each key in ``writes``.
        """
        raise PipelineError(f"{type(self).__name__} has no run(self, results) method.")

    def check(self) -> None:
        """Raise if the step's own arguments can't be right; called before any step of a pipeline runs."""

    def describe(self) -> str:
        """A line or a few for ``Pipeline.explain``."""
        return ""

    def __call__(self, results: Results | None = None) -> Results:
        """Run the step alone: what it writes is put into ``results``, which is returned."""
        results = Results() if results is None else results
        if not isinstance(results, Results):
            results = Results(results)
        for key in self.reads:
            results[key]  # raises the error that says what is there and who writes it
        self.check()
        started = time.perf_counter()
        wrote = dict(self.run(results) or {})
        missing = [str(key) for key in self.writes if key not in wrote]
        if missing:
            raise MissingKeyError(f"{step_name(self)} did not write {missing}, which it says it writes.")
        typed = {str(key): key for key in self.writes}
        for name, value in wrote.items():
            results[typed.get(str(name), name)] = value
        results.history.append(
            StepRecord(step_name(self), repr(self), time.perf_counter() - started, tuple(map(str, wrote)))
        )
        return results

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_arguments(self))})"


def _arguments(step: Step) -> list[str]:
    """The arguments that differ from their defaults, as one would type them; found by the attribute of the same name."""
    shown = []
    for position, (name, parameter) in enumerate(inspect.signature(type(step)).parameters.items()):
        if not hasattr(step, name) or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = getattr(step, name)
        if parameter.default is not parameter.empty and (
            value is parameter.default or repr(value) == repr(parameter.default)
        ):
            continue
        by_position = position == 0 and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        shown.append(repr(value) if by_position else f"{name}={value!r}")
    return shown


class FunctionStep(Step):
    """A step made of a function: see :func:`step`."""

    def __init__(
        self, function: Callable[..., Any], reads: Sequence[Key[Any]] = (), writes: Sequence[Key[Any]] = ()
    ) -> None:
        self.function = function
        self.reads = tuple(key if isinstance(key, Key) else Key(key) for key in reads)
        self.writes = tuple(key if isinstance(key, Key) else Key(key) for key in writes)

    def run(self, results: Results) -> Mapping[str, Any]:
        value = self.function(*(results[key] for key in self.reads))
        if len(self.writes) == 1:
            return {self.writes[0]: value}
        values = tuple(value) if isinstance(value, (tuple, list)) else () if value is None else (value,)
        if len(values) != len(self.writes):
            raise InputError(f"{self} returned {len(values)} values for {len(self.writes)} keys {list(self.writes)}.")
        return dict(zip(self.writes, values, strict=True))

    def __repr__(self) -> str:
        return f"step(reads={list(map(str, self.reads))}, writes={list(map(str, self.writes))})({step_name(self)})"


def step_name(step: Step) -> str:
    """What a step is called in plans, errors and the history: the function that it is made of, or else its class."""
    if isinstance(step, FunctionStep):
        return str(getattr(step.function, "__name__", repr(step.function)))
    return type(step).__name__


def step(*, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> Callable[[Callable[..., Any]], FunctionStep]:
    """Make a step of a function, which is called with the values of ``reads`` and returns those of ``writes``.

    >>> @step(reads=["prompts"], writes=["n_prompts"])
    ... def count(prompts):
    ...     return len(prompts)
    >>> count
    step(reads=['prompts'], writes=['n_prompts'])(count)
    """
    return lambda function: FunctionStep(function, reads, writes)
