"""Running a model a token at a time: from the cache that it returns itself, where that is shown to change nothing.

A batch holds prompts of one length, so that there is no padding and no mask, and no position that could be counted wrong. Where a rope
turns to other factors as the text grows (see :mod:`murano.model.rope`), the keys in the cache are of no use any more: all tokens run again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from murano.address import Address
from murano.model import residuals
from murano.model.anatomy import BATCH, POSITIONS, Anatomy, probe_ids, run
from murano.model.proof import another_shape, difference
from murano.model.rope import turning_lengths
from murano.model.watch import at_rest, logits_of

#: What families call what they remember of the tokens so far, in the forward's arguments and in what it returns.
CACHES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(frozen=True)
class CacheProof:
    """Whether a model can go on from its cache, and how that was shown.

    Args:
        name: of the argument that takes the cache; ``None`` where every step has to run all tokens again.
        first: makes the cache that the first forward is given; ``None`` where the model makes one itself.
        difference: the largest absolute difference of a logit between steps from the cache and one forward of all tokens.
        reason: why there is no cache to go on from.
    """

    name: str | None
    first: Callable[[], Any] | None = None
    difference: float = 0.0
    reason: str = ""


class Stepper:
    """One batch of prompts of one length, continued a token at a time.

    Args:
        anatomy: the model and its blocks.
        cache: what it goes on from; one without a name runs all tokens again at each step.
    """

    def __init__(self, anatomy: Anatomy, cache: CacheProof) -> None:
        self.anatomy, self.name = anatomy, cache.name
        self._first = cache.first
        self._cache: Any = None
        self._ids: Tensor | None = None
        self._turns = turning_lengths(getattr(anatomy.model, "config", None))

    def step(
        self,
        new: Int[Tensor, "batch position"],
        wanted: Collection[Address] = (),
        *,
        ending: residuals.Ending = "full",
        mid: Mapping[int, tuple[nn.Module, Any]] | None = None,
    ) -> tuple[Float[Tensor, "batch vocab"], dict[Address, Float[Tensor, "batch d_model"]]]:
        """Append tokens and predict the next one.

        Args:
            new: the prompts at first, then one token each.
            wanted: at which addresses the stream is read.
            ending: as in :func:`murano.model.residuals.forward`.
            mid: as there.

        Returns:
            The model's own logits of the token that follows, and the rows of the stream that it is predicted from.
        """
        before = 0 if self._ids is None else self._ids.shape[1]
        self._ids = new if self._ids is None else torch.cat([self._ids, new], dim=1)
        turned = any(before <= length < self._ids.shape[1] for length in self._turns)
        if self.name is None or before == 0 or turned:
            new = self._ids
            self._cache = self._first() if self._first is not None else None
        rows: dict[Address, Tensor] = {}

        def take(address: Address, stream: Float[Tensor, "batch position d_model"]) -> None:
            rows[address] = stream[:, -1]

        logits = residuals.forward(self.anatomy, new, wanted, take, ending=ending, mid=mid, call=self._call)
        assert logits is not None
        return logits[:, -1], rows

    def keep(self, rows: Int[Tensor, " row"]) -> bool:
        """Go on with these prompts alone, where the cache can let go of the others.

        Returns:
            Whether the others are gone.
        """
        assert self._ids is not None
        if self.name is not None:
            layers = getattr(self._cache, "layers", None)
            if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
                return False
            self._cache.batch_select_indices(rows)
        self._ids = self._ids[rows.to(self._ids.device)]
        return True

    def _call(self, model: nn.Module, ids: Int[Tensor, "batch position"], **options: Any) -> Any:
        if self.name is None:
            return run(model, ids, **options)
        if self._cache is not None:
            options[self.name] = self._cache
        output = run(model, ids, use_cache=True, **options)
        returned = getattr(output, self.name, None)
        self._cache = self._cache if returned is None else returned
        return output


@torch.no_grad()
def prove_cache(anatomy: Anatomy) -> CacheProof:
    """Find the cache, and hold steps from it against one forward of all tokens.

    Two batches take turns, so that what a module remembers of the last forward, outside of the cache, is always of the other one; and
    prompts of one token are among them, for some modules forget at the start of a longer one alone.

    Args:
        anatomy: a model and its blocks.
    """
    model = anatomy.model
    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in CACHES if name in accepted), None)
    if name is None:
        return CacheProof(None, reason="its forward takes none")
    batches = [probe_ids(model, anatomy.embedding_rows, BATCH, POSITIONS, seed=seed) for seed in (6, 7)]
    with at_rest(model):
        whole = torch.stack([_all_logits(model, ids) for ids in batches])
    tried: list[CacheProof] = []
    # Some families return nothing unless they are given a cache to fill, as generate does.
    config = getattr(model, "config", None)
    for first in (None, partial(DynamicCache, config=config), DynamicCache):
        found = CacheProof(name, first)
        try:
            gap = max(
                difference(_in_turns(anatomy, found, batches, prompt), whole[..., prompt - 1 :, :])
                for prompt in (POSITIONS // 2, 1)
            )
        except Exception as error:  # the family's own code may refuse these arguments in any way it likes
            tried.append(CacheProof(None, reason=f"{type(error).__name__}: {error}"))
            continue
        if gap <= another_shape(whole):
            return CacheProof(name, first, gap)
        tried.append(CacheProof(None, difference=gap, reason=f"going on from it changes a logit by {gap:.3g}"))
    return tried[0]


def _all_logits(model: nn.Module, ids: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
    logits = logits_of(run(model, ids))
    assert logits is not None
    return logits


def _in_turns(
    anatomy: Anatomy, cache: CacheProof, batches: list[Tensor], prompt: int
) -> Float[Tensor, "turn batch step vocab"]:
    """Logits of batches that go on from ``prompt`` tokens, each of them one step before any makes the next."""
    steppers = [Stepper(anatomy, cache) for _ in batches]
    ends = range(prompt, batches[0].shape[1] + 1)
    steps = [
        torch.stack(
            [
                stepper.step(ids[:, :end] if end == prompt else ids[:, end - 1 : end])[0]
                for stepper, ids in zip(steppers, batches, strict=True)
            ]
        )
        for end in ends
    ]
    return torch.stack(steps, dim=2)
