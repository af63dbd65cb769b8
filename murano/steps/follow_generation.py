"""FollowGeneration: what each layer predicts at every token that the model writes, as a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from murano import keys
from murano.errors import InputError, nearest
from murano.results import Results
from murano.steps.base import Step


class FollowGeneration(Step):
    """Reads ``keys.PROMPTS``, writes ``keys.GENERATION_LENS``; the work is done by :func:`murano.follow_generation`.

    Args:
        model: a :class:`~murano.MuranoModel`.
        max_new_tokens: how many tokens each prompt is continued by at most.
        layers: which layers, as in :class:`~murano.steps.LogitLens`.
        top_k: how many tokens to keep of each distribution.
        temperature: what logits are divided by before a token is drawn; 0 always takes the most probable one.
        top_p: only the most probable tokens that together have this probability may be drawn.
        seed: of the draws.
        stop: a text, or several, after which a prompt is not continued.
        include_prompt: read the prompts themselves too, as ``LogitLens`` does, into ``prompt_lens``.
        options: further arguments of :func:`murano.follow_generation`: ``max_chunk_bytes``, ``max_batch_tokens``, ``product``.

    Raises:
        InputError: an argument that can't be right, before the model's weights load wherever they are not needed to know it.
    """

    reads = (keys.PROMPTS,)
    writes = (keys.GENERATION_LENS,)

    def __init__(
        self,
        model: Any,
        max_new_tokens: int,
        layers: Any = "all",
        top_k: int = 5,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Any = None,
        include_prompt: bool = False,
        **options: Any,
    ) -> None:
        from murano.model.sampling import Sampling
        from murano.readout import request

        request.check_model(model, "FollowGeneration")
        allowed = ("max_chunk_bytes", "max_batch_tokens", "product")
        for name in options:
            if name not in allowed:
                raise InputError(
                    f"FollowGeneration takes no {name!r}.{nearest(name, allowed)} Further options: {', '.join(allowed)}."
                )
        self.model, self.max_new_tokens, self.layers, self.top_k = model, max_new_tokens, layers, top_k
        self.temperature, self.top_p, self.seed, self.stop = temperature, top_p, seed, stop
        self.include_prompt, self.options = include_prompt, options
        Sampling.of(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        request.check_top_k(top_k)
        request.check_options(**options)
        model.check_layers(request.parse_layers(layers))

    def run(self, results: Results) -> Mapping[str, Any]:
        from murano.generation import follow_generation

        lens = follow_generation(
            self.model,
            results[keys.PROMPTS],
            max_new_tokens=self.max_new_tokens,
            layers=self.layers,
            top_k=self.top_k,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            include_prompt=self.include_prompt,
            **self.options,
        )
        return {keys.GENERATION_LENS: lens}

    def describe(self) -> str:
        how = (
            "the most probable token"
            if self.temperature == 0
            else f"temperature {self.temperature}, top_p {self.top_p}"
        )
        return f"{self.model.model_id}: up to {self.max_new_tokens} tokens by {how}; layers {self.layers!r}, top {self.top_k}"
