"""Everything in the results that can be drawn, drawn."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from murano.artifacts.generation_lens import GenerationLensResult
from murano.artifacts.logit_attribution import LogitAttributionResult
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.metric_table import MetricTable
from murano.errors import InputError
from murano.plotting.attribution import Waterfall, waterfall
from murano.plotting.attribution_grid import attribution_grid
from murano.plotting.backend import Figure, figure_of
from murano.plotting.files import PAGE, check_drawing, figure_bytes, save_figure
from murano.plotting.generation import AgreementCurve, generation_figures
from murano.plotting.grid import Grid
from murano.plotting.lens import lens_grid
from murano.plotting.metrics import MetricCurves, decided_curves, metric_curves
from murano.plotting.overview import overview_grid
from murano.plotting.page import lens_page

#: A set of more prompts than this is drawn as one overview.
MOST_PROMPTS = 8
#: Of the image in a notebook: sharp on a screen with small pixels, shown at half its size.
SCREEN_DPI, SCREEN_SHRINK = 200, 0.5


def draw_results(
    results: Mapping[str, Any],
    output_dir: str | os.PathLike[str] | None = None,
    show: bool | None = None,
    formats: str | Sequence[str] = ("png",),
    per_prompt: bool | None = None,
    by: str | None = None,
) -> list[str]:
    """Draw all results that have a figure, save them and show them.

    Args:
        results: values by key; what has no figure is passed over.
        output_dir: the folder to save into; without it nothing is saved.
        show: whether a notebook shows the figures; ``None``: if it is one.
        formats: the formats to save in: ``"png"``, ``"svg"``, ``"pdf"``, and ``"html"``, one page to explore all prompts of a lens.
        per_prompt: a heatmap for each prompt, or one overview of all; ``None``: heatmaps for up to 8 prompts.
        by: a name in the prompts' metadata: metrics get a line for each group.

    Returns:
        The files that were written.

    Raises:
        InputError: nothing can be drawn, or an argument can't be meant.
        ArtifactError: a file can't be written.
    """
    if not isinstance(results, Mapping):
        raise InputError(f"Results by key are drawn, not a {type(results).__name__}: draw_results({{'name': result}}).")
    names = check_drawing(output_dir, show, formats, per_prompt, by)
    figures = [name for name in names if name != PAGE]
    notebook = show is not False and in_notebook()
    files: list[str] = []
    drawn = list(_drawn(results))
    nowhere = output_dir is None and not notebook
    for stem, value in [] if nowhere else drawn:
        for name, drawing in _drawings(stem, value, per_prompt, by) if figures else ():
            figure = figure_of(drawing.draw(bare=True))
            if output_dir is not None:
                files += [save_figure(figure, Path(output_dir) / f"{name}.{ending}") for ending in figures]
            if notebook:
                _show(_image(figure, name))
            figure.clear()  # axes and figure hold each other: without this they wait for the garbage collector
        if PAGE in names and isinstance(value, LogitLensResult):
            file = None if output_dir is None else os.fspath(Path(output_dir) / f"{stem}.{PAGE}")
            page = lens_page(value, file)
            files += [] if file is None else [file]
            if notebook:
                _show(page)
    pageless = [repr(stem) for stem, value in drawn if not isinstance(value, LogitLensResult)]
    if PAGE in names and pageless and not nowhere:
        rest = "Figures are drawn." if figures else "Nothing is drawn of it: give formats='png', 'svg' or 'pdf'."
        warnings.warn(
            f"Only a logit lens has a page (formats={PAGE!r}): there is none of {', '.join(pageless)}. {rest}",
            stacklevel=3,
        )
    if not drawn:
        there = ", ".join(f"{str(key)!r}" for key in results) or "none"
        raise InputError(
            f"There is nothing to draw. Results that are there: {there}. "
            "Can be drawn: a LogitLensResult, as LogitLens writes it under 'logit_lens', a GenerationLensResult, "
            "a LogitAttributionResult, and the tables of metrics."
        )
    if nowhere and show is not False:
        warnings.warn(
            "Plot has nowhere to put its figures: this is no notebook. Give Plot(output_dir=...) to save them.",
            stacklevel=3,
        )
    return files


def in_notebook() -> bool:
    """Whether this runs in a kernel that shows rich output: Jupyter, not a terminal."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return getattr(shell, "kernel", None) is not None


def _drawn(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each result that has a figure, with a file name for it that has no ending yet."""
    for key, value in results.items():
        if isinstance(value, (LogitLensResult, GenerationLensResult, LogitAttributionResult)) or (
            isinstance(value, MetricTable) and (value.addresses or "depth" in value.columns)
        ):
            yield re.sub(r"[^\w.-]+", "_", str(key)).lstrip(".") or "lens", value


def _drawings(
    stem: str, value: Any, per_prompt: bool | None, by: str | None
) -> Iterator[tuple[str, Grid | MetricCurves | AgreementCurve | Waterfall]]:
    """Each figure's file name without its ending, and what it shows; one at a time, so that memory stays flat."""
    if isinstance(value, MetricTable):
        yield stem, metric_curves(value, by=by) if value.addresses else decided_curves(value, by=by)
    elif isinstance(value, GenerationLensResult):
        each = value.n_prompts <= MOST_PROMPTS if per_prompt is None else per_prompt
        yield from generation_figures(value, stem, each)
    elif isinstance(value, LogitAttributionResult):
        yield from _attribution(stem, value, per_prompt)
    else:
        yield from _grids(stem, value, per_prompt)


def _grids(stem: str, lens: LogitLensResult, per_prompt: bool | None) -> Iterator[tuple[str, Grid]]:
    if lens.n_prompts > MOST_PROMPTS if per_prompt is None else not per_prompt:
        yield f"{stem}_overview", overview_grid(lens)
        return
    digits = len(str(lens.n_prompts - 1))
    for prompt in range(lens.n_prompts):
        if not bool(lens.attention_mask[prompt].any()):  # it was left out
            continue
        yield stem if lens.n_prompts == 1 else f"{stem}_{prompt:0{digits}}", lens_grid(lens, prompt)


def _attribution(
    stem: str, result: LogitAttributionResult, per_prompt: bool | None
) -> Iterator[tuple[str, Grid | Waterfall]]:
    """Waterfalls of a few prompts, or of the mean of many, and the heatmap of all."""
    if result.n_prompts == 1:
        yield stem, waterfall(result)
    elif result.n_prompts > MOST_PROMPTS if per_prompt is None else not per_prompt:
        yield f"{stem}_mean", waterfall(result, None)
    else:
        digits = len(str(result.n_prompts - 1))
        for prompt in range(result.n_prompts):
            yield f"{stem}_{prompt:0{digits}}", waterfall(result, prompt)
    yield f"{stem}_grid", attribution_grid(result)


def _image(figure: Figure, name: str) -> Any:
    """A figure as an image: pyplot does not know it, so that the notebook will not show it a second time."""
    from IPython.display import Image

    data = figure_bytes(figure, "png", SCREEN_DPI)
    width = int.from_bytes(data[16:20], "big")  # of a PNG: the first number of its header
    return Image(data=data, format="png", width=round(width * SCREEN_SHRINK), alt=f"Figure: {name}")  # type: ignore[no-untyped-call]


def _show(thing: Any) -> None:
    from IPython.display import display

    display(thing)  # type: ignore[no-untyped-call]
