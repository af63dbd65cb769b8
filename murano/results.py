"""Results: the dict that steps share, typed by its keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

from murano import keys
from murano.errors import InputError, MissingKeyError, nearest
from murano.keys import Key

T = TypeVar("T")


@dataclass(frozen=True)
class StepRecord:
    """What one step did: kept with the results and written into a saved run.

    Args:
        name: the step's class, or the function that it is made of.
        call: the step as it was written, ``LogitLens(model, top_k=5)``.
        seconds: how long it ran.
        wrote: the keys it wrote.
        fingerprint: what its outputs depend on, as one SHA-256; empty where nobody asked.
        skipped: whether its outputs were taken from an earlier run.
        depends: what the fingerprint is made of: a digest of each argument and input, and versions.
    """

    name: str
    call: str
    seconds: float
    wrote: tuple[str, ...] = field(default=())
    fingerprint: str = ""
    skipped: bool = False
    depends: Mapping[str, str] = field(default_factory=dict)


class Results(dict[str, Any]):
    """A dict from key to result; ``results[keys.LOGIT_LENS]`` is known to be a ``LogitLensResult``.

    It also keeps what made it: :attr:`history` has one :class:`StepRecord` per step, in order.

    Raises:
        MissingKeyError: on reading a key that is not there; the message lists those that are.
        InputError: on writing a value of another type than its key names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.history: list[StepRecord] = []
        #: Where a long step may keep what it has done so far; set while a pipeline runs with ``resume``.
        self.checkpoint: Path | None = None
        self.update(*args, **kwargs)

    @overload
    def __getitem__(self, key: Key[T], /) -> T: ...
    @overload
    def __getitem__(self, key: str, /) -> Any: ...
    def __getitem__(self, key: str, /) -> Any:
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        there = ", ".join(repr(str(name)) for name in self) or "none yet"
        writer = keys.as_key(key).written_by if isinstance(key, str) and key else ""
        writer = f" It is written by {writer}." if writer else ""
        raise MissingKeyError(f"No result {str(key)!r}.{writer}{nearest(key, self)} Results that are there: {there}.")

    def __setitem__(self, key: str, value: Any, /) -> None:
        expected = keys.as_key(key).resolve_type()
        if expected is not None and not isinstance(value, expected):
            raise InputError(
                f"Result {str(key)!r} is a {expected.__name__}, not a {type(value).__name__}: {value!r:.80}"
            )
        super().__setitem__(str(key), value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``, with each value checked against its key's type.

        Raises:
            InputError: a value of another type than its key names, or something that is no results: a lens by itself, say.
        """
        for source in args:
            for key, value in source.items() if isinstance(source, Mapping) else _pairs(source):
                self[key] = value
            if isinstance(source, Results):
                self.history.extend(source.history)
        for key, value in kwargs.items():
            self[key] = value

    def copy(self) -> Results:
        """A shallow copy, history included."""
        return Results(self)

    def save(
        self,
        output_dir: str | os.PathLike[str] = "murano_outputs",
        run_name: str | None = None,
        model_id: str | None = None,
    ) -> str:
        """Write everything into the run ``<output_dir>/<run_name>``, as the step ``Save`` does; returns its folder."""
        from murano.artifacts.run import save_run  # here: results know nothing of artifacts until they are saved

        self[keys.OUTPUT_DIR] = str(save_run(self, output_dir, run_name, model_id=model_id))
        return self[keys.OUTPUT_DIR]

    def __repr__(self) -> str:
        return f"Results({', '.join(f'{key}: {type(value).__name__}' for key, value in self.items())})"


def as_results(source: Any) -> Results:
    """Results as they are; a dict of results, or nothing, as results."""
    return source if isinstance(source, Results) else Results() if source is None else Results(source)


def _pairs(source: Any) -> list[tuple[Any, Any]]:
    """What ``dict`` takes besides a mapping: a list of pairs.

    Raises:
        InputError: it is something else, mostly a result without its key.
    """
    try:
        return [(key, value) for key, value in source]
    except (TypeError, ValueError):
        kind = type(source).__name__
        # A metric's table is of one type under many names, and says which.
        name = getattr(source, "name", None) if kind == "MetricTable" else None
        path = f"{type(source).__module__}:{kind}"
        of_type = [str(key) for key in keys.known().values() if key.type_path == path]
        key = name if name in of_type else of_type[0] if of_type else None
        hint = f"Results({{keys.{key.upper()}: …}})" if key else "Results({'name': …})"
        raise InputError(f"Results are a dict of named results, not a {kind}: give {hint}.") from None
