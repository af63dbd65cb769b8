"""The public interface: every name with its signature, as it was last agreed on, and a docstring for each.

Run this file to write ``tests/data/public_api.txt`` anew.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SNAPSHOT = Path(__file__).parents[1] / "data" / "public_api.txt"
#: Packages with an ``__all__``, and modules of which every public name that they define is public.
PUBLIC = ("murano", "murano.steps", "murano.plotting", "murano.metrics", "murano.keys", "murano.errors")


class Plain(str):
    """A text that stands in a signature without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def public() -> Iterator[tuple[str, Any]]:
    """Every public name and its value; a name that two packages export occurs under both."""
    for package in PUBLIC:
        module = importlib.import_module(package)
        if hasattr(module, "__all__"):
            names = sorted(module.__all__)
        else:
            names = [n for n, v in vars(module).items() if not n.startswith("_") and _own(v, module.__name__)]
        for name in names:
            yield f"{package}.{name}", getattr(module, name)


def _own(value: Any, module: str) -> bool:
    return type(value).__name__ == "Key" or (callable(value) and getattr(value, "__module__", None) == module)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isfunction(value)
            or isinstance(value, (property, classmethod, staticmethod))
            or hasattr(value, "func")
        ):
            yield name, value


def signature(value: Any) -> str:
    """A signature as it was written: annotations are the source's own words."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    plain = [
        p.replace(annotation=Plain(p.annotation) if isinstance(p.annotation, str) else p.annotation)
        for p in found.parameters.values()
    ]
    returns = found.return_annotation
    return str(
        found.replace(parameters=plain, return_annotation=Plain(returns) if isinstance(returns, str) else returns)
    )


def describe(name: str, value: Any) -> Iterator[str]:
    """The lines of one name: what it is, and for a class its public members."""
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif not callable(value):
        yield f"{name} = {value!r}"
    elif not inspect.isclass(value):
        yield f"{name}{signature(value)}"
    elif issubclass(value, Exception):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)}): exception"
    else:
        yield f"{name}{signature(value)}"
        for member, what in members(value):
            function = getattr(what, "fget", None) or getattr(what, "func", None) or getattr(what, "__func__", what)
            kind = "" if function is what else f": {type(what).__name__}"
            yield f"  .{member}{signature(function)}{kind}"


def snapshot() -> str:
    return "".join(f"{line}\n" for name, value in public() for line in describe(name, value))


def test_the_public_interface_is_as_agreed() -> None:
    agreed, now = SNAPSHOT.read_text(encoding="utf-8").splitlines(), snapshot().splitlines()
    gone, new = [line for line in agreed if line not in now], [line for line in now if line not in agreed]
    assert agreed == now, (
        "The public interface has changed. Was it meant? Then write it down: python tests/unit/test_public_api.py\n"
        + "".join(f"- {line}\n" for line in gone)
        + "".join(f"+ {line}\n" for line in new)
    )


def test_no_signature_depends_on_the_machine() -> None:
    assert " at 0x" not in snapshot()
    assert str(Path.home()) + "/" not in snapshot()


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_docstring(package: str) -> None:
    bare = [package] if not inspect.getdoc(importlib.import_module(package)) else []
    for name, value in public():
        if not name.startswith(f"{package}.") or not (inspect.ismodule(value) or callable(value)):
            continue
        if not inspect.getdoc(value):
            bare.append(name)
        if inspect.isclass(value):
            bare += [f"{name}.{m}" for m, _ in members(value) if not inspect.getdoc(getattr(value, m))]
    assert bare == []


@pytest.mark.parametrize("package", PUBLIC)
def test_every_argument_is_typed(package: str) -> None:
    bare = [
        f"{name}({p.name})"
        for name, value in public()
        if name.startswith(f"{package}.") and inspect.isfunction(value)
        for p in inspect.signature(value).parameters.values()
        if p.annotation is p.empty
    ]
    assert bare == []


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
