"""What ``murano show`` prints of a document's run: each metric through the sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from murano.artifacts.metric_table import MetricTable
from murano.documents.runs import DocumentRun

#: Of the bars, in characters.
WIDTH = 40


def as_text(run: DocumentRun, metrics: tuple[str, ...]) -> str:
    """A run and its curves as text.

    Args:
        run: the run.
        metrics: which ones.
    """
    return "\n".join(_lines(run, metrics))


def _lines(run: DocumentRun, metrics: tuple[str, ...]) -> Iterator[str]:
    info = run.info
    done = "finished" if info.get("finished") else "interrupted: murano run goes on with it"
    yield f"{run.folder}: run of {info['document']['name']}, {len(run.points)} point{'s' if len(run.points) != 1 else ''}, {done}"
    model, proof = info.get("model", {}), info.get("readout", {})
    if model:
        revision = f" at {model['revision']}" if model.get("revision") else ""
        exact = "equal to the bit" if proof["exact"] else f"within {proof['max_difference']:.3g}"
        yield f"  model    {model['model_id']}{revision}, {model['dtype']}, {model['n_layers']} layers"
        yield f"  readout  {proof['path']} path, {exact} in its proof"
    for rows in info["rows"]:
        yield f"  rows     {rows['rows']} of {rows['name'] or 'the document itself'} for {rows['step']}, input {rows['input']!r}"
    yield from (f"  note     {note}" for note in info.get("notes", []))
    for metric in metrics:
        yield ""
        table = run.table(metric)
        yield from curve(table, [point or column for point, column in zip(run.points, table.columns, strict=True)])


def curve(table: MetricTable, points: list[str]) -> Iterator[str]:
    """A metric's mean at each point, and a bar as long as it.

    Args:
        table: the metric, a column for each point.
        points: what each is called.
    """
    summary = table.mean()
    rows = table.values.shape[0]
    means = summary.mean[0].tolist()
    sizes = [abs(mean) for mean in means if mean == mean]
    top = max(sizes, default=0.0) or 1.0
    what = f"mean of {rows} rows, and its {summary.confidence:.0%} interval" if rows > 1 else "value of the only row"
    yield f"{table.name} ({table.unit}): {what}"
    width = max(map(len, points))
    columns = zip(points, means, summary.low[0].tolist(), summary.high[0].tolist(), strict=True)
    for point, mean, low, high in columns:
        bar = ("█" if mean >= 0 else "░") * round(WIDTH * abs(mean) / top) if mean == mean else ""
        interval = f"[{low:.4g}, {high:.4g}]  " if low == low else ""
        yield f"  {point:<{width}}  {mean:>10.4g}  {interval}{bar}".rstrip()


def draw(run: DocumentRun, metrics: tuple[str, ...], file: Path) -> list[str]:
    """Write the curves as figures: FILE for one metric, FILE-<metric> for several."""
    from murano.plotting import save_figure
    from murano.plotting.metrics import metric_curves

    paths = {m: file if len(metrics) == 1 else file.with_stem(f"{file.stem}-{m.replace('/', '-')}") for m in metrics}
    return [save_figure(metric_curves(run.table(m)).draw(bare=True), path) for m, path in paths.items()]
