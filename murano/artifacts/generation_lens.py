"""GenerationLensResult: what each layer predicts at every token that a model writes."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts import lookup
from murano.artifacts.lens_column import LensColumn
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.words import TokenWords, WordGrid
from murano.errors import InputError
from murano.prompts import PromptBatch

#: Why a prompt was not continued any further.
FINISHED = {
    "end": "the model ended its text",
    "stop": "a stop text came",
    "length": "max_new_tokens was reached",
}
#: So many layers, prompts and steps are printed.
SHOWN_LAYERS, SHOWN_PROMPTS, SHOWN_STEPS = 6, 8, 16


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GenerationLensResult:
    """The logit lens of a generation: CPU tensors and plain values, complete without the model.

    A step is one token that a prompt is continued by. Its cells are read from the row that the model predicts that token from: the
    prompt's last token at step 0, then the token of the step before. After a prompt has ended its cells hold NaN, id -1 and rank -1.

    Args:
        addresses: what was read, one per layer, in the order asked for.
        top_ids: the ids of the most probable tokens, best first.
        top_probs: their probabilities, in float32, at temperature 1 whatever was sampled at.
        entropy: of the whole distribution, in nats.
        log_normalizer: ``logsumexp`` of the logits.
        sampled_ids: the token that the model went on with; -1 after a prompt's end.
        sampled_log_probs: the log-probability that each layer gives to it, in nats.
        sampled_ranks: how many tokens each layer finds more probable.
        own_log_probs: the log-probability that the model itself gives to it.
        input_ids: the prompts' tokens, aligned at their ends; -1 where there is none.
        texts: what was written, special tokens left out.
        finished: why each prompt ended: ``"end"``, ``"stop"`` or ``"length"``.
        words: the text of every id that occurs.
        settings: ``max_new_tokens``, ``temperature``, ``top_p``, ``seed`` (of the first prompt, the next has the next one), ``stop``.
        cache: the name of the cache that steps went on from; ``None`` where each ran all tokens again.
        prompt_lens: the lens of the prompts themselves, where it was asked for.
        model: what was read, as in :class:`~murano.LogitLensResult`.
        readout: the proof that this readout is the model's own.
        prompts: what was continued, with targets and metadata.
        notes: what was odd about the run, in words.
        extra: what another version of this artifact saved and this one does not know; saved again with the rest.
    """

    SCHEMA: ClassVar[str] = "generation_lens"
    SCHEMA_VERSION: ClassVar[int] = 1

    addresses: tuple[Address, ...]
    top_ids: Int[Tensor, "layer prompt step k"]
    top_probs: Float[Tensor, "layer prompt step k"]
    entropy: Float[Tensor, "layer prompt step"]
    log_normalizer: Float[Tensor, "layer prompt step"]
    sampled_ids: Int[Tensor, "prompt step"]
    sampled_log_probs: Float[Tensor, "layer prompt step"]
    sampled_ranks: Int[Tensor, "layer prompt step"]
    own_log_probs: Float[Tensor, "prompt step"]
    input_ids: Int[Tensor, "prompt position"]
    texts: tuple[str, ...]
    finished: tuple[str, ...]
    words: TokenWords
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    prompt_lens: LogitLensResult | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    readout: Mapping[str, Any] = field(default_factory=dict)
    prompts: PromptBatch | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_prompts(self) -> int:
        """How many prompts were continued."""
        return int(self.sampled_ids.shape[0])

    @property
    def steps_mask(self) -> Bool[Tensor, "prompt step"]:
        """Whether a prompt has a token at a step."""
        return self.sampled_ids >= 0

    @property
    def max_probs(self) -> Float[Tensor, "layer prompt step"]:
        """The probability of the token that each layer predicts."""
        return self.top_probs[..., 0]

    @property
    def sampled_probs(self) -> Float[Tensor, "layer prompt step"]:
        """The probability that each layer gives to the token that the model went on with."""
        return self.sampled_log_probs.exp()

    @property
    def predicted_tokens(self) -> Int[Tensor, "layer prompt step"]:
        """The id of the token that each layer predicts; -1 after a prompt's end."""
        return self.top_ids[..., 0].long()

    @property
    def predicted_words(self) -> WordGrid:
        """The predicted tokens as text: ``predicted_words[layer][prompt][step]``."""
        return WordGrid(self.predicted_tokens, self.words)

    @property
    def sampled_words(self) -> WordGrid:
        """The tokens that were written, as text: ``sampled_words[prompt][step]``."""
        return WordGrid(self.sampled_ids, self.words)

    @property
    def agreement(self) -> Bool[Tensor, "layer prompt step"]:
        """Whether a layer's first choice is the token that the model went on with; false after a prompt's end."""
        return (self.predicted_tokens == self.sampled_ids) & self.steps_mask

    def agreement_by_layer(self, prompt: int | None = None) -> Float[Tensor, " layer"]:
        """The share of all steps, or of one prompt's, at which each layer agrees.

        Raises:
            InputError: there is no such prompt.
        """
        chosen = slice(None) if prompt is None else [lookup.prompt_index(prompt, self.n_prompts)]
        n_steps = self.steps_mask[chosen].sum()
        return self.agreement[:, chosen].flatten(1).sum(-1) / n_steps

    def settled(self) -> Int[Tensor, "prompt step"]:
        """The layer, as its place among the addresses, from which on all agree.

        Returns:
            The number of addresses for a token on which the last of them does not agree, and -1 after a prompt's end.
        """
        from_here = self.agreement.flip(0).int().cumprod(0).sum(0)
        return (len(self.addresses) - from_here).masked_fill(~self.steps_mask, -1)

    def pairs(self, layer: Any = -1, prompt: int = 0) -> list[tuple[str, str]]:
        """What a layer predicts beside what was written, step by step.

        Args:
            layer: an address in any form; a negative number counts from the model's last layer.
            prompt: index of the prompt.

        Raises:
            InputError: the layer was not read, or there is no such prompt.
        """
        row, prompt = self.layer_index(layer), lookup.prompt_index(prompt, self.n_prompts)
        n = int(self.steps_mask[prompt].sum())
        guesses = self.predicted_words[row][prompt]
        return list(zip(guesses[:n], self.sampled_words[prompt][:n], strict=True))

    def layer_index(self, address: Any) -> int:
        """Where an address stands on the layer axis.

        Raises:
            InputError: the address was not read.
        """
        return lookup.layer_index(address, self.addresses, self.model)

    def at(self, prompt: int = 0, step: int = 0) -> LensColumn:
        """What each layer predicts at one step, and what it makes of the token that was written; printed, it is a table.

        Raises:
            InputError: there is no such prompt or step.
        """
        prompt = lookup.prompt_index(prompt, self.n_prompts)
        n = int(self.steps_mask[prompt].sum())
        if not -n <= step < n:
            raise InputError(f"Step {step} of prompt {prompt} does not exist: it has {n}; the last is -1.")
        step %= n
        return LensColumn(
            addresses=self.addresses,
            words=tuple(self.words[i] for i in self.predicted_tokens[:, prompt, step].tolist()),
            probs=self.max_probs[:, prompt, step],
            answers=(
                (
                    self.words[int(self.sampled_ids[prompt, step])],
                    self.sampled_probs[:, prompt, step],
                    self.sampled_ranks[:, prompt, step],
                ),
            ),
        )

    def __getitem__(self, index: int | slice | Sequence[int]) -> GenerationLensResult:
        """The generation of one prompt or of some: the same fields, cut to the prompts and to the steps that they have.

        Raises:
            InputError: there is no such prompt.
        """
        chosen = lookup.prompt_indices(index, self.n_prompts)
        n = int(self.steps_mask[chosen].sum(-1).max()) if chosen else 0

        def cut(value: Any, name: str) -> Any:
            if isinstance(value, Tensor):
                if name == "input_ids":
                    return value[chosen]
                by_prompt = name in ("sampled_ids", "own_log_probs")
                return value[chosen, :n] if by_prompt else value[:, chosen, :n]
            if name in ("texts", "finished"):
                return tuple(value[prompt] for prompt in chosen)
            if name == "prompts" and value is not None:
                return PromptBatch([value[prompt] for prompt in chosen])
            return value[chosen] if isinstance(value, LogitLensResult) else value

        return GenerationLensResult(**{f.name: cut(getattr(self, f.name), f.name) for f in fields(self)})

    def __len__(self) -> int:
        return self.n_prompts

    def __iter__(self) -> Iterator[GenerationLensResult]:
        return (self[prompt] for prompt in range(self.n_prompts))

    def text(self, layers: Any = None) -> str:
        """Every prompt with what was written, and for some layers the pairs of their guess and the token that was written, 16 at most.

        Args:
            layers: which, as addresses in any form; ``None`` for six that are evenly apart.

        Raises:
            InputError: one was not read.
        """
        n = len(self.addresses)
        rows = (
            sorted({round(i * (n - 1) / (SHOWN_LAYERS - 1)) for i in range(SHOWN_LAYERS)})
            if layers is None
            else [
                self.layer_index(layer) for layer in (layers if isinstance(layers, (list, tuple, range)) else [layers])
            ]
        )
        names = [str(self.addresses[row]) for row in rows]
        width = max(map(len, names), default=0)
        parts = [repr(self)]
        for prompt in range(min(self.n_prompts, SHOWN_PROMPTS)):
            asked = "" if self.prompts is None else f"{str(self.prompts[prompt])!r} → "
            parts.append(
                f"\n{asked}{self.texts[prompt]!r} ({FINISHED.get(self.finished[prompt], self.finished[prompt])})"
            )
            steps = int(self.steps_mask[prompt].sum())
            for row, name in zip(rows, names, strict=True):
                agree = int(self.agreement[row, prompt].sum())
                listed = ", ".join(map(repr, self.pairs(self.addresses[row], prompt)[:SHOWN_STEPS]))
                more = f", … {steps - SHOWN_STEPS} more" if steps > SHOWN_STEPS else ""
                parts.append(f"{name:>{width}}  {f'{agree}/{steps}':>5}  {listed}{more}")
        if self.n_prompts > SHOWN_PROMPTS:
            parts.append(f"\n… and {self.n_prompts - SHOWN_PROMPTS} more prompts")
        return "\n".join([*parts, *(f"\nnote: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def __repr__(self) -> str:
        layers, prompts, steps = self.entropy.shape
        first, last = (self.addresses[0], self.addresses[-1]) if self.addresses else ("", "")
        return (
            f"GenerationLensResult({self.model.get('model_id', 'unknown model')}: {layers} layers ({first} … {last}) × "
            f"{prompts} prompts × {steps} steps, top {self.top_ids.shape[-1]})"
        )
