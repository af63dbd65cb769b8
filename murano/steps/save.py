"""Save: write all results into a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from murano import keys
from murano.artifacts.folder import check_writable
from murano.artifacts.run import save_run
from murano.artifacts.run_save import check_run_name
from murano.keys import Key
from murano.results import Results
from murano.steps.base import Step


class Save(Step):
    """Write all results so far into ``<output_dir>/<run_name>``; :func:`murano.load_run` opens them again.

    The folder is complete or not there: a run of the same name is replaced when the new one is whole. See
    :func:`murano.artifacts.run.save_run`, which this step calls.

    Args:
        output_dir: the folder of runs.
        run_name: the run's folder in it; without one, the first result's name with date and time.
        model_id: the model's name, when the artifacts do not say it.
    """

    reads: Sequence[Key[Any]] = ()
    writes: Sequence[Key[Any]] = (keys.OUTPUT_DIR,)
    resumable = False
    takes_all = "saved"

    def __init__(
        self,
        output_dir: str | os.PathLike[str] = "murano_outputs",
        run_name: str | None = None,
        model_id: str | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.run_name = run_name
        self.model_id = model_id

    def check(self) -> None:
        check_writable(self.output_dir)
        if self.run_name is not None:
            check_run_name(self.run_name)

    def run(self, results: Results) -> Mapping[str, Any]:
        return {keys.OUTPUT_DIR: str(save_run(results, self.output_dir, self.run_name, model_id=self.model_id))}

    def describe(self) -> str:
        return f"writes the run {os.fspath(self.output_dir)}/{self.run_name or '<result>_<date>_<time>'}"
