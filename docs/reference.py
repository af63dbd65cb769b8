"""The pages of the reference, written anew by every build: a public name is on them as soon as its package exports it."""

import importlib
import inspect
import os
import shutil
from collections import defaultdict
from pathlib import Path

from murano.cli import parser

#: Packages whose ``__all__`` is the public interface.
PACKAGES = ("murano", "murano.steps", "murano.plotting")
#: What a reader of the first page meets first; other modules follow by name.
FIRST = ("model", "lens", "artifacts.logit_lens", "pipeline", "steps.base", "results", "prompts", "prompt_files")
#: Modules of which every public function and class is documented.
MODULES = ("murano.metrics", "murano.readout.stats")
#: What public functions return, although nobody makes one by hand.
RETURNED = {
    "murano.artifacts.lens_column": ["LensColumn"],
    "murano.artifacts.metric_table": ["MetricSummary"],
    "murano.artifacts.run": ["RunResults"],
    "murano.artifacts.run_manifest": ["RunCheck"],
    "murano.artifacts.words": ["TokenWords", "WordGrid"],
    "murano.model": ["ReadoutProof"],
    "murano.model.captured": ["Captured"],
    "murano.results": ["StepRecord"],
}


def write(folder: Path) -> None:
    """Write a page for each package and one for the command line."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pages, there = {}, set()
    for package in PACKAGES:
        modules = by_module(package)
        pages[package] = _page(package, {m: names for m, names in modules.items() if m not in there}, package)
        there.update(modules)  # a name that two packages export is documented once
    pages |= {name: _page(name, {name: defined_in(name)}) for name in MODULES}
    pages |= {"murano.keys": _keys(), "returned": _page("What comes back", RETURNED), "command_line": _command_line()}
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def by_module(package: str) -> dict[str, list[str]]:
    """The names that a package exports, by the module that defines them; modules that it exports have pages of their own."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in importlib.import_module(package).__all__:
        value = getattr(importlib.import_module(package), name)
        if not inspect.ismodule(value):
            found[value.__module__].append(name)
    order = [f"murano.{module}" for module in FIRST]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0]) if item[0] in order else 99, item[0])))


def defined_in(module: str) -> list[str]:
    """The public functions and classes that a module itself defines, in its order."""
    return [
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module
    ]


def exported() -> dict[str, str]:
    """Where each name is documented that its own module's docstrings call by the module's path."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for module, names in by_module(package).items():
            for name in names:
                found.setdefault(f"{module}.{name}", f"{package}.{name}")
    return found


def _page(title: str, names: dict[str, list[str]], package: str = "") -> str:
    parts = [f"# {title}"]
    for module, of_module in names.items():
        summary = inspect.getdoc(importlib.import_module(module)) or ""
        if len(names) > 1:
            parts.append(f"## {module.removeprefix('murano.')}")
        parts.append(_rst(summary.split("\n\n")[0]))
        for name in of_module:
            value = getattr(importlib.import_module(module), name)
            kind = "autoclass" if inspect.isclass(value) else "autofunction"
            parts.append(
                _rst(f".. {kind}:: {package or module}.{name}" + ("\n   :members:" if kind == "autoclass" else ""))
            )
    return "\n\n".join(parts) + "\n"


def _keys() -> str:
    keys = importlib.import_module("murano.keys")
    rows = [
        f"| `keys.{name}` | `{str(key)!r}` | `{key.type_name}` | `{key.written_by}` |"
        for name, key in vars(keys).items()
        if isinstance(key, keys.Key)
    ]
    head = ["# murano.keys", str(inspect.getdoc(keys))]
    return "\n\n".join([*head, "\n".join(["| key | string | type | written by |", "|---|---|---|---|", *rows])]) + "\n"


def _command_line() -> str:
    os.environ["COLUMNS"] = "100"  # argparse wraps at the terminal's width
    parts = ["# The command line", _text(parser().format_help())]
    for name, command in parser().commands.items():
        parts += [f"## murano {name}", _text(command.format_help())]
    return "\n\n".join(parts) + "\n"


def _text(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"
