"""Direct logit attribution as one function: prompts with answers in, what each component wrote towards them out.

The final norm's scale is frozen at its value in the run. A logit then reads one direction of the final residual, which is a sum of what
the embedding and every block wrote; each summand's share of the logit is its product with that direction. Nothing is approximated:
contributions, and what they leave over, are the model's own logit. Which tensors a block writes was proved when the model was loaded
(:mod:`murano.model.parts`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from murano.address import BIAS, Address
from murano.answers import Answers, answer_notes, first_tokens
from murano.artifacts.logit_attribution import LogitAttributionResult
from murano.artifacts.words import NO_TOKEN
from murano.errors import InputError, ReadoutError
from murano.lens import MAX_BATCH_TOKENS, MAX_CHUNK_BYTES, MAX_HELD_BYTES, describe
from murano.model import MuranoModel, batching, residuals
from murano.model.direction import Directions, LinearReadout, check_norm, on_cpu
from murano.model.linear import exact, pull_linear, tolerance
from murano.model.parts import Part, Place, catching
from murano.model.proof import another_shape, difference
from murano.model.targets import answers_of
from murano.prompts import PromptBatch, as_prompts
from murano.reader import Cells
from murano.readout.request import check_attribution, check_model

_EMBEDDINGS, _BIAS = Address(None, "embeddings"), Address(None, BIAS)


@torch.no_grad()
def logit_attribution(
    model: MuranoModel,
    prompts: Any,
    *,
    targets: Any = None,
    foils: Any = None,
    by: str = "component",
    positions: Any = "last",
    neurons: int = 20,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
) -> LogitAttributionResult:
    """Split the final logits of answers into what the embedding, every block, head or neuron wrote.

    Args:
        model: the model.
        prompts: as the lens takes them; each needs a target.
        targets: the answer of each prompt; without them those that the prompts carry. One of several tokens is read by its first.
        foils: what each target is compared with.
        by: ``"layer"`` (what each block wrote), ``"component"`` (attention and MLP apart), ``"head"`` (attention by head), or
            ``"neuron_topk"`` (as ``"component"``, and the neurons that weigh most).
        positions: ``"last"``, ``"all"``, or token indices; negative ones count from each prompt's end.
        neurons: how many of them are kept at each position: those whose contribution to the first target, less that to the first foil where
            the prompt has one, is largest.
        max_batch_tokens: tokens of one forward; results do not depend on it beyond rounding.

    Raises:
        InputError: a prompt without a target, a target that is its own foil, a position that a prompt does not have, or a family that
            can't be split this finely.
        UnsupportedModelError: a family whose logits read no direction of one stream.
        ReadoutError: contributions do not add up to the model's own logit: it was changed after it was loaded.
    """
    check_model(model, "logit_attribution")
    batch = as_prompts(prompts, targets=targets, foils=foils)
    where = check_attribution(by, positions, neurons)
    model.require_weights("logit_attribution")
    encoded, answers = _encode(model, batch, where)
    split = _splitter(model, by, neurons)
    cells = Cells.of(encoded, [list(range(len(ids))) if where is None else list(where) for ids in encoded])
    answer_ids = torch.cat(first_tokens(answers), dim=1)
    n_targets = max(len(of["targets"]) for of in answers)
    main = _main_answers(answer_ids, n_targets)
    table = _Tables.empty(cells.input_ids.numel(), answer_ids.shape[1], len(split.components), split.kept)
    if where is None:  # every token's row waits for the last block
        max_batch_tokens = max(1, min(max_batch_tokens, MAX_HELD_BYTES // split.row_bytes))
    batches = batching.make_batches(encoded, max_tokens=max_batch_tokens, mix_lengths=model.check_readout().pads)
    with tqdm(total=len(encoded), unit="prompt", desc="logit attribution", delay=2.0, leave=False) as progress:
        for one in batches:
            _read(model, split, one, cells, answer_ids, main, table)
            progress.update(len(one.prompts))
    notes = [
        note.partition(" target_mode=")[0] for note in answer_notes(answers, "first")
    ]  # there is no such option here
    notes += _notes(answers, split)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    shape = cells.input_ids.shape
    return LogitAttributionResult(
        by=by,
        components=split.components,
        contributions=table.contributions.unflatten(0, shape),
        logits=table.logits.unflatten(0, shape),
        model_logits=table.model_logits.unflatten(0, shape),
        answer_ids=answer_ids,
        n_targets=n_targets,
        input_ids=cells.input_ids,
        attention_mask=cells.position_index >= 0,
        position_index=cells.position_index,
        lengths=torch.tensor([len(ids) for ids in encoded]),
        words=model.words,
        model=describe(model),
        readout=model.check_readout().to_dict(),
        parts={"difference": model.parts.difference, "reason": model.parts.reason},
        cap=split.readout.cap,
        neurons=table.neurons.unflatten(0, shape) if split.kept else None,
        neuron_index=table.neuron_index.unflatten(0, shape) if split.kept else None,
        prompts=batch,
        target_texts=tuple(tuple(a.text for a in of["targets"]) for of in answers),
        foil_texts=tuple(tuple(a.text for a in of["foils"]) for of in answers),
        notes=tuple(notes),
    )


def _notes(answers: Sequence[Answers], split: _Split) -> list[str]:
    """What the numbers leave out, in words."""
    notes = []
    several = [i for i, of in enumerate(answers) if len(of["targets"]) > 1 or len(of["foils"]) > 1]
    if several:
        more = f" and {len(several) - 1} more" if len(several) > 1 else ""
        notes.append(
            f"Several targets or foils (prompt {several[0]}{more}): each is attributed by itself; tables and figures show the first."
        )
    if split.by == "neuron_topk":
        whole = sorted(
            {
                str(a.layer)
                for a, of in split.parts.items()
                if a.component == "mlp_out" and not set(of) & set(split.sources)
            },
            key=int,
        )
        if whole:
            notes.append(
                f"The neurons of layers {', '.join(whole)} are left out: their MLPs do not end in one linear module."
            )
    return notes


def _encode(
    model: MuranoModel, prompts: PromptBatch, positions: tuple[int, ...] | None
) -> tuple[list[list[int]], list[Answers]]:
    """Tokens and answers of every prompt.

    Raises:
        InputError: naming the first prompt that can't be attributed.
    """
    for index, prompt in enumerate(prompts):
        if not prompt.targets:
            raise InputError(
                f"Prompt {index} has no target, so there is no logit to attribute: {str(prompt)!r:.60}. Give one to each prompt: "
                "LoadPrompts(prompts, targets=[…]) or LogitAttribution(model, targets=[…])."
            )
    encoded, answers = [], []
    for index, prompt in enumerate(prompts):
        try:
            ids = batching.encode(prompt, model.tokenizer)
            of = answers_of(prompt, ids, model.tokenizer, model.vocab_size)
        except InputError as error:
            raise InputError(f"Prompt {index} can't be read ({error}): {str(prompt)!r:.60}.") from None
        wrong = batching.check_ids(ids, rows=model.anatomy.embedding_rows, context=model.context)
        outside = [p for p in positions or () if not -len(ids) <= p < len(ids)]
        if not wrong and outside:
            wrong = f"has {len(ids)} tokens, so it has no position {outside[0]}"
        if wrong:
            raise InputError(f"Prompt {index} {wrong}: {str(prompt)!r:.60}.")
        encoded.append(ids)
        answers.append(of)
    return encoded, answers


def _main_answers(answer_ids: Int[Tensor, "prompt answer"], n_targets: int) -> Float[Tensor, "prompt answer"]:
    """By what the answers' contributions are weighed where one number is needed: the first target, less the first foil if there is one."""
    main = torch.zeros(answer_ids.shape, dtype=torch.float64)
    main[:, 0] = 1.0
    if answer_ids.shape[1] > n_targets:
        main[:, n_targets] = -(answer_ids[:, n_targets] >= 0).double()
    return main


@dataclass
class _Tables:
    """What is read, a row for each cell."""

    contributions: Tensor
    logits: Tensor
    model_logits: Tensor
    neurons: Tensor
    neuron_index: Tensor

    @classmethod
    def empty(cls, cells: int, answers: int, components: int, neurons: int) -> _Tables:
        def nan(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"))

        index = torch.full((cells, neurons, 2), -1, dtype=torch.int32)
        return cls(
            nan(cells, answers, components),
            nan(cells, answers),
            nan(cells, answers),
            nan(cells, answers, neurons),
            index,
        )


Rows = Float[Tensor, "row d_model"]
Shares = Float[Tensor, "row answer"]


@dataclass(frozen=True, eq=False)
class _Split:
    """What is caught in a forward, and how it becomes contributions.

    Args:
        model: the model.
        by: how finely.
        parts: what each block writes, by layer and component; empty where blocks are taken whole.
        after: by layer, what all blocks from it on multiply the stream with; 1 in most families.
        readout: from the stream to a logit.
        kept: how many neurons are kept.
    """

    model: MuranoModel
    by: str
    parts: Mapping[Address, list[Part]]
    after: Sequence[Tensor]
    readout: LinearReadout
    kept: int = 0

    @property
    def stream(self) -> list[Address]:
        """What is read of the residual stream itself."""
        n = self.model.n_layers
        return [_EMBEDDINGS, *(Address(i) for i in (range(n) if self.by == "layer" else [n - 1]))]

    @cached_property
    def sources(self) -> list[Part]:
        """The parts whose linear module's input is caught too."""
        wanted = {"head": "attn_out", "neuron_topk": "mlp_out"}.get(self.by)
        chosen = [
            part for of in self.parts.values() for part in of if part.component == wanted and part.split is not None
        ]
        return [part for part in chosen if part.heads or self.by == "neuron_topk"]

    @cached_property
    def places(self) -> list[Place]:
        """What is caught besides."""
        return [
            *(part.place for of in self.parts.values() for part in of),
            *(part.split.source for part in self.sources if part.split is not None),
        ]

    @property
    def row_bytes(self) -> int:
        """Room that what is caught of one token takes."""
        widths = [part.split.width for part in self.sources if part.split is not None]
        numbers = self.model.d_model * (len(self.stream) + sum(map(len, self.parts.values()))) + sum(widths)
        return numbers * self.model.anatomy.stream_dtype.itemsize

    @cached_property
    def components(self) -> tuple[Address, ...]:
        """What the contributions belong to, in the order of the data."""
        if self.by == "layer":
            return (_EMBEDDINGS, *(Address(i, "layer_out") for i in range(self.model.n_layers)), _BIAS)
        names: list[Address] = [_EMBEDDINGS]
        for address, parts in self.parts.items():
            heads = [part for part in parts if part in self.sources] if self.by == "head" else []
            if heads:
                total = sum(part.heads for part in heads)
                names += [Address(address.layer, address.component, f"h{i}") for i in range(total)]
                if self._has_rest(parts):
                    names.append(Address(address.layer, address.component, "rest"))
            else:
                names.append(address)
        return (*names, _BIAS)

    def _has_rest(self, parts: Sequence[Part]) -> bool:
        """Whether a component is more than its heads: a bias, or something beside an attention."""
        return any(part not in self.sources or (part.split is not None and part.split.biased) for part in parts)

    def contributions(
        self, stream: Mapping[Address, Rows], caught: Mapping[Place, Tensor], at: Directions, main: Shares
    ) -> tuple[Float[Tensor, "row answer component"], Tensor, Tensor]:
        """Contributions of all components, and of the neurons that weigh most.

        Args:
            stream: rows of the stream.
            caught: rows of what was caught besides.
            at: the directions.
            main: what answers are weighed with where one number is needed.
        """

        def read(rows: Tensor, scale: Tensor) -> Tensor:
            return torch.einsum("rd,rad->ra", exact(rows).cpu() * scale, at.rows)

        n = self.model.n_layers
        shares = [read(stream[_EMBEDDINGS], self.after[0])]
        if self.by == "layer":
            for layer in range(n):
                before = stream[Address(layer - 1)] if layer else stream[_EMBEDDINGS]
                shares.append(read(stream[Address(layer)], self.after[layer + 1]) - read(before, self.after[layer]))
        neurons = _Best(self.kept)
        for address, parts in self.parts.items():
            assert address.layer is not None
            scale = self.after[address.layer + 1]
            whole = {part: read(caught[part.place], scale * part.scale) for part in parts}
            if self.by != "head" or not any(part in self.sources for part in parts):
                shares.append(torch.stack(list(whole.values())).sum(0))
            rest = torch.zeros_like(shares[0])
            for part in parts:
                if part not in self.sources:
                    rest = rest + whole[part]
                    continue
                each, bias = _inputs(part, caught, at.rows * (scale * part.scale))
                rest = rest + bias
                if self.by == "head":
                    shares += each.unflatten(-1, (part.heads, -1)).sum(-1).unbind(-1)
                else:
                    neurons.add(each, address.layer, main)
            if self.by == "head" and any(part in self.sources for part in parts) and self._has_rest(parts):
                shares.append(rest)
        return torch.stack([*shares, at.bias], dim=-1), neurons.values, neurons.index


def _inputs(
    part: Part, caught: Mapping[Place, Tensor], w: Float[Tensor, "row answer d_model"]
) -> tuple[Float[Tensor, "row answer input"], Shares]:
    """What each input of a part's linear module contributes, the scales of norms after it frozen, and what biases do."""
    split = part.split
    assert split is not None
    given = caught[split.source]
    module = split.source.module
    seen = [module(given.unsqueeze(0))]
    for step in split.steps:
        x = seen[-1] * step.scale.to(seen[-1].device, seen[-1].dtype)
        seen.append(step.module(x) if step.module is not None else x)
    bias = torch.zeros(w.shape[:2], dtype=w.dtype)
    for index in reversed(range(len(split.steps))):
        step = split.steps[index]
        if step.norm is not None:
            x = exact(seen[index][0]).cpu() * step.scale
            scale, misfit = on_cpu(step.norm).scale(x, seen[index + 1][0].cpu())
            check_norm(misfit, given.dtype, split.source.name)
            bias = bias + w @ on_cpu(step.norm).bias
            w = on_cpu(step.norm).pull(w, scale)
        w = w * step.scale
    pulled, more = pull_linear(module, w, split.width, given.dtype, given.device)
    return pulled * exact(given).cpu().unsqueeze(1), bias + more


class _Best:
    """The neurons that weigh most so far.

    Args:
        k: how many.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.values = torch.empty(0)
        self.index = torch.empty(0, dtype=torch.int32)

    def add(self, each: Float[Tensor, "row answer neuron"], layer: int, main: Shares) -> None:
        """Consider those of one layer."""
        number = torch.arange(each.shape[-1], dtype=torch.int32).expand(each.shape[0], -1)
        index = torch.stack([torch.full_like(number, layer), number], dim=-1)
        if self.values.numel():
            each, index = torch.cat([self.values, each], dim=-1), torch.cat([self.index, index], dim=1)
        weight = (each.nan_to_num(0.0) * main.unsqueeze(-1)).sum(1).abs()
        best = weight.topk(min(self.k, weight.shape[-1]), dim=-1).indices
        self.values = each.gather(2, best.unsqueeze(1).expand(-1, each.shape[1], -1))
        self.index = index.gather(1, best.unsqueeze(-1).expand(-1, -1, 2))


def _splitter(model: MuranoModel, by: str, neurons: int) -> _Split:
    """How a model's logits are split.

    Raises:
        InputError: this family can't be split so finely.
    """
    readout = LinearReadout.of(model)  # first: what it refuses, it refuses by whatever one splits
    parts, one = model.parts, torch.ones((), dtype=torch.float64)
    after = [one]
    for keep in reversed(parts.keeps if parts.keeps else [one] * model.n_layers):
        after.insert(0, after[0] * keep)
    if by == "layer":
        return _Split(model, by, {}, after, readout)
    if not parts.parts:
        raise InputError(
            f"{model.model_id} can't be attributed by {by}: {parts.reason}. Use by='layer', which needs no parts."
        )
    grouped: dict[Address, list[Part]] = {}
    for part in parts.parts:
        grouped.setdefault(Address(part.layer, part.component), []).append(part)
    split = _Split(model, by, grouped, after, readout)
    if by == "neuron_topk":
        there = sum(part.split.width for part in split.sources if part.split is not None)
        split = replace(split, kept=min(neurons, there))
    if by != "component" and not split.sources:
        what = "heads" if by == "head" else "neurons (an MLP that ends in one linear module)"
        raise InputError(f"{type(model.hf_model).__name__} has no {what} to attribute to. Use by='component'.")
    return split


def _read(
    model: MuranoModel,
    split: _Split,
    batch: batching.Batch,
    cells: Cells,
    answer_ids: Int[Tensor, "prompt answer"],
    main: Float[Tensor, "prompt answer"],
    table: _Tables,
) -> None:
    """One batch: a forward that hands out rows as they pass, then contributions, a bounded chunk of rows at a time."""
    row, position, cell = cells.of_batch(batch)
    stream: dict[Address, Tensor] = {}
    last: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        return tensor.reshape(*batch.ids.shape, -1)[row.to(tensor.device), position.to(tensor.device)]

    def on_stream(address: Address, tensor: Tensor) -> None:
        stream[address] = take(tensor)
        if address == split.stream[-1]:
            last.append(tensor[:1, -1:].clone())

    ids, ending = batch.ids.to(model.device), model.ending  # finding the ending runs the model: not while it is watched
    with catching(split.places, take) as caught:
        own = residuals.forward(model.anatomy, ids, split.stream, on_stream, ending=ending)
    assert own is not None
    prompt = torch.tensor(batch.prompts)[row]
    buffer = model.tail.buffer(1, model.vocab_size)
    for chunk in _chunks(len(row), MAX_CHUNK_BYTES // (buffer.numel() * buffer.element_size())):
        ids = answer_ids[prompt[chunk]]
        final = stream[split.stream[-1]][chunk]
        at = split.readout.directions(final, ids)
        shares, values, index = split.contributions(
            {a: s[chunk] for a, s in stream.items()}, {p: s[chunk] for p, s in caught.items()}, at, main[prompt[chunk]]
        )
        _check(model, final, shares, at, batch)
        there = ids != NO_TOKEN
        table.contributions[cell[chunk]] = torch.where(there.unsqueeze(-1), shares, torch.nan).float()
        table.logits[cell[chunk]] = torch.where(there, at.logits, torch.nan).float()
        table.model_logits[cell[chunk]] = torch.where(there, at.capped, torch.nan).float()
        if split.kept:
            k = index.shape[1]
            table.neurons[cell[chunk], :, :k] = torch.where(there.unsqueeze(-1), values, torch.nan).float()
            table.neuron_index[cell[chunk], :k] = index
    # The readout that was attributed is the model's own: as in the lens, on one row of every batch.
    apart = difference(model.tail(last[0])[:, -1:].cpu(), own[:1, -1:].cpu())
    if apart > another_shape(own):
        raise ReadoutError(
            f"The logits that were attributed are not the model's own: they differ by {apart:.3g} on prompt {batch.prompts[0]}. "
            "Was the model changed after it was loaded?"
        )


def _chunks(n: int, size: int) -> Iterator[slice]:
    step = max(1, size)
    return (slice(start, start + step) for start in range(0, n, step))


def _check(
    model: MuranoModel, last: Rows, shares: Float[Tensor, "row answer component"], at: Directions, batch: batching.Batch
) -> None:
    """Whether the directions read the model's logits, and whether what was written adds up to what they read.

    Raises:
        ReadoutError: one or the other is off by more than rounding.
    """
    whole = torch.einsum("rd,rad->ra", exact(last).cpu(), at.rows) + at.bias
    wrong = (at.logits - whole).abs() > at.rounding.unsqueeze(-1)
    if bool(wrong.any()):
        off = float((at.logits - whole).abs().max())
        raise ReadoutError(
            f"The final norm with its scale frozen is {off:.3g} off the model's logits, in the batch of prompt {batch.prompts[0]}. "
            "Was the model changed after it was loaded?"
        )
    left = (whole - shares.sum(-1)).abs()
    if not bool((left <= 4 * tolerance(model.anatomy.stream_dtype) * shares.abs().sum(-1).clamp_min(1.0)).all()):
        raise ReadoutError(
            f"Contributions leave {float(left.max()):.3g} of a logit over, in the batch of prompt {batch.prompts[0]}: what the blocks "
            "write is no longer what was proved when the model was loaded. Was it changed?"
        )
