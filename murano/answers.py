"""Targets and foils of a set of prompts: which tokens are read where, and answers of several tokens read whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts.words import NO_TOKEN
from murano.engine_reader import reader_of
from murano.model import MuranoModel
from murano.model.targets import Answer
from murano.reader import NO_RANK, Cells, Reader, Tables
from murano.readout.stats import STATS

#: What :func:`murano.model.targets.answers_of` gives for one prompt: ``"targets"`` and ``"foils"``.
Answers = dict[str, list[Answer]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is read in each cell.

    Args:
        answers: targets and foils of each prompt.
        mode: how those of several tokens are read.
        tokens: ids whose log-probability and rank are read: targets, foils, and where it is asked for the one that follows in the prompt.
        stats: the statistics that were asked for.
        top_k: how many tokens are kept.
        read_k: how many are read: a margin needs two.
    """

    answers: Sequence[Answers]
    mode: str
    tokens: Int[Tensor, "prompt position token"]
    stats: tuple[str, ...]
    top_k: int
    read_k: int

    @classmethod
    def of(
        cls,
        answers: Sequence[Answers],
        encoded: Sequence[Sequence[int]],
        cells: Cells,
        stats: tuple[str, ...],
        top_k: int,
        vocab_size: int,
        mode: str = "first",
    ) -> Question:
        """The question for these cells."""
        shape = cells.position_index.shape
        tokens = torch.cat(first_tokens(answers), dim=1).unsqueeze(1).expand(*shape, -1)
        if any(STATS[name].needs == "next" for name in stats):
            tokens = torch.cat([tokens, _following(encoded, cells).unsqueeze(2)], dim=2)
        read_k = max(top_k, min(2, vocab_size)) if "margin" in stats else top_k
        return cls(answers=answers, mode=mode, tokens=tokens.contiguous(), stats=stats, top_k=top_k, read_k=read_k)

    @property
    def divergences(self) -> list[str]:
        """The statistics that need the last layer's distribution."""
        return [name for name in self.stats if STATS[name].needs == "last"]

    @property
    def bytes_of_cell(self) -> int:
        """What the tables take for one layer at one position: ids and probabilities, two sums, tokens asked about, divergences."""
        return 8 * self.read_k + 8 + 8 * self.tokens.shape[-1] + 4 * len(self.divergences)

    def tables(self, layers: int, cells: int) -> Tables:
        """Room for the answers."""
        return Tables.empty(layers, cells, self.read_k, self.tokens.shape[-1], len(self.divergences))

    def reader(
        self,
        model: MuranoModel,
        addresses: Sequence[Address],
        tables: Tables,
        max_chunk_bytes: int,
        product: str,
        apart: bool = False,
    ) -> Reader:
        """A reader that fills the tables."""
        reader: Reader = reader_of(model)(
            *(model, addresses, tables, max_chunk_bytes, product, self.tokens.flatten(0, 1)),
            divergences=self.divergences,
            apart=apart,
        )
        return reader

    def fields(self, tables: Tables, shape: tuple[int, ...]) -> dict[str, Any]:
        """The artifact's fields that the tables hold.

        Args:
            tables: filled.
            shape: layers, prompts and positions.
        """
        log_probs, ranks = tables.token_log_probs.unflatten(1, shape[1:]), tables.token_ranks.unflatten(1, shape[1:])
        top_probs = tables.top_probs.unflatten(1, shape[1:])
        found = {name: table.view(shape) for name, table in zip(self.divergences, tables.divergences, strict=True)}
        found |= {"entropy": tables.entropy.view(shape), "max_prob": top_probs[..., 0]}
        if "margin" in self.stats:
            found["margin"] = top_probs[..., 0] - (top_probs[..., 1] if self.read_k > 1 else 0.0)
        if any(STATS[name].needs == "next" for name in self.stats):
            rank = ranks[..., -1]
            found |= {
                "surprisal": -log_probs[..., -1],
                "next_rank": rank.float().masked_fill(rank == NO_RANK, torch.nan),
            }
        return {
            "top_ids": tables.top_ids.unflatten(1, shape[1:])[..., : self.top_k].contiguous(),
            "top_probs": top_probs[..., : self.top_k].contiguous(),
            "entropy": tables.entropy.view(shape),
            "log_normalizer": tables.log_normalizer.view(shape),
            "stats": {name: found[name].contiguous() for name in self.stats},
            **self._answer_fields(log_probs, ranks),
        }

    def _answer_fields(
        self,
        log_probs: Float[Tensor, "layer prompt position token"],
        ranks: Int[Tensor, "layer prompt position token"],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        start = 0
        for kind, ids in zip(("target", "foil"), first_tokens(self.answers), strict=True):
            width = ids.shape[1]
            texts = tuple(tuple(a.read_as(self.mode) for a in of[f"{kind}s"]) for of in self.answers)
            columns = slice(start, start + width)
            found |= {
                f"{kind}_texts": texts if width else (),
                f"{kind}_ids": ids if width else None,
                f"{kind}_log_probs": log_probs[..., columns].contiguous() if width else None,
                f"{kind}_ranks": ranks[..., columns].contiguous() if width else None,
            }
            start += width
        return found


def first_tokens(answers: Sequence[Answers]) -> list[Int[Tensor, "prompt answer"]]:
    """The first token of each prompt's targets, and of its foils; -1 where it has fewer."""
    found = []
    for kind in ("targets", "foils"):
        ids = [[answer.ids[0] for answer in of[kind]] for of in answers]
        width = max(map(len, ids), default=0)
        rows = [[*row, *[NO_TOKEN] * (width - len(row))] for row in ids]
        found.append(torch.tensor(rows, dtype=torch.int64).view(len(ids), width))
    return found


def _following(encoded: Sequence[Sequence[int]], cells: Cells) -> Int[Tensor, "prompt position"]:
    """The token that follows each cell's in its prompt; -1 at its end."""
    follow = torch.full_like(cells.position_index, NO_TOKEN)
    for prompt, (tokens, positions) in enumerate(zip(encoded, cells.position_index.tolist(), strict=True)):
        for column, position in enumerate(positions):
            if 0 <= position < len(tokens) - 1:
                follow[prompt, column] = tokens[position + 1]
    return follow


@dataclass(frozen=True)
class AnswerRun:
    """An answer of several tokens behind its prompt.

    Args:
        prompt: index of the prompt.
        column: of the answer in the tables.
        ids: the prompt and all of the answer but its last token.
        answer: the answer's tokens.
    """

    prompt: int
    column: int
    ids: list[int]
    answer: tuple[int, ...]


def sequences(
    encoded: Sequence[Sequence[int]], answers: Sequence[Answers], left_out: Collection[int]
) -> list[AnswerRun]:
    """Every answer behind its prompt."""
    n_targets = max((len(of["targets"]) for of in answers), default=0)
    return [
        AnswerRun(prompt, start + column, [*encoded[prompt], *answer.ids[:-1]], answer.ids)
        for prompt, of in enumerate(answers)
        if prompt not in left_out
        for start, kind in ((0, "targets"), (n_targets, "foils"))
        for column, answer in enumerate(of[kind])
    ]


def read_sequences(
    make_reader: Callable[..., Reader],
    read_all: Callable[[Reader, Sequence[Sequence[int]], Cells], None],
    runs: Sequence[AnswerRun],
    tables: Tables,
    shape: tuple[int, ...],
) -> None:
    """Whole answers: log-probabilities summed, and the worst of the ranks, put where the prompt's last position is.

    Args:
        make_reader: given tables and tokens, a reader.
        read_all: has a reader read prompts.
        runs: what to read.
        tables: where the sums go.
        shape: layers, prompts and positions of the tables.
    """
    log_probs, ranks = tables.token_log_probs.unflatten(1, shape[1:]), tables.token_ranks.unflatten(1, shape[1:])
    encoded = [s.ids for s in runs]
    cells = Cells.of(encoded, [range(len(s.ids) - len(s.answer), len(s.ids)) for s in runs])
    width = cells.position_index.shape[1]
    tokens = torch.tensor([[NO_TOKEN] * (width - len(s.answer)) + list(s.answer) for s in runs])
    layers = log_probs.shape[0]
    own = Tables.empty(layers, tokens.numel(), 1, 1)
    reader = make_reader(tables=own, tokens=tokens.view(-1, 1))
    read_all(reader, encoded, cells)
    summed = own.token_log_probs.view(layers, len(runs), width).nansum(-1)
    worst = own.token_ranks.view(layers, len(runs), width).amax(-1)
    columns = sorted({s.column for s in runs})
    log_probs[..., columns], ranks[..., columns] = torch.nan, NO_RANK
    for index, s in enumerate(runs):
        log_probs[:, s.prompt, -1, s.column] = summed[:, index]
        ranks[:, s.prompt, -1, s.column] = worst[:, index]


def answer_notes(answers: Sequence[Answers], target_mode: str) -> list[str]:
    """Says which answers are special tokens, given by their ids, and which are read by their first token only."""
    special = [(i, a) for i, of in enumerate(answers) for a in (*of["targets"], *of["foils"]) if a.special]
    notes = [
        f"The target {a.ids[0]} at prompt {i} is a token id, and means the special token {a.text!r}"
        f"{f', as {len(special) - 1} more do' if len(special) > 1 else ''}: if the text is meant, write it in quotes, '{a.ids[0]}'."
        for i, a in special[:1]
    ]
    long = [(i, a) for i, of in enumerate(answers) for a in (*of["targets"], *of["foils"]) if len(a.ids) > 1]
    if not long or target_mode != "first":
        return notes
    prompt, answer = next(((i, a) for i, a in long if not a.pieces[0].strip()), long[0])
    blank = "" if answer.pieces[0].strip() else ", which is only a space and says little"
    many = len(long) > 1
    kind = "answer" if any(a in answers[i]["foils"] for i, a in long) else "target"
    return [
        *notes,
        f"{len(long)} {kind}{'s' if many else ''} of several tokens {'are' if many else 'is'} read by the first one: "
        f"of {answer} at prompt {prompt}, {answer.pieces[0]!r}{blank}. target_mode='sequence' reads all of it.",
    ]
