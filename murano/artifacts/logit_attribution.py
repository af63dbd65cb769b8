"""LogitAttributionResult: the final logit of each answer, split into what wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts import lookup
from murano.artifacts.metric_table import MetricTable
from murano.artifacts.words import TokenWords
from murano.errors import InputError
from murano.prompts import PromptBatch

#: What can be looked at: the target's logit, the foil's, or the one less the other.
OF = ("target", "foil", "difference")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LogitAttributionResult:
    """The direct logit attribution of a set of prompts: CPU tensors and plain values, complete without the model.

    The final norm's scale is frozen at its value in the run, so that a logit is a sum: over components and with ``leftover`` it is the
    model's own. Prompts of different lengths are aligned at their ends, as in a lens.

    Args:
        by: how finely the logit was split: ``"layer"``, ``"component"``, ``"head"`` or ``"neuron_topk"``.
        components: what each number of the last axis belongs to: ``embeddings``, ``L7.attn_out``, ``L7.attn_out.h3``, ``L9.mlp_out``,
            ``bias``. ``attn_out`` is what carries something from one position to another, ``mlp_out`` all else that a block writes;
            ``layer_out`` is both.
        contributions: to the logit of each answer; NaN where there is no answer or no position.
        logits: the logit that they add up to: the model's own, before a soft-cap.
        model_logits: what the model predicts from; another number only where there is a soft-cap.
        answer_ids: the first token of each target, then of each foil; -1 where a prompt has fewer.
        n_targets: how many of the answers are targets.
        input_ids: the token at each position; -1 where there is none.
        attention_mask: whether a position holds a token of the prompt.
        position_index: the index of each position in its prompt, from 0; -1 where there is none.
        lengths: how many tokens each prompt has; ``None`` in what an earlier version saved.
        words: the text of every id that occurs.
        model: what was read, as in a lens.
        readout: the proof that the readout is the model's own.
        parts: how far each block's parts were off what it added when the model was loaded, or why they could not be told apart.
        cap: the soft-cap that is not part of the sum, in words; empty in most families.
        neurons: with ``by="neuron_topk"``, contributions of the neurons that weigh most at each position: towards the first target, less
            the first foil where the prompt has one; largest first.
        neuron_index: layer and index of each.
        prompts: what was read, with targets, foils and metadata.
        target_texts: each prompt's targets as they continue it.
        foil_texts: its foils.
        notes: what was odd, in words.
        extra: what another version of this artifact saved and this one does not know; saved again with the rest.
    """

    SCHEMA: ClassVar[str] = "logit_attribution"
    SCHEMA_VERSION: ClassVar[int] = 1

    by: str
    components: tuple[Address, ...]
    contributions: Float[Tensor, "prompt position answer component"]
    logits: Float[Tensor, "prompt position answer"]
    model_logits: Float[Tensor, "prompt position answer"]
    answer_ids: Int[Tensor, "prompt answer"]
    n_targets: int
    input_ids: Int[Tensor, "prompt position"]
    attention_mask: Bool[Tensor, "prompt position"]
    position_index: Int[Tensor, "prompt position"]
    words: TokenWords
    model: Mapping[str, Any] = field(default_factory=dict)
    readout: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    lengths: Int[Tensor, " prompt"] | None = None
    cap: str = ""
    neurons: Float[Tensor, "prompt position answer neuron"] | None = None
    neuron_index: Int[Tensor, "prompt position neuron 2"] | None = None
    prompts: PromptBatch | None = None
    target_texts: tuple[tuple[str, ...], ...] = ()
    foil_texts: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_prompts(self) -> int:
        """How many prompts were read."""
        return int(self.input_ids.shape[0])

    @property
    def leftover(self) -> Float[Tensor, "prompt position answer"]:
        """What is left of each logit when all contributions are taken from it: rounding."""
        return self.logits - self.contributions.double().sum(-1).to(self.logits.dtype)

    @property
    def default_of(self) -> str:
        """``"difference"`` where every prompt has a foil, else ``"target"``."""
        foils = self.answer_ids[:, self.n_targets :]
        return "difference" if foils.shape[1] and bool((foils[:, 0] >= 0).all()) else "target"

    def values(self, of: str | None = None, position: int | None = None) -> Float[Tensor, "prompt component"]:
        """Contributions of every component, at one position of each prompt, to one number.

        Args:
            of: ``"target"`` (its first target's logit), ``"foil"`` or ``"difference"`` of the two; ``None``: the difference where every
                prompt has a foil.
            position: index of the token in its prompt, -1 is a prompt's last token; ``None``: the last one that was read.

        Returns:
            NaN for a prompt that has no foil or in which that position was not read.

        Raises:
            InputError: no prompt has a foil, or that position was read in none.
        """
        return self._pick(self.contributions, of, position)

    def total(self, of: str | None = None, position: int | None = None) -> Float[Tensor, " prompt"]:
        """The logit, or difference of logits, that :meth:`values` add up to; see there."""
        return self._pick(self.logits.unsqueeze(-1), of, position)[:, 0]

    def columns(self, position: int | None = None) -> Int[Tensor, " prompt"]:
        """Where on the position axis a token of each prompt is; -1 where it was not read.

        Args:
            position: as in :meth:`values`.

        Raises:
            InputError: it was read in no prompt.
        """
        index = self.position_index
        if position is None:
            return index.argmax(dim=1)
        position = lookup.as_index(position, "position")
        lengths = self.lengths if self.lengths is not None else index.amax(dim=1) + 1
        wanted = lengths + position if position < 0 else torch.full_like(lengths, position)
        there = (index == wanted.unsqueeze(1)) & (index >= 0)
        if len(index) and not bool(there.any()):
            read = index[index >= 0].unique().tolist()
            shown = ", ".join(map(str, read[:12])) + (", …" if len(read) > 12 else "")
            raise InputError(
                f"Position {position} was not read: it is the index of a token in its prompt, and read were {shown}."
            )
        return there.int().argmax(dim=1).masked_fill(~there.any(dim=1), -1)

    def _pick(self, tensor: Tensor, of: str | None, position: int | None) -> Tensor:
        of = self.default_of if of is None else of
        if of not in OF:
            raise InputError(f"of={of!r} is unknown. Use 'target', 'foil' or 'difference'.")
        if of != "target" and self.answer_ids.shape[1] == self.n_targets:
            raise InputError(f"of={of!r}: no prompt has a foil. Give them: LogitAttribution(model, foils=[…]).")
        if not self.n_prompts:
            raise InputError("There are no prompts in this result.")
        columns = self.columns(position)
        at = tensor[torch.arange(self.n_prompts), columns.clamp(min=0)]
        at = at.masked_fill((columns < 0).view(-1, *[1] * (at.ndim - 1)), float("nan"))
        if of == "difference":
            return at[:, 0] - at[:, self.n_targets]
        return at[:, 0 if of == "target" else self.n_targets]

    def one(
        self, values: Float[Tensor, "prompt *rest"], prompt: int | None, of: str, position: int | None
    ) -> tuple[Float[Tensor, "*rest"], int]:
        """A prompt's row, or the mean of the rows that have numbers, and of how many prompts that is.

        Raises:
            InputError: there is no such prompt, or it has no number.
        """
        there = ~values.flatten(1).isnan().any(-1)
        if prompt is not None:
            prompt = lookup.prompt_index(prompt, self.n_prompts)
            if not there[prompt]:
                raise InputError(f"Prompt {prompt} has {self._why_none(prompt, of, position)}.")
            return values[prompt], 1
        if not there.any():
            raise InputError(f"No prompt has a number: prompt 0 has {self._why_none(0, of, position)}.")
        return values[there].mean(0), int(there.sum())

    def _why_none(self, prompt: int, of: str, position: int | None) -> str:
        if of != "target" and int(self.answer_ids[prompt, self.n_targets]) < 0:
            return f"no foil, so there is no {of}: use of='target'"
        if self.columns(position)[prompt] < 0:
            read = [at for at in self.position_index[prompt].tolist() if at >= 0]
            return f"nothing at position {position}: read were {', '.join(map(str, read))}"
        return "contributions that are not numbers"

    def where(self, prompt: int, position: int | None = None) -> str:
        """Which token of a prompt was read, in words; empty for its last one."""
        column = int(self.columns(position)[prompt])
        if column < 0:
            return ""
        at = int(self.position_index[prompt, column])
        if self.lengths is not None and at == int(self.lengths[prompt]) - 1:
            return ""
        return f"at token {at}, {self.words[int(self.input_ids[prompt, column])]!r}"

    def table(self, of: str | None = None, position: int | None = None) -> MetricTable:
        """Contributions as a table, a row for each prompt and a column for each component: ``.mean()`` gives means with intervals.

        Args:
            of: as in :meth:`values`.
            position: as in :meth:`values`.
        """
        of = self.default_of if of is None else of
        before = ", before the soft-cap" if self.cap else ""
        values = self.values(of, position)
        token = "the last token read" if position is None else f"token {position}"
        return MetricTable(
            name="contribution",
            values=values.float(),
            columns=tuple(map(str, self.components)),
            addresses=self.components,
            unit="logits",
            how=f"direct contribution to {what(of)}{before}, the final norm's scale frozen, at {token}",
            left_out={
                str(i): f"it has {self._why_none(i, of, position)}"
                for i in values.isnan().any(-1).nonzero().flatten().tolist()
            },
            prompts=self.prompts,
            model=self.model,
        )

    def top(
        self, k: int = 10, *, of: str | None = None, prompt: int | None = None, position: int | None = None
    ) -> TopComponents:
        """The components that weigh most, of one prompt or in the mean over all, as a table.

        Args:
            k: how many.
            of: as in :meth:`values`.
            prompt: index of a prompt; ``None`` for the mean with its interval.
            position: as in :meth:`values`.

        Raises:
            InputError: there is no such prompt, or no number of it.
        """
        of = self.default_of if of is None else of
        check_count(k)
        values = self.values(of, position)
        if prompt is None and self.n_prompts == 1:
            prompt = 0
        mean, n = self.one(values, prompt, of, position)
        low = high = mean
        if prompt is None:
            summary = self.table(of, position).mean()
            mean, low, high = summary.mean[0], summary.low[0], summary.high[0]
        total, _ = self.one(self.total(of, position).unsqueeze(-1), prompt, of, position)
        order = mean.abs().argsort(descending=True)[:k]
        return TopComponents(
            names=tuple(str(self.components[i]) for i in order.tolist()),
            values=mean[order],
            low=low[order],
            high=high[order],
            total=float(total),
            what=self._what(of),
            n=n,
            where="" if prompt is None else self.where(prompt, position),
        )

    def top_neurons(
        self, k: int = 10, *, of: str | None = None, prompt: int = 0, position: int | None = None
    ) -> TopComponents:
        """The neurons that weigh most in one prompt, as a table; other prompts keep other neurons.

        Args:
            k: how many, of those that were kept.
            of: as in :meth:`values`.
            prompt: index of the prompt.
            position: as in :meth:`values`.

        Raises:
            InputError: no neurons were read, or there is no such prompt, or no number of it.
        """
        if self.neurons is None or self.neuron_index is None:
            raise InputError('No neurons were read. Read again with LogitAttribution(model, by="neuron_topk").')
        of = self.default_of if of is None else of
        check_count(k)
        prompt = lookup.prompt_index(prompt, self.n_prompts)
        total, _ = self.one(self.total(of, position).unsqueeze(-1), prompt, of, position)
        values = self._pick(self.neurons, of, position)[prompt]
        index = self.neuron_index[prompt, self.columns(position)[prompt]]
        order = values.abs().nan_to_num(-1.0).argsort(descending=True)[: min(k, int((index[:, 0] >= 0).sum()))]
        return TopComponents(
            names=tuple(f"L{layer}.mlp_out.n{neuron}" for layer, neuron in index[order].tolist()),
            values=values[order],
            low=values[order],
            high=values[order],
            total=float(total),
            what=self._what(of),
            n=1,
            where=self.where(prompt, position),
        )

    def _what(self, of: str) -> str:
        return what(of) + (", before the soft-cap" if self.cap else "")

    def __getitem__(self, index: int | slice | Sequence[int]) -> LogitAttributionResult:
        """The attribution of one prompt or of some.

        Raises:
            InputError: there is no such prompt.
        """
        chosen = lookup.prompt_indices(index, self.n_prompts)
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = value[chosen]
            elif name in ("target_texts", "foil_texts") and value:
                changed[name] = tuple(value[prompt] for prompt in chosen)
            else:
                changed[name] = value
        if self.prompts is not None:
            changed["prompts"] = PromptBatch([self.prompts[prompt] for prompt in chosen])
        return LogitAttributionResult(**changed)

    def __len__(self) -> int:
        return self.n_prompts

    def __iter__(self) -> Iterator[LogitAttributionResult]:
        return (self[prompt] for prompt in range(self.n_prompts))

    def __repr__(self) -> str:
        prompts, positions, answers, components = self.contributions.shape
        return (
            f"LogitAttributionResult({self.model.get('model_id', 'unknown model')}, by {self.by}: {prompts} prompts × "
            f"{positions} positions × {answers} answers × {components} components)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class TopComponents:
    """The components that weigh most; printed, it is a table.

    Args:
        names: of the components.
        values: their contributions, or the means of these.
        low: lower end of the 95 % interval of a mean.
        high: upper end of it.
        total: what all contributions add up to.
        what: what that is.
        n: how many prompts.
        where: which token was read, where it is not the prompt's last.
    """

    names: tuple[str, ...]
    values: Float[Tensor, " component"]
    low: Float[Tensor, " component"]
    high: Float[Tensor, " component"]
    total: float
    what: str
    n: int
    where: str = ""

    def __repr__(self) -> str:
        width = max(map(len, self.names), default=0)
        reach = float(self.values.abs().max()) if len(self.values) else 1.0
        of = f"mean of {self.n} prompts" if self.n > 1 else f"one prompt{f', {self.where}' if self.where else ''}"
        lines = [f"{self.what}: {self.total:+.3f} ({of})"]
        for i, name in enumerate(self.names):
            value = float(self.values[i])
            interval = f"  [{float(self.low[i]):+.3f}, {float(self.high[i]):+.3f}]" if self.n > 1 else ""
            lines.append(
                f"{name:>{width}}  {value:+7.3f}{interval}  {'#' * round(20 * abs(value) / max(reach, 1e-9))}".rstrip()
            )
        return "\n".join(lines)


def check_count(k: Any) -> None:
    """Refuse a number of components that can't be listed.

    Raises:
        InputError: it is no whole number from 1 on.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k={k!r}: it must be a whole number from 1 on.")


def what(of: str) -> str:
    """A number that is attributed, in words."""
    return {"target": "logit of the target", "foil": "logit of the foil"}.get(
        of, "logit of the target less that of the foil"
    )


def summed(
    result: LogitAttributionResult,
) -> tuple[tuple[Address, ...], Float[Tensor, "prompt position answer component"]]:
    """Heads added up to the attention that they belong to."""
    whole = [Address(a.layer, a.component) for a in result.components]
    names = tuple(dict.fromkeys(whole))
    at = torch.tensor([names.index(a) for a in whole])
    added = result.contributions.new_zeros(*result.contributions.shape[:-1], len(names))
    return names, added.index_add(-1, at, result.contributions)
