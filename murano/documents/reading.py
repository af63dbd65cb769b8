"""A document's file as plain values, or where in it the JSON or YAML goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from murano.documents import errors
from murano.documents.errors import DocumentError, Problem, shown, spell
from murano.errors import InputError

#: Objects and lists inside each other: no document needs so many, and reading one recursively has its limits.
MAX_DEPTH = 32
ENDINGS = (".json", ".yaml", ".yml")


def read_document(path: Path) -> Any:
    """What a document's file says.

    Args:
        path: a ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        InputError: the file can't be read.
        DocumentError: it is no JSON or YAML; the line and column are named.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{str(path)!r} is no document: its name ends in none of {', '.join(ENDINGS)}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _syntax(path, f"no UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"Can't read the document {str(path)!r}: {getattr(error, 'strerror', None) or error}."
        ) from None
    return _json(text, path) if path.suffix.lower() == ".json" else _yaml(text, path)


def plain_problems(value: Any, path: errors.Path = ()) -> Iterator[Problem]:
    """What JSON could not say: dates, sets, bytes, numbers that are not finite, keys that are no text, text that is no UTF-8."""
    allowed = "objects, lists, texts, finite numbers, true, false and null"
    if len(path) > MAX_DEPTH:
        yield Problem(spell(path[:4]), "nested too deeply", allowed=f"{MAX_DEPTH} levels")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                yield Problem(spell((*path, ascii(key))), "a name must be a text", shown(key), "a text")
            else:
                yield from plain_problems(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from plain_problems(item, (*path, index))
    elif isinstance(value, str):
        if not _is_text(value):
            yield Problem(spell(path), "this text is no UTF-8", ascii(value)[:80], "a text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Problem(spell(path), "this number is not finite", shown(value), allowed)
    elif value is not None and not isinstance(value, (bool, int)):
        yield Problem(spell(path), f"a {type(value).__name__} can't stand in a document", shown(value), allowed)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _syntax(path: Path, what: str, line: int = 0, column: int = 0) -> DocumentError:
    where = f"line {line}, column {column}" if line else "(file)"
    return DocumentError(path.name, [Problem(where, what)])


class _Twice(ValueError):
    """A name that an object has twice."""


def _json(text: str, path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _Twice(key)
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise _syntax(path, f"no JSON ({error.msg})", error.lineno, error.colno) from None
    except _Twice as error:
        raise _syntax(path, f"an object has the name {shown(error.args[0])} twice") from None
    except RecursionError:
        raise _syntax(path, "no document: objects and lists are nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise _syntax(path, f"no JSON ({error})") from None


def _yaml(text: str, path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Plain YAML: no aliases, no dates, no name twice."""

        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                self._refuse("an alias can't stand in a document: write it out", self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.tag.endswith(":merge") or not isinstance(key, yaml.ScalarNode):
                    self._refuse("a name must be a text", key.start_mark)
                if key.value in seen:
                    self._refuse(f"the name {shown(key.value)} is there twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def _refuse(self, what: str, mark: Any) -> NoReturn:
            raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)

    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        raise _syntax(path, f"no YAML ({error.problem or error.context})", line, column) from None
    except yaml.reader.ReaderError as error:  # a character that YAML does not allow
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise _syntax(path, f"no YAML ({error.reason})", line, column) from None
    except RecursionError:
        raise _syntax(path, "no document: objects and lists are nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, ArithmeticError) as error:  # a number that is none
        raise _syntax(path, f"no YAML ({error})") from None
