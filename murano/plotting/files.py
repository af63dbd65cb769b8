"""Figures as files: whole or not there at all, their text as text."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murano.artifacts.folder import new_file
from murano.errors import ArtifactError, InputError, nearest
from murano.plotting.backend import Axes, Figure, figure_of, one_of, rc_context
from murano.plotting.paths import check_path

#: The formats that a figure can be saved in, and what ``Plot`` writes besides: the page to explore.
FORMATS = ("png", "svg", "pdf")
PAGE = "html"
DPI = 200
#: No side of a PNG has more pixels: viewers refuse larger ones, and matplotlib those from 65 536 on.
MOST_PIXELS = 16_384

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
        InputError: it is no figure, or the ending names no format.
        ArtifactError: the file can't be written.
    """
    name = check_path(path, "lens.png")
    if not isinstance(figure, (Axes, Figure)):
        raise InputError(
            f"A figure is saved, or the Axes that a plot function returned, not a {type(figure).__name__}: "
            f"save_figure({one_of(figure, 'axes') or 'plot_lens(lens)'}, {name!r})."
        )
    ending = Path(name).suffix
    if not ending:
        raise InputError(f"{name!r} has no ending that says the format: write '{name}.png'.")
    if ending.lower() == f".{PAGE}":
        raise InputError(f"A figure can't be saved as {ending!r}: lens_page(lens, {name!r}) writes a page.")
    data = figure_bytes(figure, check_formats(ending, FORMATS)[0])
    try:
        with new_file(path) as file:
            file.write(data)
    except OSError as error:
        raise ArtifactError(f"Can't write the figure {name!r}: {error.strerror or error}.") from error
    return name


def figure_bytes(figure: Figure | Axes, file_format: str = "png", dpi: float = DPI) -> bytes:
    """What a file of a figure holds; a PNG that would have too many pixels is made of larger ones."""
    if isinstance(figure, Axes):
        figure = figure_of(figure)
    buffer = io.BytesIO()
    with rc_context(_STYLE):
        # What "tight" would find by laying out every text of every cell: those lie inside their axes.
        box = None if figure.get_layout_engine() is not None else figure.get_tightbbox().padded(0.05)
        if file_format == "png":
            dpi = min(dpi, MOST_PIXELS / max(figure.get_size_inches() if box is None else box.size))
        figure.savefig(
            buffer, format=file_format, dpi=dpi, bbox_inches=box or "tight", pad_inches=0.05, **_OPTIONS[file_format]
        )
    return buffer.getvalue()


def check_drawing(
    output_dir: Any = None, show: Any = None, formats: Any = ("png",), per_prompt: Any = None, by: Any = None
) -> tuple[str, ...]:
    """The names of the formats that results are to be drawn in; everything else that was given is checked.

    Raises:
        InputError: what can't be meant; the message says what can.
    """
    if output_dir is not None:
        check_path(output_dir, "figures")
    for name, value in (("show", show), ("per_prompt", per_prompt)):
        if not (value is None or isinstance(value, bool)):
            raise InputError(f"{name}={value!r}: write True or False, or leave it out.")
    if not (by is None or isinstance(by, str)):
        raise InputError(f"by={by!r}: name one of the prompts' metadata, by='category'.")
    return check_formats(formats)


def check_formats(formats: str | Sequence[str], known: Sequence[str] = (*FORMATS, PAGE)) -> tuple[str, ...]:
    """Names of formats, with or without their dot.

    Raises:
        InputError: one is unknown, or there are none.
    """
    try:
        given = [formats] if isinstance(formats, str) else list(formats)
    except TypeError:
        raise InputError(f"formats={formats!r}: name one or several of {', '.join(known)}.") from None
    names = tuple(dict.fromkeys(str(name).lower().lstrip(".") for name in given))
    for name, written in zip(names, dict.fromkeys(given), strict=False):
        if name not in known:
            raise InputError(f"Unknown format {written!r}.{nearest(name, known)} Known: {', '.join(known)}.")
    if not names:
        raise InputError(f"formats is empty. Known: {', '.join(known)}.")
    return names
