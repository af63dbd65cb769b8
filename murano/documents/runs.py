"""A document's run, opened: metrics by point, and as tables over the swept layers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.documents.errors import as_path
from murano.errors import ArtifactError, InputError, nearest

if TYPE_CHECKING:
    from murano.artifacts.metric_table import MetricTable


def digest(value: Any) -> str:
    """The SHA-256 of plain values, whatever the order of their names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class SavedPoint(Mapping[str, "list[dict[str, Any]]"]):
    """The files of a point in a run's folder: each is read when it is first asked for, and must be as it was written.

    Args:
        folder: of the run.
        name: of the point.
        files: the SHA-256 of each file, as :file:`run.json` has them.
    """

    def __init__(self, folder: Path, name: str, files: Mapping[str, str]) -> None:
        self._folder = folder
        names = {Path(file).relative_to(name).as_posix(): file for file in files}
        self._saved = {short: (file, files[file]) for short, file in names.items() if short != "document.json"}
        self._read: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._read:
            file, saved = self._saved[name]
            fault = _fault(self._folder, file, saved)
            if fault:
                folder = str(self._folder)
                raise ArtifactError(
                    f"{str(self._folder / file)!r} is {fault}: murano show {shlex.quote(folder)} --verify lists all such files, and "
                    f"murano run of the document with --out {shlex.quote(folder)} computes them again."
                )
            self._read[name] = read_json(self._folder / file)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


def _fault(folder: Path, file: str, saved: str) -> str:
    """What is wrong with a file of a run; nothing if it is as it was written."""
    try:
        data = (folder / file).read_bytes()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"not to be read ({error.strerror or error})"
    return "" if hashlib.sha256(data).hexdigest() == saved else "not as it was written"


@dataclass(frozen=True, repr=False)
class DocumentRun:
    """A run of a document, whole or as far as it came.

    Args:
        document: what was run, as plain values.
        info: what :file:`run.json` says.
        points: rows by point and file: ``run.points["layers=0"]["p_answer.json"][0]["value"]``.
        folder: where it is, if it was written.
    """

    document: Mapping[str, Any]
    info: Mapping[str, Any]
    points: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    folder: Path | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was saved: files without their ending."""
        return tuple(self.info.get("metrics", {}))

    def table(self, metric: str) -> MetricTable:
        """A metric of every row at every point: a column for each swept layer, ready for ``.mean()`` and plots.

        Args:
            metric: its name, or that of the file that it was saved in, without ``.json``.

        Raises:
            InputError: there is no such metric, or no point is finished.
            ArtifactError: a file of it is missing, or not as it was written.
        """
        import torch

        from murano.address import Address
        from murano.artifacts.metric_table import MetricTable

        metric = saved_name(self, metric)
        about = self.info["metrics"][metric]
        columns = [
            [math.nan if row["value"] is None else row["value"] for row in files[f"{metric}.json"]]
            for files in self.points.values()
        ]
        places = [self.info["points"][name]["addresses"][metric] for name in self.points]
        by_layer = len(set(places)) == len(places)
        return MetricTable(
            name=metric,
            values=torch.tensor(columns).T.contiguous(),
            columns=tuple(places if by_layer else self.points),
            addresses=tuple(map(Address.parse, places)) if by_layer else (),
            unit=about["unit"],
            direction=about["direction"],
            how=about["how"],
            model=self.info["model"],
        )

    def faults(self) -> dict[str, str]:
        """The run's document and the files of its finished points that are not as they were written, and what is wrong with each."""
        return {} if self.folder is None else find_faults(self.folder)

    def __repr__(self) -> str:
        where = f", {str(self.folder)!r}" if self.folder is not None else ""
        return (
            f"DocumentRun({self.info['document']['name']}{where}: {len(self.points)} points, {', '.join(self.metrics)})"
        )


def saved_name(run: DocumentRun, metric: str) -> str:
    """The file that a metric is saved in, without its ending.

    Args:
        run: the run.
        metric: that name, or the name of the metric in the document.

    Raises:
        InputError: there is no such metric, or several files hold metrics of that name.
    """
    about = run.info.get("metrics", {})
    if metric in about:
        return metric
    named: list[str] = [file for file, of in about.items() if of["metric"] == metric]
    if len({about[file]["step"] for file in named}) > 1:
        raise InputError(
            f"{metric!r} is a metric of several steps: name the file that it is saved in, {' or '.join(named)}."
        )
    if named:
        return named[0]
    known = dict.fromkeys([*about, *(str(of["metric"]) for of in about.values())])
    raise InputError(
        f"This run has no metric {str(metric)!r}.{nearest(metric, known)} It has: {', '.join(about) or 'none yet'}."
    )


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a document's run."""
    return Path(path, "run.json").is_file()


def run_of_point(path: Path) -> Path | None:
    """The folder of the run that a folder is a point of."""
    above = Path(os.path.abspath(path)).parent
    try:
        points = json.loads((above / "run.json").read_text(encoding="utf-8"))["points"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path.parent if Path(os.path.abspath(path)).name in points else None


def check_folder(path: Path) -> None:
    """Refuse what is no folder that can be opened: there is none, or it is a point of a run.

    Raises:
        ArtifactError: naming the folder to open instead, where there is one.
    """
    if not path.exists():
        near = nearest(path, path.parent.iterdir()) if path.parent.is_dir() else ""
        raise ArtifactError(f"There is no folder {str(path)!r}.{near}")
    if not path.is_dir():
        raise ArtifactError(f"{str(path)!r} is a file: give the folder of a run.")
    whole = run_of_point(path)
    if whole is not None and not is_run(path):
        raise ArtifactError(f"{str(path)!r} is a point of a run: open the whole run, {str(whole)!r}.")


def open_run(path: str | os.PathLike[str]) -> DocumentRun:
    """Open the folder that ``murano run`` wrote: without the model, the rows or the document's own folder.

    A file is read when it is first needed, and must be as :file:`run.json` says that it was written.

    Args:
        path: the folder.

    Raises:
        ArtifactError: it is no such folder, or its :file:`run.json` is damaged.
        InputError: this is no path.
    """
    folder = as_path(path, "path", "the folder of a run")
    info = _info(folder)
    points = {name: SavedPoint(folder, name, point["files"]) for name, point in info["points"].items()}
    return DocumentRun(read_json(folder / "document.json"), info, points, folder)


def find_faults(folder: Path) -> dict[str, str]:
    """What is wrong with the files of a run, by file: its document, and those of its finished points.

    Args:
        folder: of the run.

    Raises:
        ArtifactError: it is no such folder, or its :file:`run.json` is damaged.
    """
    info = _info(folder)
    found: dict[str, str] = {}
    if not (folder / "document.json").is_file():
        found["document.json"] = "missing"
    else:
        try:
            same = digest(read_json(folder / "document.json")) == info["document"]["sha256"]
        except ArtifactError:
            same = False
        if not same:
            found["document.json"] = "not as it was written"
    for point in info["points"].values():
        found |= {name: fault for name, saved in point["files"].items() if (fault := _fault(folder, name, saved))}
    return found


def _info(folder: Path) -> dict[str, Any]:
    """What :file:`run.json` says, if it has what is needed to open a run."""
    check_folder(folder)
    if not is_run(folder):
        raise ArtifactError(f"{str(folder)!r} is no run of a document: it has no run.json.")
    info: dict[str, Any] = read_json(folder / "run.json")
    try:
        for name, point in info["points"].items():
            SavedPoint(folder, name, point["files"])
        _ = (
            info["document"]["name"],
            info["document"]["sha256"],
            [about["metric"] for about in info.get("metrics", {}).values()],
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{str(folder / 'run.json')!r} was edited or is damaged: {error!r}.") from None
    return info


def read_json(path: Path) -> Any:
    """A JSON file of a run.

    Raises:
        ArtifactError: it can't be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"Can't read {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from None
