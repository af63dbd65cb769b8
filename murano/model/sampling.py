"""Choosing the next token from a model's own logits: how transformers' ``generate`` does it, with a generator for each prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.errors import InputError

#: Seeds are whole numbers below this.
SEEDS = 2**32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a model writes.

    Args:
        max_new_tokens: how many tokens each prompt is continued by at most.
        temperature: what logits are divided by; 0 always takes the most probable token.
        top_p: only the most probable tokens that together have this probability may be drawn.
        seed: of the first prompt's generator, the next prompt has the next seed; ``None`` draws one.
        stop: texts after which a prompt is not continued.

    Raises:
        InputError: one of them can't be used.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = self.max_new_tokens
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"max_new_tokens={n!r}: it must be a whole number from 1 upwards.")
        if not _number(self.temperature) or self.temperature < 0:
            raise InputError(
                f"temperature={self.temperature!r}: it must be a number from 0, which always takes the most probable token, upwards."
            )
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p!r}: it must be a probability above 0, and 1 for all tokens.")
        if self.temperature == 0 and self.top_p != 1:
            raise InputError(f"top_p={self.top_p!r} draws nothing at temperature 0: give a temperature above 0 too.")
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS):
            raise InputError(f"seed={seed!r}: it must be a whole number from 0 to {SEEDS - 1}.")
        if self.temperature == 0 and seed is not None:
            raise InputError(
                f"seed={seed!r} draws nothing at temperature 0: give a temperature above 0 too, or no seed."
            )

    @classmethod
    def of(cls, *, stop: Any = None, **settings: Any) -> Sampling:
        """The settings, with ``stop`` a text, several, or ``None``."""
        texts = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
            raise InputError(f"stop={stop!r}: it must be a text that ends a continuation, or a list of such texts.")
        return cls(stop=tuple(texts), **settings)


class Sampler:
    """Draws tokens, with a generator of its own for each prompt: what one draws does not depend on the others.

    Args:
        sampling: the settings.
        prompts: how many prompts there are.
        device: where the logits are.
    """

    def __init__(self, sampling: Sampling, prompts: int, device: torch.device) -> None:
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        #: What the first prompt was drawn with; ``None`` where nothing is drawn.
        self.seed: int | None = None
        self._generators: list[torch.Generator] = []
        self._warpers: list[Any] = []
        if sampling.temperature > 0:
            self.seed = sampling.seed if sampling.seed is not None else int(torch.randint(2**31, ()))
            self._generators = [torch.Generator(device).manual_seed(self.seed + i) for i in range(prompts)]
            # transformers' own, so that its tokens come out to the last one.
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: Float[Tensor, "row vocab"], prompts: Sequence[int]) -> Int[Tensor, " row"]:
        """The next token of these prompts.

        Args:
            logits: the model's own.
            prompts: which prompt each row is of.
        """
        if not self._generators:
            return logits.argmax(dim=-1)
        scores = logits.float()
        for warp in self._warpers:
            scores = warp(None, scores)
        rows = zip(scores.softmax(dim=-1), prompts, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=self._generators[prompt]) for row, prompt in rows])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
