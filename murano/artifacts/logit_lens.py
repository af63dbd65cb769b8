"""LogitLensResult: what each layer predicts at each position of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts.words import TokenWords, WordGrid
from murano.errors import InputError


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LogitLensResult:
    """The logit lens of a batch of prompts: CPU tensors and plain values, complete without the model.

    Prompts of different lengths are aligned at their ends, so that ``[..., -1]`` is every prompt's last token; the cells
    before a shorter prompt's first token hold NaN, id -1 and the word ``""``, and ``attention_mask`` is false there.

    Args:
        addresses: what was read, one per layer, in the order asked for.
        top_ids: the ids of the most probable next tokens, best first.
        top_probs: their probabilities, in float32.
        entropy: of the whole distribution, in nats.
        log_normalizer: ``logsumexp`` of the logits, so that ``top_probs.log() + log_normalizer`` are the logits.
        input_ids: the token at each position; -1 where there is none.
        attention_mask: whether a position holds a token of the prompt.
        position_index: the index of each position in its prompt, from 0; -1 where there is none.
        words: the text of every id that occurs.
        model: what was read: ``model_id``, ``revision``, ``dtype``, ``n_layers``, ``vocab_size``, versions of packages.
        readout: the proof that this readout is the model's own, as ``model.check_readout()`` returned it.
        stats: further statistics by name, each ``[layer, prompt, position]``.
        residuals: the rows that were read, where ``keep="residuals"`` asked for them, in the dtype of the stream.
        notes: what was odd about the run, in words: residuals that were not finite, say.
        extra: what another version of this artifact saved and this one does not know; saved again with the rest.
    """

    SCHEMA: ClassVar[str] = "logit_lens"
    SCHEMA_VERSION: ClassVar[int] = 1

    addresses: tuple[Address, ...]
    top_ids: Int[Tensor, "layer prompt position k"]
    top_probs: Float[Tensor, "layer prompt position k"]
    entropy: Float[Tensor, "layer prompt position"]
    log_normalizer: Float[Tensor, "layer prompt position"]
    input_ids: Int[Tensor, "prompt position"]
    attention_mask: Bool[Tensor, "prompt position"]
    position_index: Int[Tensor, "prompt position"]
    words: TokenWords
    model: Mapping[str, Any] = field(default_factory=dict)
    readout: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Float[Tensor, "layer prompt position"]] = field(default_factory=dict)
    residuals: Float[Tensor, "layer prompt position d_model"] | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_probs(self) -> Float[Tensor, "layer prompt position"]:
        """The probability of the token that each layer predicts."""
        return self.top_probs[..., 0]

    @property
    def predicted_tokens(self) -> Int[Tensor, "layer prompt position"]:
        """The id of the token that each layer predicts; -1 where there is no position."""
        return self.top_ids[..., 0].long()

    @property
    def predicted_words(self) -> WordGrid:
        """The predicted tokens as text: ``predicted_words[layer][prompt][position]``."""
        return WordGrid(self.predicted_tokens, self.words)

    @property
    def top_words(self) -> WordGrid:
        """The most probable tokens as text: ``top_words[layer][prompt][position][k]``."""
        return WordGrid(self.top_ids, self.words)

    @property
    def input_words(self) -> WordGrid:
        """The prompts' tokens as text: ``input_words[prompt][position]``, ``""`` where there is none."""
        return WordGrid(self.input_ids, self.words)

    @property
    def top_logits(self) -> Float[Tensor, "layer prompt position k"]:
        """The logits of the most probable tokens, recovered from their probabilities (to float32 rounding)."""
        return self.top_probs.log() + self.log_normalizer.unsqueeze(-1)

    @property
    def n_prompts(self) -> int:
        """How many prompts were read."""
        return int(self.input_ids.shape[0])

    def decode(self, model: Any, **options: Any) -> Float[Tensor, "layer prompt position vocab"]:
        """The full logits of the residuals that were kept: as large as they are wide.

        Args:
            model: the :class:`~murano.MuranoModel` they were read from.
            options: of ``model.decode``.

        Raises:
            InputError: none were kept.
        """
        if self.residuals is None:
            raise InputError('No residuals were kept. Read again with LogitLens(model, keep="residuals").')
        logits: Tensor = model.decode(self.residuals.to(model.device), **options)
        return logits

    def layer_index(self, address: Any) -> int:
        """Where an address stands on the layer axis.

        Raises:
            InputError: the address was not read.
        """
        wanted = Address.parse(address)
        if wanted.layer is not None and wanted.layer < 0 and "n_layers" in self.model:
            wanted = wanted.resolve(int(self.model["n_layers"]))
        if wanted not in self.addresses:
            raise InputError(f"'{wanted}' was not read. Read: {', '.join(map(str, self.addresses))}.")
        return self.addresses.index(wanted)

    def table(self, prompt: int = 0, position: int = -1, *, width: int = 30) -> str:
        """The sequence of guesses at one position, a line per layer: address, prediction, probability, bar.

        Args:
            prompt: index of the prompt.
            position: index on the position axis; -1 is the prompt's last token.
            width: length of the bar of a probability of 1.

        Raises:
            InputError: there is no such prompt or position.
        """
        self._check_cell(prompt, position)
        lines = [f"{'layer':>16}  {'prediction':<16} probability"]
        for layer, address in enumerate(self.addresses):
            word = self.predicted_words[layer][prompt][position]
            probability = float(self.max_probs[layer, prompt, position])
            bar = "#" * int(probability * width) if probability == probability else ""
            lines.append(f"{address!s:>16}  {word!r:<16} {probability:5.3f}  {bar}".rstrip())
        return "\n".join(lines)

    def _check_cell(self, prompt: int, position: int) -> None:
        prompts, positions = self.input_ids.shape
        if not -prompts <= prompt < prompts:
            raise InputError(f"Prompt {prompt} does not exist: there are {prompts}, counted from 0.")
        if not -positions <= position < positions or not bool(self.attention_mask[prompt, position]):
            n = int(self.attention_mask[prompt].sum())
            raise InputError(
                f"Position {position} of prompt {prompt} does not exist: {n} positions were read; the last is -1."
            )

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the last tokens of the first prompt; nothing but the ``repr`` where that is empty."""
        from murano.plotting.table import html_table  # here: artifacts know no figures until one is shown

        return html_table(self) if self.top_ids.numel() else None

    def __repr__(self) -> str:
        layers, prompts, positions = self.max_probs.shape
        first, last = (self.addresses[0], self.addresses[-1]) if self.addresses else ("", "")
        return (
            f"LogitLensResult({self.model.get('model_id', 'unknown model')}: {layers} layers ({first} … {last}) × "
            f"{prompts} prompts × {positions} positions, top {self.top_ids.shape[-1]})"
        )
