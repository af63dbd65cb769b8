"""LogitLens: what each layer predicts, as a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from murano import keys
from murano.errors import InputError, nearest
from murano.results import Results
from murano.steps.base import Step


class LogitLens(Step):
    """Reads ``keys.PROMPTS``, writes ``keys.LOGIT_LENS``; the work is done by :func:`murano.lens.logit_lens`.

    Args:
        model: a :class:`~murano.MuranoModel`.
        layers: ``"all"``, ``"last"``, an int, a range or slice, an address or a list of these, in the order wanted; negative ints
            count from the last layer, ``"embeddings"`` is the row before block 0. A string may hold several: ``"embeddings,0-5"``.
        positions: ``"all"``, ``"last"``, or token indices, ``"0-2"`` and ``"-3:"`` too; negative ones count from each prompt's end.
        top_k: how many tokens to keep of each distribution.
        stats: further statistics of each cell: ``"max_prob"``, ``"margin"``, ``"kl"``, ``"js"``, ``"surprisal"``, ``"next_rank"``.
        target_mode: how targets of several tokens are read: ``"first"``, ``"single"`` or ``"sequence"``.
        keep: ``"residuals"`` keeps the residuals too, ``"logits"`` all logits, if they fit into memory.
        options: further arguments of :func:`murano.lens.logit_lens`: ``max_chunk_bytes``, ``max_batch_tokens``, ``on_error``,
            ``product``, ``apart``.

    Raises:
        InputError: an argument that can't be right, before the model's weights load wherever they are not needed to know it.
    """

    reads = (keys.PROMPTS,)
    writes = (keys.LOGIT_LENS,)

    def __init__(
        self,
        model: Any,
        layers: Any = "all",
        positions: Any = "all",
        top_k: int = 5,
        *,
        stats: Any = (),
        target_mode: str = "first",
        keep: str | None = None,
        **options: Any,
    ) -> None:
        from murano.readout import request
        from murano.readout.stats import parse_stats

        request.check_model(model, "LogitLens")
        allowed = ("max_chunk_bytes", "max_batch_tokens", "on_error", "product", "apart")
        for name in options:
            if name not in allowed:
                named = ("layers", "positions", "top_k", "stats", "target_mode", "keep", *allowed)
                raise InputError(
                    f"LogitLens takes no {name!r}.{nearest(name, named)} Further options: {', '.join(allowed)}."
                )
        request.check_options(keep=keep, **options)
        self.model, self.layers, self.positions, self.keep = model, layers, positions, keep
        self.top_k = request.check_top_k(top_k)
        self.stats, self.target_mode = parse_stats(stats), target_mode
        self.options = options
        request.parse_positions(positions)
        model.check_layers(request.parse_layers(layers))

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.lens import logit_lens

        lens = logit_lens(
            self.model,
            results[keys.PROMPTS],
            layers=self.layers,
            positions=self.positions,
            top_k=self.top_k,
            stats=self.stats,
            target_mode=self.target_mode,
            keep=self.keep,
            checkpoint=results.checkpoint,
            **self.options,
        )
        return {keys.LOGIT_LENS: lens}

    def describe(self) -> str:
        more = f", {', '.join(self.stats)}" if self.stats else ""
        return f"{self.model.model_id}: layers {self.layers!r}, positions {self.positions!r}, top {self.top_k}{more}"
