"""MetricTable: a metric for each prompt, by layer or as a few numbers."""

from __future__ import annotations

import csv
import html
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from murano.address import Address
from murano.errors import ArtifactError, InputError, MissingExtraError, nearest
from murano.prompts import Prompt, PromptBatch

#: Resamples of a bootstrap interval.
RESAMPLES = 2000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetricTable:
    """A metric of a set of prompts: complete without the lens that it was computed from.

    Args:
        name: of the metric: ``"token_prob"``.
        values: a row for each prompt, NaN where the metric is not defined.
        columns: what each column holds: a layer's address, or the name of a number.
        addresses: the layers, where columns are layers.
        unit: of the values; where columns differ, one for each, separated by commas.
        direction: which values say that the model is nearer to the target: ``"higher"``, ``"lower"`` or ``""`` for neither.
        how: how it was computed, in words.
        left_out: why a prompt has no number, by index of the prompt.
        prompts: the prompts, with targets and metadata.
        model: what was read, as in the lens.
        extra: what another version of this artifact saved and this one does not know; saved again with the rest.
    """

    SCHEMA: ClassVar[str] = "metric_table"
    SCHEMA_VERSION: ClassVar[int] = 1

    name: str
    values: Float[Tensor, "prompt column"]
    columns: tuple[str, ...]
    addresses: tuple[Address, ...] = ()
    unit: str = ""
    direction: str = ""
    how: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    prompts: PromptBatch | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: Any) -> Float[Tensor, " prompt"]:
        """The values of one column, by its name or by a layer.

        Raises:
            InputError: there is no such column.
        """
        name = column if isinstance(column, str) and column in self.columns else None
        if name is None and self.addresses:
            wanted = Address.parse(column)
            layers = int(self.model.get("n_layers", 0))
            name = str(wanted.resolve(layers) if layers else wanted)
        if name not in self.columns:
            raise InputError(
                f"{self.name} has no column {str(column)!r}.{nearest(column, self.columns)} It has: {', '.join(self.columns)}."
            )
        return self.values[:, self.columns.index(name)]

    def __len__(self) -> int:
        return int(self.values.shape[0])

    @property
    def units(self) -> tuple[str, ...]:
        """The unit of each column."""
        units = tuple(self.unit.split(", "))
        return units if len(units) == len(self.columns) else (self.unit,) * len(self.columns)

    def groups(self, by: str | None) -> dict[str, list[int]]:
        """Indices of the prompts of each group, in the order in which the groups first occur.

        Args:
            by: a name in the prompts' metadata; ``None`` puts all into one group ``"all"``.

        Raises:
            InputError: no prompt has such metadata.
        """
        n = self.values.shape[0]
        if by is None:
            return {"all": list(range(n))}
        prompts = self.prompts or ()
        check_group(by, prompts)
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            found.setdefault(str(prompt.metadata.get(by, "")), []).append(index)
        return found

    def mean(
        self, by: str | None = None, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
    ) -> MetricSummary:
        """The mean over prompts with its bootstrap interval.

        The interval is the percentile bootstrap (Efron 1979): prompts are drawn again with replacement, within each group, and the
        same ones for every column. A single prompt has none: its ends are NaN.

        Args:
            by: a name in the prompts' metadata to group by.
            confidence: how much of the resampled means the interval holds.
            resamples: how many there are.
            seed: of the drawing.

        Raises:
            InputError: no prompt has such metadata, or a confidence outside 0 to 1.
        """
        if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0 < confidence < 1:
            raise InputError(f"confidence={confidence!r} must be a number between 0 and 1, such as 0.95.")
        groups = self.groups(by)
        values = self.values.double().numpy()
        means, low, high, counts = [], [], [], []
        for indices in groups.values():
            rows = values[indices]
            columns = [_interval(column[~np.isnan(column)], confidence, resamples, seed) for column in rows.T]
            means.append([c[0] for c in columns])
            low.append([c[1] for c in columns])
            high.append([c[2] for c in columns])
            counts.append([int((~np.isnan(column)).sum()) for column in rows.T])
        shape = (len(groups), len(self.columns))
        return MetricSummary(
            table=self,
            by=by,
            groups=tuple(groups),
            mean=torch.tensor(means).view(shape),
            low=torch.tensor(low).view(shape),
            high=torch.tensor(high).view(shape),
            n=torch.tensor(counts).view(shape),
            confidence=confidence,
        )

    def records(self) -> list[dict[str, Any]]:
        """A row for each prompt and column, as plain values."""
        found = []
        for prompt, row in enumerate(self.values.tolist()):
            about: dict[str, Any] = {"prompt": prompt}
            if self.prompts is not None:
                of = self.prompts[prompt]
                about |= {"text": str(of), "target": _listed(of.targets), "foil": _listed(of.foils), **of.metadata}
            for column, value in zip(self.columns, row, strict=True):
                place = (
                    {"layer": Address.parse(column).layer, "address": column} if self.addresses else {"measure": column}
                )
                found.append({**about, **place, self.name: value})
        return found

    def to_dataframe(self) -> Any:
        """The same as a pandas ``DataFrame`` in long form, prompts' text, answers and metadata beside the values.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return _frame(self.records())

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`records` to a CSV file.

        Returns:
            The file.

        Raises:
            ArtifactError: it can't be written.
        """
        records = self.records()
        names = list(dict.fromkeys(name for record in records for name in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        try:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"Can't write {os.fspath(path)!r}: {error.strerror or error}.") from None
        return Path(path)

    def _repr_html_(self) -> str:
        return self.mean()._repr_html_()

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        left = f", {len(self.left_out)} left out" if self.left_out else ""
        what = f"{columns} layers" if self.addresses else ", ".join(self.columns)
        unit = f" ({self.unit})" if self.unit and len(set(self.units)) == 1 else ""
        return f"MetricTable({self.name}{unit}: {rows} prompts × {what}{left})"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetricSummary:
    """Means over prompts, by group, with bootstrap intervals.

    Args:
        table: what was averaged.
        by: the metadata that groups.
        groups: their names.
        mean: of the prompts that have a number.
        low: lower end of the interval; NaN for a single prompt.
        high: upper end of the interval; NaN for a single prompt.
        n: how many prompts have a number.
        confidence: of the interval.
    """

    table: MetricTable
    by: str | None
    groups: tuple[str, ...]
    mean: Float[Tensor, "group column"]
    low: Float[Tensor, "group column"]
    high: Float[Tensor, "group column"]
    n: Float[Tensor, "group column"]
    confidence: float

    def records(self) -> list[dict[str, Any]]:
        """A row for each group and column, as plain values."""
        return [
            {
                self.by or "group": group,
                "address" if self.table.addresses else "measure": column,
                "mean": float(self.mean[i, j]),
                "low": float(self.low[i, j]),
                "high": float(self.high[i, j]),
                "n": int(self.n[i, j]),
            }
            for i, group in enumerate(self.groups)
            for j, column in enumerate(self.table.columns)
        ]

    def to_dataframe(self) -> Any:
        """The same as a pandas ``DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return _frame(self.records())

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        header = ["", *(f"{group} (n={int(self.n[i].max())})" for i, group in enumerate(self.groups))]
        same = len(set(self.table.units)) == 1
        cells = [
            [
                column if same else f"{column} ({self.table.units[j]})",
                *(
                    f"{self.mean[i, j]:.3g}{self._interval(i, j)}{self._of_fewer(i, j)}" if self.n[i, j] else "–"
                    for i in range(len(self.groups))
                ),
            ]
            for j, column in enumerate(self.table.columns)
        ]
        return header, cells

    def _interval(self, group: int, column: int) -> str:
        """The interval of a mean, where it has one."""
        low, high = float(self.low[group, column]), float(self.high[group, column])
        return "" if math.isnan(low) else f" [{low:.3g}, {high:.3g}]"

    def _of_fewer(self, group: int, column: int) -> str:
        """How many prompts a mean is of, where that is not said at the top."""
        n, most = int(self.n[group, column]), int(self.n[group].max())
        return f" (n={n})" if n < most else ""

    def _caption(self) -> str:
        table = self.table
        unit = f" ({table.unit})" if table.unit and len(set(table.units)) == 1 else ""
        left = f"; {len(table.left_out)} left out: {next(iter(table.left_out.values()))}" if table.left_out else ""
        what = f"mean and {self.confidence:.0%} interval" if int(self.n.max()) > 1 else "value of one prompt"
        return f"{table.name}{unit}: {what}{left}"

    def __repr__(self) -> str:
        header, cells = self._rows()
        widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
        lines = ["  ".join(f"{text:>{w}}" for text, w in zip(row, widths, strict=True)) for row in [header, *cells]]
        return "\n".join([self._caption(), *lines])

    def _repr_html_(self) -> str:
        header, cells = self._rows()
        head = "".join(f"<th>{html.escape(text)}</th>" for text in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in cells)
        caption = f"<caption style='text-align:left'>{html.escape(self._caption())}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _frame(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("A data frame", "data") from None
    return pandas.DataFrame(records)


def _interval(values: Any, confidence: float, resamples: int, seed: int) -> tuple[float, float, float]:
    if len(values) < 2:  # one number says nothing of how much it would vary
        return (float(values[0]) if len(values) else math.nan), math.nan, math.nan
    generator = np.random.default_rng(seed)  # begun anew for each column: the same prompts are drawn in all of them
    # In blocks, so that memory does not grow with prompts × resamples.
    per = max(1, 1_000_000 // len(values))
    means = np.concatenate(
        [
            values[generator.integers(0, len(values), (min(per, resamples - done), len(values)))].mean(axis=1)
            for done in range(0, resamples, per)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(values.mean()), float(low), float(high)


def _listed(answers: Sequence[str | int]) -> Any:
    return answers[0] if len(answers) == 1 else "; ".join(map(str, answers))


def check_group(by: str, prompts: Iterable[Prompt]) -> None:
    """Refuse to group prompts by what none of them has.

    Args:
        by: a name in the prompts' metadata.
        prompts: the prompts.

    Raises:
        InputError: no prompt has such metadata.
    """
    known = sorted({str(name) for prompt in prompts for name in prompt.metadata})
    if by not in known:
        there = f"There is: {', '.join(known)}." if known else "The prompts carry no metadata."
        raise InputError(f"Prompts can't be grouped by {by!r}.{nearest(by, known)} {there}")
