"""Step: what every step is. A step of one's own derives from it, or wraps a function with :func:`step`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from murano.errors import InputError, MissingKeyError, PipelineError
from murano.keys import Key, as_key
from murano.results import Results, StepRecord, as_results


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
    #: Of a step that works on everything that is there by then: what becomes of it, in a word, such as ``"saved"``.
    takes_all: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("reads", "writes"):
            if name in cls.__dict__ and not hasattr(cls.__dict__[name], "__get__"):  # a property gives its keys itself
                setattr(cls, name, _as_keys(cls.__dict__[name], f"{name} of {cls.__name__}"))

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

    def check_ahead(self, results: Results, between: Sequence[Step]) -> None:
        """Raise if what is there already shows that the step will fail; called before a pipeline's first step and after each.

        Args:
            results: what is there now.
            between: the steps that will run before this one.
        """

    def takes(self, key: Key[Any]) -> bool:
        """Of a step that takes all: whether it does something with a result of this key."""
        return True

    def describe(self) -> str:
        """A line or a few for ``Pipeline.explain``."""
        return ""

    def __call__(self, results: Results | None = None) -> Results:
        """Run the step alone: what it writes is put into ``results``, which is returned."""
        results = as_results(results)
        for key in self.reads:
            results[key]  # raises the error that says what is there and who writes it
        self.check()
        started = time.perf_counter()
        returned = self.run(results)
        if returned is not None and not isinstance(returned, Mapping):
            raise PipelineError(
                f"{step_name(self)}.run returned a {type(returned).__name__}, not a dict with a value for each key it writes: "
                f"{list(map(str, self.writes))}."
            )
        wrote = dict(returned or {})
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
        if not hasattr(step, name) or parameter.kind is parameter.VAR_POSITIONAL:
            continue
        value = getattr(step, name)
        if parameter.kind is parameter.VAR_KEYWORD:
            shown += [f"{option}={given!r}" for option, given in value.items()] if isinstance(value, Mapping) else []
            continue
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
        if not callable(function):
            raise InputError(f"A step is made of a function, not of a {type(function).__name__}: {function!r:.80}")
        self.function = function
        name = step_name(self)
        self.reads = _as_keys(reads, f"reads of {name}")
        self.writes = _as_keys(writes, f"writes of {name}")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some that are written in C have none
            return
        try:
            signature.bind(*self.reads)
        except TypeError:
            given = f"the value{'s' if len(self.reads) != 1 else ''} of reads={list(map(str, self.reads))}"
            raise InputError(
                f"{name}{signature} can't be called with {given if self.reads else 'nothing'}: reads must name a result for each "
                "of its arguments."
            ) from None

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


def _as_keys(given: Any, what: str) -> tuple[Key[Any], ...]:
    """Keys as they are given: one, or several; a plain string is the key of that name.

    Raises:
        InputError: they are no names.
    """
    try:
        return (as_key(given),) if isinstance(given, str) else tuple(as_key(key) for key in given)
    except (TypeError, InputError):
        raise InputError(f"{what}: {given!r:.80} must be a key or a list of keys, such as ['logit_lens'].") from None


def step_name(step: Step) -> str:
    """What a step is called in plans, errors and the history: the function that it is made of, or else its class."""
    if isinstance(step, FunctionStep):
        return str(getattr(step.function, "__name__", repr(step.function)))
    return type(step).__name__


def step(*, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> Callable[[Callable[..., Any]], FunctionStep]:
    """Make a step of a function, which is called with the values of ``reads`` and returns those of ``writes``.

    Args:
        reads: the keys of its arguments, in order; one alone needs no brackets.
        writes: the keys of what it returns, in order.

    Raises:
        InputError: something that is no key, or a function that takes another number of arguments than ``reads`` has keys.

    >>> @step(reads=["prompts"], writes=["n_prompts"])
    ... def count(prompts):
    ...     return len(prompts)
    >>> count
    step(reads=['prompts'], writes=['n_prompts'])(count)
    """
    return lambda function: FunctionStep(function, reads, writes)
