"""Makes ``tests/data/figures``: one small image of every kind of figure, to which later ones are compared.

Run it again when a figure is meant to look different, and look at what it has drawn: ``python tests/data/make_figures.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.lenses import make_generation, make_lens
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

from murano.address import Address
from murano.artifacts.logit_attribution import LogitAttributionResult
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.metric_table import MetricTable
from murano.attribution import logit_attribution
from murano.model import MuranoModel
from murano.plotting.attribution import waterfall
from murano.plotting.attribution_grid import attribution_grid
from murano.plotting.difference import difference_grid
from murano.plotting.files import figure_bytes
from murano.plotting.generation import agreement_curve, generation_grid
from murano.plotting.lens import lens_grid
from murano.plotting.metrics import decided_curves, metric_curves
from murano.plotting.overview import overview_grid
from murano.plotting.trajectories import trajectory_curves
from murano.prompts import Prompt, PromptBatch

FOLDER = Path(__file__).parent / "figures"
DPI = 72


def _lens(seed: int = 0, **options: int) -> LogitLensResult:
    return make_lens(layers=8, seed=seed, **options)


def _attribution(by: str = "component") -> LogitAttributionResult:
    model = MuranoModel(tiny_model("llama"), tokenizer=tiny_tokenizer())
    return logit_attribution(model, ["The capital of France is"], targets=["Paris"], foils=["London"], by=by)


def _prompts(n: int) -> PromptBatch:
    return PromptBatch([Prompt(text=f"p{i}", metadata={"kind": ("odd", "even", "$both$")[i % 3]}) for i in range(n)])


def _table() -> MetricTable:
    values = torch.sigmoid(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8) - 5)
    addresses = tuple(Address(layer) for layer in range(8))
    columns = tuple(map(str, addresses))
    about = {"name": "token_prob", "unit": "probability", "model": {"n_layers": 8}}
    return MetricTable(values=values, columns=columns, addresses=addresses, prompts=_prompts(30), **about)


def _depths() -> MetricTable:
    values = torch.randint(2, 8, (30, 1), generator=torch.Generator().manual_seed(0)).float()
    about = {"name": "prediction_depth", "unit": "layer", "how": "first layer", "model": {"n_layers": 8}}
    return MetricTable(values=values, columns=("depth",), prompts=_prompts(30), **about)


FIGURES: dict[str, Callable[[], Axes]] = {
    "lens": lambda: lens_grid(_lens(positions=8)).draw(bare=True),
    "lens_folded": lambda: lens_grid(_lens(positions=60), max_columns=16).draw(bare=True),
    "lens_window": lambda: lens_grid(_lens(positions=60), positions=slice(20, 32), layers=[0, 3, 7]).draw(bare=True),
    "lens_wide": lambda: lens_grid(_lens(positions=100), value="entropy", max_columns=100).draw(bare=True),
    "difference": lambda: difference_grid(_lens(positions=8), _lens(positions=8, seed=1), names=("base", "tuned")).draw(
        bare=True
    ),
    "trajectories": lambda: trajectory_curves(_lens(positions=8, k=4)).draw(bare=True),
    "generation": lambda: generation_grid(make_generation()).draw(bare=True),
    "agreement": lambda: agreement_curve(make_generation(prompts=5)).draw(bare=True),
    "attribution": lambda: waterfall(_attribution(), 0).draw(bare=True),
    "attribution_grid": lambda: attribution_grid(_attribution(by="head")).draw(bare=True),
    "overview": lambda: overview_grid(_lens(positions=3, prompts=12)).draw(bare=True),
    "metric": lambda: metric_curves(_table(), by="kind").draw(bare=True),
    "decided": lambda: decided_curves(_depths()).draw(bare=True),
    "overview_many": lambda: overview_grid(_lens(positions=2, prompts=200)).draw(bare=True),
}


def image(name: str) -> bytes:
    """A figure as a PNG, in the style that matplotlib comes with, whatever the machine's own is."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        return figure_bytes(FIGURES[name](), "png", DPI)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for figure in FIGURES:
        (FOLDER / f"{figure}.png").write_bytes(image(figure))
        print(FOLDER / f"{figure}.png")
