"""TokenProb, Match, LogitDiff, Rank, PredictionDepth, Commitment: metrics of a lens, as steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from murano import keys
from murano.errors import InputError
from murano.keys import Key
from murano.results import Results
from murano.steps.base import Step


class MetricStep(Step):
    """Reads ``keys.LOGIT_LENS`` and writes one metric of it, a :class:`~murano.artifacts.metric_table.MetricTable`.

    Args:
        key: the name to write it under, where one metric is wanted twice: ``TokenProb(of="foil", key="foil_prob")``.
        options: of the function of the same name in :mod:`murano.metrics`: ``position``, say.
    """

    metric: ClassVar[str]
    reads = (keys.LOGIT_LENS,)

    def __init__(self, *, key: str | None = None, **options: Any) -> None:
        from murano.metrics import check_options

        check_options(self.metric, options)
        self.key, self.options = key, options
        if key is not None:
            self.writes = (Key(key, self.writes[0].type_path, written_by=type(self).__name__),)

    def check_ahead(self, results: Results, between: Sequence[Step]) -> None:
        from murano.metrics import check_layers, check_position, needs
        from murano.readout.request import parse_layers, parse_positions
        from murano.steps.logit_lens import LogitLens

        lens = next((step for step in reversed(between) if keys.LOGIT_LENS in step.writes), None)
        # A lens that is there, or that another step makes, may have got its answers elsewhere.
        if not isinstance(lens, LogitLens):
            return
        n_layers = lens.model.config_layers
        if n_layers is not None:
            check_layers(self.metric, parse_layers(lens.layers, n_layers), n_layers)
        positions = parse_positions(lens.positions)
        if positions is not None:
            check_position(self.options.get("position", -1), positions)
        if keys.PROMPTS not in results:
            return
        if any(keys.PROMPTS in step.writes for step in between):
            return
        for answer in needs(self.metric, self.options):
            if not any(getattr(prompt, f"{answer}s") for prompt in results[keys.PROMPTS]):
                raise InputError(
                    f"it needs a {answer}, and no prompt has one. Give one to each: LoadPrompts(prompts, {answer}s=[…]), before "
                    "LogitLens reads them."
                )

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.metrics import METRICS

        return {self.writes[0]: METRICS[self.metric](results[keys.LOGIT_LENS], **self.options)}

    def __repr__(self) -> str:
        named = {} if self.key is None else {"key": self.key}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in {**named, **self.options}.items())})"


class TokenProb(MetricStep):
    """The probability of each prompt's target at each layer: :func:`murano.metrics.token_prob`."""

    metric = "token_prob"
    writes: tuple[Key[Any], ...] = (keys.TOKEN_PROB,)


class Match(MetricStep):
    """Whether each layer's first choice is the target: :func:`murano.metrics.match`."""

    metric = "match"
    writes: tuple[Key[Any], ...] = (keys.MATCH,)


class LogitDiff(MetricStep):
    """The target's logit less the foil's: :func:`murano.metrics.logit_diff`."""

    metric = "logit_diff"
    writes: tuple[Key[Any], ...] = (keys.LOGIT_DIFF,)


class Rank(MetricStep):
    """How many tokens each layer finds more probable than the target: :func:`murano.metrics.rank`."""

    metric = "rank"
    writes: tuple[Key[Any], ...] = (keys.RANK,)


class PredictionDepth(MetricStep):
    """The first layer from which the first choice stays: :func:`murano.metrics.prediction_depth`."""

    metric = "prediction_depth"
    writes: tuple[Key[Any], ...] = (keys.PREDICTION_DEPTH,)


class Commitment(MetricStep):
    """When the target's probability passes a threshold, and how suddenly: :func:`murano.metrics.commitment`."""

    metric = "commitment"
    writes: tuple[Key[Any], ...] = (keys.COMMITMENT,)
