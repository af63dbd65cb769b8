"""Prompts from files: one to a line of text, or with named fields in JSON Lines, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from murano.errors import InputError, nearest
from murano.prompts import Prompt, PromptBatch, as_answers, as_prompts

#: Where the prompts that the package ships lie.
SHIPPED = Path(__file__).parent / "data"
_ENDINGS = ".txt, .jsonl, .json, .csv and .tsv"
#: What each field may be called.
NAMES = {"prompt": ("prompt", "text", "messages"), "target": ("target", "targets"), "foil": ("foil", "foils")}


def read_prompt_file(path: str | Path, *, chat: bool = False, fields: Mapping[str, str] | None = None) -> PromptBatch:
    """Prompts from a file.

    A ``.jsonl``, ``.json``, ``.csv`` or ``.tsv`` file has a record for each prompt with a field ``prompt`` and, where there are answers,
    ``target`` and ``foil``; every other field is kept as metadata. In JSON a target may be a list of accepted answers and a prompt a chat,
    and a number is a token id. A ``.txt`` file has one prompt to a line; empty lines are left out.

    Args:
        path: the file.
        chat: render each prompt by the tokenizer's chat template.
        fields: what this file calls them: ``{"prompt": "question", "target": "answer"}``.

    Raises:
        InputError: the file can't be read, is of another type, has no prompt in it, or a record lacks a field; the line is named.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None and path.suffix.lower() != ".txt" and path.is_file():  # a pipe has no ending, and is text
        raise InputError(
            f"Prompts are not read from {str(path)!r}, but from {_ENDINGS}: .txt has one prompt to a line, the others have a record "
            "for each, with a field 'prompt'."
        )
    text = _text(path)
    if reader is None:
        prompts = [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise InputError(f"There are no prompts in {str(path)!r}: it should hold one prompt to a line.")
        return as_prompts(prompts, chat=chat)
    names = {name: (fields[name],) if fields and name in fields else known for name, known in NAMES.items()}
    found = [_prompt(record, names, f"{path.name}, {where}", chat) for where, record in reader(text, path)]
    if not found:
        under = ", under a line with the names of the fields" if path.suffix.lower() in (".csv", ".tsv") else ""
        raise InputError(f"There are no prompts in {str(path)!r}: it should hold a record for each{under}.")
    return PromptBatch(found)


def read_records(path: Path) -> list[tuple[str, Any]]:
    """The records of a ``.jsonl``, ``.json`` or ``.csv`` file, each with where it stands: ``"line 3"``.

    Raises:
        InputError: the file can't be read; the line is named.
    """
    return list(_READERS[path.suffix.lower()](_text(path), path))


def _text(path: Path) -> str:
    try:
        found = path.read_bytes()
        text = found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        other = "UTF-16" if found.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        if other == "LATIN1" and re.search(rb"[\x00-\x08\x0e-\x1f]", found):  # signs that no text has in any encoding
            raise InputError(f"{str(path)!r} is not a text file: prompts are read from {_ENDINGS}.") from None
        line = found.count(b"\n", 0, error.start) + 1
        where = "" if other == "UTF-16" else f" (line {line}, byte {found[error.start]:#x})"
        quoted = shlex.quote(str(path))
        raise InputError(
            f"{str(path)!r} is not UTF-8{where}. If it is {other}: iconv -f {other} -t UTF-8 {quoted} > "
            f"{shlex.quote(str(path.with_stem(path.stem + '-utf8')))}"
        ) from None
    except OSError as error:
        raise InputError(f"Can't read prompts from {str(path)!r}: {error.strerror or error}.") from None
    return io.StringIO(text, newline=None).read()  # every way of ending a line is one


def shipped_prompts(name: str) -> PromptBatch:
    """A data set that comes with the package.

    Args:
        name: ``"facts"``: capitals, opposites, weekdays, arithmetic and grammar, with targets, foils and a ``category``.

    Raises:
        InputError: there is no such data set.
    """
    known = sorted(p.stem for p in SHIPPED.glob("*.jsonl"))
    if name not in known:
        raise InputError(f"There is no data set {name!r}.{nearest(name, known)} There is: {', '.join(known)}.")
    return read_prompt_file(SHIPPED / f"{name}.jsonl")


def _prompt(record: Any, names: Mapping[str, tuple[str, ...]], where: str, chat: bool) -> Prompt:
    if isinstance(record, str):
        record = {names["prompt"][0]: record}
    if not isinstance(record, Mapping):
        raise InputError(f"{where}: a record is an object with a field {names['prompt'][0]!r}, not {record!r:.60}.")
    used = {
        kind: next((name for name in known if record.get(name) not in (None, "")), None)
        for kind, known in names.items()
    }
    empty = next((name for name in names["prompt"] if name in record), None)
    if used["prompt"] is None and empty is not None:
        raise InputError(f"{where}: the field {empty!r} is empty. Fill it in, or take the record out.")
    if used["prompt"] is None:
        there = ", ".join(map(repr, record)) or "none"
        hint = nearest(names["prompt"][0], list(map(str, record)))
        raise InputError(
            f"{where}: there is no field {names['prompt'][0]!r}. Fields found: {there}.{hint} "
            "If it has another name here: fields={'prompt': '…'}."
        )
    try:
        prompt: Prompt = as_prompts([record[used["prompt"]]], chat=chat)[0]
        answers = {
            f"{kind}s": as_answers(record[name], kind)
            for kind in ("target", "foil")
            if (name := used[kind]) is not None
        }
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    answers_of = (*names["target"], *names["foil"])  # empty ones are no metadata
    rest = {
        str(k): v for k, v in record.items() if k not in used.values() and not (k in answers_of and v in (None, ""))
    }
    return Prompt(text=prompt.text, messages=prompt.messages, token_ids=prompt.token_ids, metadata=rest, **answers)


def _jsonl(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path.name}, line {number}, column {error.colno}: no JSON ({error.msg}).") from None


def _json(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path.name}, line {error.lineno}, column {error.colno}: no JSON ({error.msg}).") from None
    if not isinstance(records, list):
        raise InputError(f"{path.name} must hold a list of records, not {type(records).__name__}.")
    for index, record in enumerate(records):
        yield f"record {index}", record


def _csv(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    header = text.partition("\n")[0]
    signs = (",", ";", "\t") if path.suffix.lower() == ".csv" else ("\t",)
    delimiter = next((sign for sign in signs if sign in header), signs[0])
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
    rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputError(f"{path.name}, line 1: there are two columns {twice[0]!r}.")
    for record in _whole(rows, len(text), path):
        if None in record:
            raise InputError(f"{path.name}, line {rows.line_num}: more values than there are columns ({record[None]}).")
        yield f"line {rows.line_num}", {k: v for k, v in record.items() if v is not None}


def _whole(rows: csv.DictReader[str], length: int, path: Path) -> Iterator[dict[str | Any, Any]]:
    """The rows, however long a field is: csv has a limit, which is of the whole process."""
    while True:
        limit = csv.field_size_limit()
        csv.field_size_limit(max(limit, length))
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise InputError(f"{path.name}, line {rows.line_num}: no CSV ({error}).") from None
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        yield row


_READERS: dict[str, Callable[[str, Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}
