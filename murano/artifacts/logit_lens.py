"""LogitLensResult: what each layer predicts at each position of each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts import lookup
from murano.artifacts.lens_column import LensColumn
from murano.artifacts.words import TokenWords, WordGrid
from murano.errors import InputError
from murano.prompts import PromptBatch


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
        lengths: how many tokens each prompt has, whether they were read or not; 0 for one that was left out.
        model: what was read: ``model_id``, ``revision``, ``dtype``, ``n_layers``, ``vocab_size``, versions of packages.
        readout: the proof that this readout is the model's own, as ``model.check_readout()`` returned it.
        stats: further statistics by name, each ``[layer, prompt, position]``; see :mod:`murano.readout.stats`.
        prompts: what was read, with targets, foils and metadata.
        target_mode: how targets of several tokens were read: ``"first"``, ``"single"`` or ``"sequence"``.
        target_texts: each prompt's targets as they continue it, leading space included.
        foil_texts: its foils.
        target_ids: the first token of each target; -1 where a prompt has fewer.
        foil_ids: the first token of each foil.
        target_log_probs: log-probability of each target in nats; with ``target_mode="sequence"`` that of the whole target, at each
            prompt's last position, NaN elsewhere.
        target_ranks: how many tokens were more probable; of a whole target the worst of its tokens' ranks; -1 where nothing was read.
        foil_log_probs: the same of each foil.
        foil_ranks: the same of each foil.
        residuals: the rows that were read, where ``keep="residuals"`` asked for them, in the dtype of the stream.
        logits: all logits, where ``keep="logits"`` asked for them.
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
    lengths: Int[Tensor, " prompt"] | None = None
    prompts: PromptBatch | None = None
    target_mode: str = "first"
    target_texts: tuple[tuple[str, ...], ...] = ()
    foil_texts: tuple[tuple[str, ...], ...] = ()
    target_ids: Int[Tensor, "prompt target"] | None = None
    foil_ids: Int[Tensor, "prompt foil"] | None = None
    target_log_probs: Float[Tensor, "layer prompt position target"] | None = None
    target_ranks: Int[Tensor, "layer prompt position target"] | None = None
    foil_log_probs: Float[Tensor, "layer prompt position foil"] | None = None
    foil_ranks: Int[Tensor, "layer prompt position foil"] | None = None
    residuals: Float[Tensor, "layer prompt position d_model"] | None = None
    logits: Float[Tensor, "layer prompt position vocab"] | None = None
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
        return lookup.layer_index(address, self.addresses, self.model)

    def __getitem__(self, index: int | slice | Sequence[int]) -> LogitLensResult:
        """The lens of one prompt or of some: the same fields, cut to the prompts and to the positions that they have.

        Raises:
            InputError: there is no such prompt.
        """
        chosen = lookup.prompt_indices(index, self.n_prompts)
        width = int(self.attention_mask[chosen].sum(-1).max()) if chosen else 0
        start = self.input_ids.shape[1] - width

        def cut(value: Any, name: str) -> Any:
            if isinstance(value, Tensor):
                if name in ("target_ids", "foil_ids", "lengths"):
                    return value[chosen]
                by_prompt = name in ("input_ids", "attention_mask", "position_index")
                return value[chosen, start:] if by_prompt else value[:, chosen, start:]
            if name == "stats":
                return {key: cut(stat, key) for key, stat in value.items()}
            if name == "prompts" and value is not None:
                return PromptBatch([value[prompt] for prompt in chosen])
            if name in ("target_texts", "foil_texts") and value:
                return tuple(value[prompt] for prompt in chosen)
            return value

        return LogitLensResult(**{f.name: cut(getattr(self, f.name), f.name) for f in fields(self)})

    def __len__(self) -> int:
        return self.n_prompts

    def __iter__(self) -> Iterator[LogitLensResult]:
        return (self[prompt] for prompt in range(self.n_prompts))

    def column(self, prompt: int = 0, position: int = -1) -> int:
        """Where a token of a prompt stands on the position axis.

        Args:
            prompt: index of the prompt.
            position: index of the token in its prompt; -1 is the prompt's last token.

        Raises:
            InputError: there is no such prompt, it was left out, or that position was not read.
        """
        prompt = lookup.prompt_index(prompt, self.n_prompts)
        position = lookup.as_index(position, "position")
        read = self.position_index[prompt].tolist()
        length = int(self.lengths[prompt]) if self.lengths is not None else max(read, default=-1) + 1
        if max(read, default=-1) < 0:
            raise InputError(self.why_left_out(prompt))
        wanted = position + length if position < 0 else position
        if wanted not in read or wanted < 0:
            there = sorted(index for index in read if index >= 0)
            those = f"{len(there)} of them were read" if len(there) > 8 else f"read: {', '.join(map(str, there))}"
            raise InputError(f"Position {position} of prompt {prompt} was not read: it has {length} tokens; {those}.")
        return read.index(wanted)

    def why_left_out(self, prompt: int) -> str:
        """Why nothing was read of a prompt, in words."""
        said = [note for note in self.notes if note.startswith(f"Prompt {prompt} ")]
        return said[0] if said else f"Prompt {prompt} was left out."

    def at(self, prompt: int = 0, position: int = -1) -> LensColumn:
        """What each layer predicts at one position; printed, it is a table with a line per layer.

        Args:
            prompt: index of the prompt.
            position: index of the token in its prompt; -1 is the prompt's last token.

        Raises:
            InputError: there is no such prompt, or that position was not read.
        """
        column = self.column(prompt, position)
        answers: list[Any] = []
        for kind in ("target", "foil"):
            log_probs, ranks = getattr(self, f"{kind}_log_probs"), getattr(self, f"{kind}_ranks")
            if log_probs is not None:
                texts = getattr(self, f"{kind}_texts")[prompt]
                answers += [
                    (text, log_probs[:, prompt, column, i].exp(), ranks[:, prompt, column, i])
                    for i, text in enumerate(texts)
                ]
        return LensColumn(
            addresses=self.addresses,
            words=tuple(self.predicted_words[layer][prompt][column] for layer in range(len(self.addresses))),
            probs=self.max_probs[:, prompt, column],
            answers=tuple(answers),
        )

    def table(self, prompt: int = 0, position: int = -1, *, width: int = 30) -> str:
        """The sequence of guesses at one position as text; see :meth:`at`.

        Args:
            prompt: index of the prompt.
            position: index of the token in its prompt; -1 is the prompt's last token.
            width: length of the bar of a probability of 1.

        Raises:
            InputError: there is no such prompt or position.
        """
        return self.at(prompt, position).text(width)

    def to_dataframe(self) -> Any:
        """All cells as a pandas ``DataFrame`` in long form, a row per layer, prompt and position; see :func:`murano.tables.lens_frame`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        from murano.tables import lens_frame

        return lens_frame(self)

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
