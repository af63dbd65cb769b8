"""TokenProb, Match, LogitDiff, Rank, PredictionDepth, Commitment: metrics of a lens, as steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from murano import keys
from murano.keys import Key
from murano.results import Results
from murano.steps.base import Step


class MetricStep(Step):
    """Reads ``keys.LOGIT_LENS`` and writes one metric of it, a :class:`~murano.artifacts.metric_table.MetricTable`.

    Args:
        options: of the function of the same name in :mod:`murano.metrics`: ``position``, say.
    """

    metric: ClassVar[str]
    reads = (keys.LOGIT_LENS,)

    def __init__(self, **options: Any) -> None:
        import inspect

        from murano.errors import InputError, nearest
        from murano.metrics import METRICS

        known = list(inspect.signature(METRICS[self.metric]).parameters)[1:]
        for name in options:
            if name not in known:
                raise InputError(
                    f"{type(self).__name__} takes no {name!r}.{nearest(name, known)} It takes: {', '.join(known)}."
                )
        self.options = options

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.metrics import METRICS

        return {self.metric: METRICS[self.metric](results[keys.LOGIT_LENS], **self.options)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


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
