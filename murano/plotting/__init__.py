"""Figures of what a lens has read, imported when they are first used; they need the extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from murano._lazy import lazy_exports

if TYPE_CHECKING:
    from murano.plotting.attribution import plot_attribution as plot_attribution
    from murano.plotting.attribution_grid import plot_attribution_grid as plot_attribution_grid
    from murano.plotting.difference import plot_difference as plot_difference
    from murano.plotting.files import save_figure as save_figure
    from murano.plotting.generation import plot_agreement as plot_agreement
    from murano.plotting.generation import plot_generation as plot_generation
    from murano.plotting.lens import plot_lens as plot_lens
    from murano.plotting.metrics import plot_decided as plot_decided
    from murano.plotting.metrics import plot_metric as plot_metric
    from murano.plotting.overview import plot_overview as plot_overview
    from murano.plotting.page import lens_page as lens_page
    from murano.plotting.results import draw_results as draw_results
    from murano.plotting.trajectories import plot_trajectories as plot_trajectories
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "murano.plotting.attribution": ["plot_attribution"],
            "murano.plotting.attribution_grid": ["plot_attribution_grid"],
            "murano.plotting.difference": ["plot_difference"],
            "murano.plotting.files": ["save_figure"],
            "murano.plotting.generation": ["plot_agreement", "plot_generation"],
            "murano.plotting.lens": ["plot_lens"],
            "murano.plotting.metrics": ["plot_decided", "plot_metric"],
            "murano.plotting.overview": ["plot_overview"],
            "murano.plotting.page": ["lens_page"],
            "murano.plotting.results": ["draw_results"],
            "murano.plotting.trajectories": ["plot_trajectories"],
        },
    )
