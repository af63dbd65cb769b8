"""Every kind of figure, compared with the image of it that is kept in ``tests/data/figures``."""

from __future__ import annotations

import io

import numpy as np
import pytest
from data.make_figures import FIGURES, FOLDER, image
from PIL import Image

#: Root of the mean squared difference, of 255, at half the resolution: other releases of matplotlib and FreeType smooth
#: the edges of letters a little differently; a token, a shade or a line that is another exceeds it.
TOLERANCE = 6.0


def difference(one: Image.Image, other: Image.Image) -> float:
    """Between two images as large as each other, to two pixels; the smaller size of both is compared."""
    (width, height), size = one.size, other.size
    assert abs(width - size[0]) <= 2 and abs(height - size[1]) <= 2, f"the figure is {one.size}, not {size}"
    width, height = min(width, size[0]), min(height, size[1])
    small = [np.asarray(i.convert("RGB").crop((0, 0, width, height)).reduce(2), dtype=float) for i in (one, other)]
    return float(np.sqrt(np.mean((small[0] - small[1]) ** 2)))


def kept(name: str) -> Image.Image:
    return Image.open(FOLDER / f"{name}.png")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_looks_as_it_did(name: str) -> None:
    assert difference(Image.open(io.BytesIO(image(name))), kept(name)) < TOLERANCE


def test_the_comparison_would_tell() -> None:
    """A figure with one other row of tokens and shades is no longer the same."""
    whole = kept("lens")
    width, height = whole.size
    changed = whole.copy()
    strip = whole.crop((0, height // 2, width, height // 2 + 14))
    changed.paste(strip, (0, height // 2 - 28))
    assert difference(whole, changed) > TOLERANCE
    assert difference(whole, whole) == 0


def test_there_is_an_image_of_every_figure_and_none_of_another() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(FIGURES)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 600_000
