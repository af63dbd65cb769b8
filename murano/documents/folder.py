"""The folder of a document's run: what is in it already, and how it grows, a point at a time.

::

    <out>/
      document.json              the document
      run.json                   versions, readout proof, timings, and the SHA-256 of each file of a finished point
      layers=0/document.json     the document of one point, which can be run alone
      layers=0/p_answer.json     what its steps save: a row for each example

A file is there whole or not at all, and a point is finished when :file:`run.json` says so and its files are as they were written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.artifacts.folder import check_writable
from murano.artifacts.store import writing
from murano.documents.errors import spell
from murano.documents.plan import Point, at_point
from murano.documents.runs import DocumentRun, digest, open_run, read_json
from murano.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from murano.documents.document import Document

DOCUMENT, RUN = "document.json", "run.json"


class RunFolder:
    """The folder that a run is written into.

    Args:
        out: where.
        document: what is run.
        inputs: a digest of rows, model and versions; finished points with another one are computed again.
        force: take no notice of what an earlier run left.

    Raises:
        InputError: it holds another document's run, or something else.
        ArtifactError: it can't be written.
    """

    def __init__(self, out: Path, document: Document, inputs: str, *, force: bool) -> None:
        self.out, self.document, self.inputs = out, document, inputs
        if out.exists() and not out.is_dir():
            raise InputError(f"{str(out)!r} is a file: name a folder for the run.")
        check_writable(out)
        self.force = force
        self._check_held()

    def _check_held(self) -> None:
        there = sorted(p.name for p in self.out.iterdir() if not p.name.startswith(".")) if self.out.is_dir() else []
        if not there:
            return
        if DOCUMENT not in there:
            raise InputError(
                f"{str(self.out)!r} holds no run but {', '.join(there[:5])}{', …' if len(there) > 5 else ''}: name another folder."
            )
        try:
            held = read_json(self.out / DOCUMENT)
        except ArtifactError:
            held = None
        if held is None or digest(held) != digest(self.document.data):
            if self.force:
                return
            about = self._earlier().get("document", {})
            name = about.get("path") or about.get("name") or str(self.out / DOCUMENT)
            differs = f" They differ at {spell(_difference(held, self.document.data))}." if held is not None else ""
            raise InputError(
                f"{str(self.out)!r} holds the run of another document, {name!r}, and not of "
                f"{str(self.document.path or self.document.name)!r}.{differs} Name another folder, or start over with --force "
                "(force=True)."
            )

    def _earlier(self) -> dict[str, Any]:
        with contextlib.suppress(ArtifactError):
            found = read_json(self.out / RUN)
            if isinstance(found, dict):
                return found
        return {}

    def _clear(self) -> None:
        """Remove what earlier runs wrote, and nothing else."""
        files = [name for point in self._earlier().get("points", {}).values() for name in point.get("files", {})]
        for name in [*files, RUN, DOCUMENT]:
            with contextlib.suppress(OSError):
                (self.out / name).unlink()
        for name in files:
            with contextlib.suppress(OSError):
                (self.out / name).parent.rmdir()
        for left in self.out.glob(".lens-*.pt"):
            left.unlink()

    def kept(self, points: Sequence[str]) -> dict[str, Any]:
        """What is known of the points that are finished already, by name; nothing is written.

        Args:
            points: of the document.
        """
        earlier = self._earlier()
        if self.force or earlier.get("inputs") != self.inputs:
            return {}
        return {n: p for n in points if (p := earlier.get("points", {}).get(n)) and self._whole(p.get("files", {}))}

    def start(self, info: dict[str, Any]) -> None:
        """Write the document and what is known of the run so far, the points that are kept among it."""
        earlier = self._earlier()
        if self.force:
            self._clear()
        self._write(DOCUMENT, self.document.to_json())
        known: dict[str, Any] = {
            name: earlier[name] for name in ("model", "readout", "metrics") if info["points"] and name in earlier
        }
        self._write_info({**known, **info})

    def _whole(self, files: Mapping[str, str]) -> bool:
        try:
            return bool(files) and all(
                hashlib.sha256((self.out / name).read_bytes()).hexdigest() == saved for name, saved in files.items()
            )
        except OSError:
            return False

    def checkpoint(self, index: int, points: Sequence[Point]) -> Path:
        """Where a pass keeps what it has read so far for these points."""
        names = hashlib.sha256(repr([point.name for point in points]).encode()).hexdigest()
        return self.out / f".lens-{index}-{self.inputs[:16]}-{names[:8]}.pt"

    def write(self, point: Point, files: Mapping[str, Any], info: dict[str, Any]) -> None:
        """Write a finished point.

        Args:
            point: which one.
            files: rows by file.
            info: of the run; the point's entry gets its files' digests.
        """
        prefix = f"{point.name}/" if point.name else ""
        texts = {name: json.dumps(rows, indent=1, ensure_ascii=False) + "\n" for name, rows in files.items()}
        if point.name:
            own = at_point(self.document.data, point)
            texts[DOCUMENT] = json.dumps(own, indent=2, ensure_ascii=False) + "\n"
        info["points"][point.name]["files"] = {
            prefix + name: self._write(prefix + name, text) for name, text in texts.items()
        }
        self._write_info(info)

    def finish(self, info: dict[str, Any], points: Sequence[str]) -> None:
        """The last word: points in the document's order, and nothing left that was only kept for a resume."""
        self._write_info({**info, "points": {name: info["points"][name] for name in points}})
        for left in self.out.glob(".lens-*.pt"):
            left.unlink()

    def complete(self, points: Sequence[str]) -> None:
        """All points are there: say so, if the run was stopped just before it did."""
        earlier = self._earlier()
        if not earlier.get("finished"):
            self.finish({**earlier, "finished": True}, points)

    def open(self) -> DocumentRun:
        """The run as it is on the disk."""
        return open_run(self.out)

    def _write_info(self, info: Mapping[str, Any]) -> None:
        self._write(RUN, json.dumps(info, indent=1, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> str:
        path, data = self.out / name, text.encode()
        # Not brought to the disk one by one: what a power cut takes does not agree with its digest, and is computed again.
        with writing(path), _beside(path) as temporary:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _difference(one: Any, other: Any) -> tuple[str | int, ...]:
    """The path to the first place at which two documents differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *other]:
            if name not in one or name not in other:
                return (name,)
            if digest(one[name]) != digest(other[name]):
                return (name, *_difference(one[name], other[name]))
    return ()
