"""Plot: draw everything in the results that has a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from murano import keys
from murano.artifacts.folder import check_writable
from murano.keys import Key, as_key
from murano.results import Results
from murano.steps.base import Step


class Plot(Step):
    """Draw all results so far that have a figure, save them and show them in a notebook.

    See :func:`murano.plotting.draw_results`, which this step calls.

    Args:
        output_dir: the folder to save into; without it nothing is saved.
        show: whether a notebook shows the figures; ``None``: if it is one.
        formats: the formats to save in: ``"png"``, ``"svg"``, ``"pdf"``, and ``"html"``, one page to explore all prompts of a lens.
        per_prompt: a heatmap for each prompt, or one overview of all; ``None``: heatmaps for up to 8 prompts.
        by: a name in the prompts' metadata: metrics get a line for each group.
    """

    reads: Sequence[Key[Any]] = ()
    writes: Sequence[Key[Any]] = (keys.PLOTS,)
    resumable = False
    takes_all = "drawn"

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        show: bool | None = None,
        formats: str | Sequence[str] = ("png",),
        per_prompt: bool | None = None,
        by: str | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.show = show
        self.formats = formats
        self.per_prompt = per_prompt
        self.by = by

    def check(self) -> None:
        from murano.plotting.files import check_drawing  # here: it needs matplotlib

        check_drawing(self.output_dir, self.show, self.formats, self.per_prompt, self.by)
        if self.output_dir is not None:
            check_writable(self.output_dir)

    def takes(self, key: Key[Any]) -> bool:
        return key.type_path.startswith("murano.artifacts.")  # the prompts, and what other steps write, have no figure

    def check_ahead(self, results: Results, between: Sequence[Step]) -> None:
        from murano.artifacts.metric_table import MetricTable, check_group

        tables = [*results, *(key for step in between for key in step.writes)]
        if (
            self.by is not None
            and keys.PROMPTS in results
            and not any(keys.PROMPTS in step.writes for step in between)
            and any(as_key(key).type_name == MetricTable.__name__ for key in tables)
        ):
            check_group(self.by, results[keys.PROMPTS])

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.plotting.results import draw_results

        return {keys.PLOTS: draw_results(results, self.output_dir, self.show, self.formats, self.per_prompt, self.by)}

    def describe(self) -> str:
        return "shows figures" if self.output_dir is None else f"writes figures into {os.fspath(self.output_dir)}"
