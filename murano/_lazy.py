"""Names of a package that are imported when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]], *, modules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """What a package needs to export names lazily (PEP 562): its ``__all__``, ``__getattr__`` and ``__dir__``.

    A package writes its names twice: as imports under ``TYPE_CHECKING``, where type checkers and editors look, and in
    the ``else`` branch. To a type checker the package then has no ``__getattr__``, so that a misspelt name is an error::

        if TYPE_CHECKING:
            from murano.steps.plot import Plot as Plot
        else:
            __all__, __getattr__, __dir__ = lazy_exports(__name__, {"murano.steps.plot": ["Plot"]})

    Args:
        package: the package's ``__name__``.
        names: which names come from which module.
        modules: submodules that are exported as themselves.
    """
    module_of = {name: module for module, exported in names.items() for name in exported}
    exports = sorted({*module_of, *modules})

    def __getattr__(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)  # the next use does not come here
            return value
        hint = ""
        if not name.startswith("_"):  # the import system, doctest and others probe for dunder names
            from murano.errors import nearest

            hint = nearest(name, exports)
        raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return exports, __getattr__, __dir__
