"""A document's run, opened: metrics by point, and as tables over the swept layers."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murano.errors import ArtifactError, InputError, nearest

if TYPE_CHECKING:
    from murano.artifacts.metric_table import MetricTable


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
            metric: the name of the file that it was saved in, without ``.json``.

        Raises:
            InputError: there is no such metric, or no point is finished.
        """
        import torch

        from murano.address import Address
        from murano.artifacts.metric_table import MetricTable

        if metric not in self.metrics:
            raise InputError(
                f"This run has no metric {metric!r}.{nearest(metric, self.metrics)} It has: {', '.join(self.metrics) or 'none yet'}."
            )
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
        """The files of finished points that are not as they were written, and what is wrong with each."""
        found: dict[str, str] = {}
        for point in self.info["points"].values() if self.folder is not None else ():
            for name, saved in point["files"].items():
                path = Path(str(self.folder), name)
                if not path.is_file():
                    found[name] = "missing"
                elif hashlib.sha256(path.read_bytes()).hexdigest() != saved:
                    found[name] = "not as it was written"
        return found

    def __repr__(self) -> str:
        where = f", {str(self.folder)!r}" if self.folder is not None else ""
        return (
            f"DocumentRun({self.info['document']['name']}{where}: {len(self.points)} points, {', '.join(self.metrics)})"
        )


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a document's run."""
    return Path(path, "run.json").is_file() and Path(path, "document.json").is_file()


def open_run(path: str | os.PathLike[str]) -> DocumentRun:
    """Open the folder that ``murano run`` wrote: without the model, the rows or the document's own folder.

    Args:
        path: the folder.

    Raises:
        ArtifactError: it is no such folder, or a file in it is damaged.
    """
    folder = Path(path)
    if not is_run(folder):
        raise ArtifactError(f"{os.fspath(path)!r} is no run of a document: it has no run.json and document.json.")
    info = read_json(folder / "run.json")
    try:
        points = {
            name: {
                file: read_json(folder / name / file)
                for file in (Path(f).relative_to(name).as_posix() for f in point["files"])
                if file != "document.json"
            }
            for name, point in info["points"].items()
        }
        return DocumentRun(read_json(folder / "document.json"), info, points, folder)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{str(folder / 'run.json')!r} was edited or is damaged: {error!r}.") from None


def read_json(path: Path) -> Any:
    """A JSON file of a run.

    Raises:
        ArtifactError: it can't be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"Can't read {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from None
