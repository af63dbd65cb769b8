"""LogitAttribution: what wrote the final logit of each answer, as a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from murano import keys
from murano.errors import InputError
from murano.results import Results
from murano.steps.base import Step


class LogitAttribution(Step):
    """Reads ``keys.PROMPTS``, writes ``keys.LOGIT_ATTRIBUTION``; the work is done by :func:`murano.attribution.logit_attribution`.

    Args:
        model: a :class:`~murano.MuranoModel`.
        targets: the answer of each prompt; without them those that the prompts carry.
        foils: what each target is compared with.
        by: how finely a logit is split: ``"layer"``, ``"component"``, ``"head"`` or ``"neuron_topk"``.
        positions: ``"last"``, ``"all"``, or token indices; negative ones count from each prompt's end.
        neurons: how many are kept with ``by="neuron_topk"``.
        max_batch_tokens: tokens of one forward; the function's own by default.

    Raises:
        InputError: an argument that can't be right, before the model's weights load.
    """

    reads = (keys.PROMPTS,)
    writes = (keys.LOGIT_ATTRIBUTION,)

    def __init__(
        self,
        model: Any,
        targets: Any = None,
        foils: Any = None,
        by: str = "component",
        positions: Any = "last",
        *,
        neurons: int = 20,
        max_batch_tokens: int | None = None,
    ) -> None:
        from murano.readout.request import check_attribution, check_model

        check_model(model, "LogitAttribution")
        check_attribution(by, positions, neurons)
        model.require_weights("LogitAttribution")
        self.model, self.targets, self.foils = model, targets, foils
        self.by, self.positions, self.neurons, self.max_batch_tokens = by, positions, neurons, max_batch_tokens

    def check_ahead(self, results: Results, between: Sequence[Step]) -> None:
        settled = keys.PROMPTS in results and not any(keys.PROMPTS in step.writes for step in between)
        if self.targets is None and settled and not any(prompt.targets for prompt in results[keys.PROMPTS]):
            raise InputError(
                "it needs a target, and no prompt has one. Give one to each: LoadPrompts(prompts, targets=[…]) or "
                "LogitAttribution(model, targets=[…])."
            )

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.attribution import logit_attribution

        options = {} if self.max_batch_tokens is None else {"max_batch_tokens": self.max_batch_tokens}
        found = logit_attribution(
            self.model,
            results[keys.PROMPTS],
            targets=self.targets,
            foils=self.foils,
            by=self.by,
            positions=self.positions,
            neurons=self.neurons,
            **options,
        )
        return {keys.LOGIT_ATTRIBUTION: found}

    def describe(self) -> str:
        return f"{self.model.model_id}: by {self.by}, positions {self.positions!r}"
