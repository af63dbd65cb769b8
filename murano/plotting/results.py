"""Everything in the results that can be drawn, drawn."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from murano.artifacts.logit_attribution import LogitAttributionResult
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError
from murano.plotting.attribution import Waterfall, waterfall
from murano.plotting.attribution_grid import attribution_grid
from murano.plotting.backend import Figure, figure_of
from murano.plotting.files import check_formats, figure_bytes, save_figure
from murano.plotting.grid import Grid
from murano.plotting.lens import lens_grid
from murano.plotting.overview import overview_grid

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
) -> list[str]:
    """Draw all results that have a figure, save them and show them.

    Args:
        results: values by key; what has no figure is passed over.
        output_dir: the folder to save into; without it nothing is saved.
        show: whether a notebook shows the figures; ``None``: if it is one.
        formats: the formats to save in: ``"png"``, ``"svg"``, ``"pdf"``.
        per_prompt: a heatmap for each prompt, or one overview of all; ``None``: heatmaps for up to 8 prompts.

    Returns:
        The files that were written.

    Raises:
        InputError: nothing can be drawn, or a format is unknown.
        ArtifactError: a file can't be written.
    """
    names = check_formats(formats)
    notebook = show is not False and in_notebook()
    files: list[str] = []
    drawn = 0
    for stem, grid in _grids(results, per_prompt):
        drawn += 1
        if output_dir is None and not notebook:
            continue
        figure = figure_of(grid.draw(bare=True))
        if output_dir is not None:
            files += [save_figure(figure, Path(output_dir) / f"{stem}.{name}") for name in names]
        if notebook:
            _display(figure, stem)
        figure.clear()  # axes and figure hold each other: without this they wait for the garbage collector
    if not drawn:
        there = ", ".join(f"{str(key)!r}" for key in results) or "none"
        raise InputError(
            f"There is nothing to draw. Results that are there: {there}. "
            "Can be drawn: a LogitLensResult, as LogitLens writes it under 'logit_lens', and a LogitAttributionResult."
        )
    if output_dir is None and not notebook and show is not False:
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


def _grids(results: Mapping[str, Any], per_prompt: bool | None) -> Iterator[tuple[str, Grid | Waterfall]]:
    """Each figure's file name without its ending, and what it shows; one at a time, so that memory stays flat."""
    for key in results:
        lens = results[key]
        if isinstance(lens, LogitAttributionResult):
            yield from _attribution(lens, str(key), per_prompt)
        if not isinstance(lens, LogitLensResult):
            continue
        stem = re.sub(r"[^\w.-]+", "_", str(key)).lstrip(".") or "lens"
        if lens.n_prompts > MOST_PROMPTS if per_prompt is None else not per_prompt:
            yield f"{stem}_overview", overview_grid(lens)
            continue
        digits = len(str(lens.n_prompts - 1))
        for prompt in range(lens.n_prompts):
            yield stem if lens.n_prompts == 1 else f"{stem}_{prompt:0{digits}}", lens_grid(lens, prompt)


def _attribution(
    result: LogitAttributionResult, key: str, per_prompt: bool | None
) -> Iterator[tuple[str, Grid | Waterfall]]:
    """Waterfalls of a few prompts, or of the mean of many, and the heatmap of all."""
    stem = re.sub(r"[^\w.-]+", "_", key).lstrip(".") or "attribution"
    if result.n_prompts == 1:
        yield stem, waterfall(result)
    elif result.n_prompts > MOST_PROMPTS if per_prompt is None else not per_prompt:
        yield f"{stem}_mean", waterfall(result, None)
    else:
        digits = len(str(result.n_prompts - 1))
        for prompt in range(result.n_prompts):
            yield f"{stem}_{prompt:0{digits}}", waterfall(result, prompt)
    yield f"{stem}_grid", attribution_grid(result)


def _display(figure: Figure, name: str) -> None:
    """Show a figure as an image: pyplot does not know it, so that the notebook will not show it a second time."""
    from IPython.display import Image, display

    data = figure_bytes(figure, "png", SCREEN_DPI)
    width = int.from_bytes(data[16:20], "big")  # of a PNG: the first number of its header
    display(  # type: ignore[no-untyped-call]
        Image(data=data, format="png", width=round(width * SCREEN_SHRINK), alt=f"Figure: {name}")  # type: ignore[no-untyped-call]
    )
