"""The store: one artifact in one file, sealed.

An artifact is a dataclass with two class variables, ``SCHEMA`` and ``SCHEMA_VERSION``; what is saved follows from its
fields (see :mod:`murano.artifacts.codec`). A ``.pt`` file is an ordinary one of torch, with the SHA-256 of all its
bytes in the comment of the zip that it is. The seal is checked before anything else looks at the file, so that a
damaged or foreign one is refused without being parsed; what is inside is read by ``torch.load(weights_only=True)``,
which executes nothing. JSON files carry the SHA-256 of their contents, so that they may be reformatted but not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import torch

from murano.artifacts.codec import AnotherKind, check_version, digest_of, envelope, open_envelope
from murano.artifacts.folder import new_file
from murano.errors import ArtifactError, MissingKeyError, MuranoError, nearest

A = TypeVar("A")

_MARK = b"murano-sha256:"
_SEAL = (len(_MARK) + 64).to_bytes(2, "little") + _MARK  # the length of the zip's comment, then the comment
_END = 22  # bytes of a zip's last record, whose last two are the length of the comment


def save_artifact(path: str | os.PathLike[str], artifact: Any) -> Path:
    """Save one artifact. The file is there whole or not at all; an older one stays until the new one is complete.

    Args:
        path: where, usually ``….pt``.
        artifact: an artifact such as ``LogitLensResult``.

    Raises:
        ArtifactError: something in it can't be saved as data, or the file can't be written.
    """
    with writing(path), new_file(path) as file:
        write(file, artifact)
    return Path(path)


@overload
def load_artifact(path: str | os.PathLike[str], expected: type[A]) -> A: ...
@overload
def load_artifact(path: str | os.PathLike[str], expected: None = None) -> Any: ...
def load_artifact(path: str | os.PathLike[str], expected: type[Any] | None = None) -> Any:
    """Open a saved artifact. Nothing in the file is executed; its tensors are on the CPU.

    Args:
        path: a file that :func:`save_artifact` or a saved run wrote.
        expected: the artifact's class, if another one is an error.

    Raises:
        ArtifactError: the file is missing, damaged, not Murano's, of another schema or of a newer version.
    """
    with reading(path), open(path, "rb") as file:
        return read(file, expected)


def write(file: BinaryIO, artifact: Any) -> None:
    """Write a sealed artifact into an empty file that can be read and sought."""
    packed = envelope(artifact)
    try:
        torch.save(packed, file)
    except RuntimeError as error:  # torch's writer hides what the file said: that the disk is full, say
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    file.seek(-_END, os.SEEK_END)
    if not (end := file.read()).startswith(b"PK\5\6") or end[-2:] != b"\0\0":
        raise ArtifactError(f"torch {torch.__version__} writes another kind of file than Murano can seal")
    file.seek(-2, os.SEEK_END)
    size = file.tell()
    seal = _SEAL + _sha256(file, size).encode()
    file.seek(size)
    file.write(seal)


def read(file: BinaryIO, expected: type[Any] | None = None) -> Any:
    """Read what :func:`write` wrote.

    Raises:
        ArtifactError: it is damaged, foreign, of another schema or of a newer version.
    """
    check_seal(file)
    file.seek(0)
    try:
        packed = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ArtifactError(f"it holds something else than tensors and plain values ({_first_line(error)})") from None
    try:
        return open_envelope(packed, expected)
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"its contents do not fit its schema ({type(error).__name__}: {_first_line(error)})"
        ) from None


def check_seal(file: BinaryIO) -> None:
    """Compare a file with its seal.

    Raises:
        ArtifactError: it has none, or does not agree with it.
    """
    size = file.seek(0, os.SEEK_END) - len(_SEAL) - 64
    if size > 0:
        file.seek(size)
        tail = file.read()
        if tail.startswith(_SEAL):
            if _sha256(file, size).encode() == tail[len(_SEAL) :]:
                return
            raise ArtifactError("it is damaged: its bytes do not agree with the SHA-256 that was saved with them")
    file.seek(0)
    start = file.read(8)
    if not start:
        raise ArtifactError("it is empty")
    if start.startswith(b"PK"):
        raise ArtifactError("it is cut short or damaged, or a file of torch or zip that Murano did not write")
    raise ArtifactError(f"it is not a saved artifact of Murano (it begins with {start!r})")


def _sha256(file: BinaryIO, size: int) -> str:
    """The SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def sha256_of(file: BinaryIO) -> str:
    """The SHA-256 of a whole file."""
    return _sha256(file, file.seek(0, os.SEEK_END))


# ------------------------------------------------------------------------------------------------------------- JSON

_NUMBERS = re.compile(r"\[\n\s+(-?[\d.eE+-]+(?:,\n\s+-?[\d.eE+-]+)*)\n\s+\]")


def json_bytes(kind: str, version: int, content: dict[str, Any]) -> bytes:
    """A sealed JSON document: strict, readable, lists of numbers on one line.

    Raises:
        ValueError: something in it is not strict JSON.
    """
    document = {"murano": kind, "schema_version": version, **content}
    document["sha256"] = digest_of(document)
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes JSON's own escape


def check_json(data: bytes) -> dict[str, Any]:
    """A document that :func:`json_bytes` wrote, whatever its kind.

    Raises:
        ArtifactError: it is damaged, changed or not Murano's.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = f"it is cut short, damaged or no JSON ({_first_line(error)})" if data else "it is empty"
        raise ArtifactError(reason) from None
    if not isinstance(document, dict) or not isinstance(document.get("murano"), str) or "sha256" not in document:
        raise ArtifactError("it is no document of Murano, or damaged")
    if document.pop("sha256") != digest_of(document):
        raise ArtifactError("it is damaged or was edited: its contents do not agree with its SHA-256")
    return document


def read_json(data: bytes, kind: str, version: int) -> dict[str, Any]:
    """The content of a document that :func:`json_bytes` wrote.

    Raises:
        ArtifactError: it is damaged, changed, of another kind or of a newer version.
    """
    document = check_json(data)
    if (found := document.pop("murano")) != kind:
        raise ArtifactError(f"it holds {found!r}, not {kind!r}")
    check_version(kind, document.pop("schema_version", None), version)
    return document


# ----------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong with a file that is read into one ``ArtifactError``: it names it and says what to do."""
    _check_path(path)
    try:
        yield
    except FileNotFoundError:
        raise _named(f"There is no {str(path)!r}.{_nearby(Path(path))}", path) from None
    except IsADirectoryError:
        raise _named(f"{str(path)!r} is a folder: open a run with load_run({str(path)!r}).", path) from None
    except MissingKeyError:
        raise
    except Exception as error:  # whatever it is: a file must not choose the exception that a user meets
        if _is_named(error):
            raise
        known = isinstance(error, OSError) or "pip install" in str(error)
        advice = "" if known else " Restore it from a copy or save the run again."
        if isinstance(error, AnotherKind):
            opens = f"{error.opener}({str(path)!r}) opens it, " if error.opener else ""
            advice = f" The file is whole: {opens}load_run the run that it is in."
        raise _named(f"Can't read {str(path)!r}: {_why(error)}.{advice}", path) from None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong with a file that is written into one ``ArtifactError`` that names it."""
    _check_path(path)
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if _is_named(error):
            raise
        raise _named(f"Can't save {str(path)!r}: {_why(error)}. Nothing was changed there.", path) from None


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        kind = type(path).__name__
        raise ArtifactError(
            f"A path was expected, not a {kind}: the path comes first, as in save_artifact('lens.pt', lens)."
        )


def _named(message: str, path: str | os.PathLike[str]) -> ArtifactError:
    """An error whose message names the path already: it has the path as its second argument."""
    return ArtifactError(message, str(path))


def _is_named(error: Exception) -> bool:
    return isinstance(error, ArtifactError) and len(error.args) > 1


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        other = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{other}"
    return (_first_line(error) if isinstance(error, MuranoError) else f"{type(error).__name__}: {error}").rstrip(".")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _nearby(path: Path) -> str:
    """What a user may have meant by a path that is not there."""
    with contextlib.suppress(OSError, ValueError):
        there = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
        # The two files that make a folder a run are no misspelling of each other.
        hint = "" if path.name in ("manifest.json", "metadata.json") else nearest(path.name, there)
        return f"{hint} In {str(path.parent)!r} there is: {', '.join(there[:10]) or 'nothing'}."
    return ""
