"""Makes the images of docs/plots.md from the bundled model: ``python docs/images/make.py`` (needs the extra ``dev``)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.browser import find_browser

from murano import MuranoModel
from murano.lens import logit_lens
from murano.plotting import lens_page
from murano.plotting.difference import difference_grid
from murano.plotting.files import figure_bytes
from murano.plotting.lens import lens_grid
from murano.plotting.overview import overview_grid
from murano.plotting.trajectories import trajectory_curves

HERE = Path(__file__).parent
EIFFEL = "The Eiffel Tower is in the city of"
CAPITALS = [
    f"The capital of {name} is" for name in ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Cuba")
]
TOP = list(range(14, 30))
DPI = 100

if __name__ == "__main__":
    model = MuranoModel(dtype=torch.float32)
    lens = logit_lens(model, [EIFFEL, *CAPITALS], top_k=10)
    rounded = logit_lens(MuranoModel(dtype=torch.bfloat16), [EIFFEL])
    figures = {
        "lens": lens_grid(lens, layers=TOP),
        "difference": difference_grid(logit_lens(model, [EIFFEL]), rounded, layers=TOP, names=("float32", "bfloat16")),
        "trajectories": trajectory_curves(lens, layers=TOP),
        "overview": overview_grid(lens, layers=TOP),
    }
    for name, figure in figures.items():
        (HERE / f"{name}.png").write_bytes(figure_bytes(figure.draw(bare=True), "png", DPI))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "lens.html"
        lens_page(lens, file)
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for name, options in {
            "page": {"viewport": {"width": 1200, "height": 760}},
            "page_dark": {"viewport": {"width": 1200, "height": 760}, "color_scheme": "dark"},
            "page_phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
        }.items():
            page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
            page.goto(file.as_uri())
            page.fill("#search", "Paris")
            page.screenshot(path=HERE / f"{name}.png")
        browser.close()
