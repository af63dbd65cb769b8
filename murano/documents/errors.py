"""What is wrong with a document: each problem with its path, what was found there, and what is allowed."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from murano.errors import InputError, nearest

#: Names of objects and indices of lists, from the whole document inwards.
Path = tuple["str | int", ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: where in the document, ``interventions.lens.reads.lens.view``; in a file that is no JSON or YAML the line and
            column.
        what: what is wrong, in a sentence without its full stop.
        found: what was found there.
        allowed: what may stand there.
        hint: the nearest spelling, where one is near.
    """

    path: str
    what: str
    found: str = ""
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        parts = [self.what, *([f"Found: {self.found}"] if self.found else [])]
        parts += [f"Allowed: {self.allowed}"] if self.allowed else []
        return f"{self.path}: {'. '.join(parts)}.{self.hint}"


class DocumentError(InputError):
    """A document that can't be run. :attr:`problems` has all that is wrong with it, not only the first.

    Args:
        name: of the document.
        problems: what is wrong.
    """

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{name}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[DocumentError], tuple[str, tuple[Problem, ...]]]:
        return DocumentError, (self.name, self.problems)


def spell(path: Sequence[str | int]) -> str:
    """A path as text.

    >>> spell(("steps", "lens", "saves", 0, "value")), spell(("sites", "a.b")), spell(())
    ('steps.lens.saves[0].value', "sites['a.b']", '(document)')
    """
    text = ""
    for part in path:
        if isinstance(part, str) and re.fullmatch(r"[\w=/-]+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{shown(part)}]"
    return text or "(document)"


def shown(value: object) -> str:
    """A value as a message shows it: what is long is cut, and a text keeps its quotes.

    >>> shown("a" * 100)[-4:]
    "aa…'"
    """
    text = repr(value)
    if len(text) <= 80:
        return text
    return repr(f"{value[:72]}…") if isinstance(value, str) else f"{text[:77]}…"


def unknown(path: Path, kind: str, found: object, known: Iterable[object]) -> Problem:
    """The problem of a name that names nothing.

    Args:
        path: where it stands.
        kind: what it should name.
        found: the name.
        known: all that there are.
    """
    names = [str(name) for name in known]
    return Problem(
        spell(path),
        f"there is no such {kind}",
        shown(found),
        ", ".join(map(repr, names)),
        nearest(found, names),
    )


def as_path(value: object, name: str, what: str) -> pathlib.Path:
    """A path that was given as an argument.

    Raises:
        InputError: it is none.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"{name}={shown(value)} is no path: give {what}.")
    return pathlib.Path(value)
