"""Figures as files: whole or not there at all, their text as text."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murano.artifacts.folder import new_file
from murano.errors import ArtifactError, InputError, nearest
from murano.plotting.backend import Axes, Figure, figure_of, rc_context

#: The formats that a figure can be saved in, and what ``Plot`` writes besides: the page to explore.
FORMATS = ("png", "svg", "pdf")
PAGE = "html"
DPI = 200

#: Only while a figure is saved: text stays text, to be searched and edited, and the same figure gives the same bytes.
#: Letters are not bent to the pixels, which takes a third of the time of a large heatmap and differs between machines.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "murano", "pdf.fonttype": 42, "text.hinting": "none"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"pil_kwargs": {"compress_level": 4}},  # twice as fast as the usual 6, and no larger
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}


def save_figure(figure: Figure | Axes, path: str | os.PathLike[str]) -> str:
    """Save a figure in the format that its file's ending names.

    Args:
        figure: a figure, or the axes that a plot function returned.
        path: the file; folders that are missing are made; a file that is there is replaced when the new one is whole.

    Returns:
        The path.

    Raises:
        InputError: the ending names no format.
        ArtifactError: the file can't be written.
    """
    ending = Path(path).suffix
    if not ending:
        raise InputError(f"{os.fspath(path)!r} has no ending that says the format: write '{os.fspath(path)}.png'.")
    if ending.lower() == f".{PAGE}":
        raise InputError(f"A figure can't be saved as {ending!r}: lens_page(lens, {os.fspath(path)!r}) writes a page.")
    data = figure_bytes(figure, check_formats(ending, FORMATS)[0])
    try:
        with new_file(path) as file:
            file.write(data)
    except OSError as error:
        raise ArtifactError(f"Can't write the figure {os.fspath(path)!r}: {error.strerror or error}.") from error
    return os.fspath(path)


def figure_bytes(figure: Figure | Axes, file_format: str = "png", dpi: float = DPI) -> bytes:
    """What a file of a figure holds."""
    if isinstance(figure, Axes):
        figure = figure_of(figure)
    buffer = io.BytesIO()
    with rc_context(_STYLE):
        # What "tight" would find by laying out every text of every cell: those lie inside their axes.
        box = "tight" if figure.get_layout_engine() is not None else figure.get_tightbbox().padded(0.05)
        figure.savefig(buffer, format=file_format, dpi=dpi, bbox_inches=box, pad_inches=0.05, **_OPTIONS[file_format])
    return buffer.getvalue()


def check_formats(formats: str | Sequence[str], known: Sequence[str] = (*FORMATS, PAGE)) -> tuple[str, ...]:
    """Names of formats, with or without their dot.

    Raises:
        InputError: one is unknown, or there are none.
    """
    given = [formats] if isinstance(formats, str) else list(formats)
    names = tuple(dict.fromkeys(str(name).lower().lstrip(".") for name in given))
    for name, written in zip(names, dict.fromkeys(given), strict=False):
        if name not in known:
            raise InputError(f"Unknown format {written!r}.{nearest(name, known)} Known: {', '.join(known)}.")
    if not names:
        raise InputError(f"formats is empty. Known: {', '.join(known)}.")
    return names
