"""Reading one batch after another where the weights are in an engine: its workers read, and what comes home is put into the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.errors import InputError
from murano.model import MuranoModel, batching
from murano.model.vllm import VLLMModel, number_cells
from murano.model.wire import pack
from murano.reader import NO_RANK, Cells, Reader, Tables


def reader_of(model: MuranoModel) -> Any:
    """The reader of this model's backend."""
    return EngineReader if isinstance(model, VLLMModel) else Reader


class EngineReader:
    """To :func:`murano.lens.read_all` what :class:`murano.reader.Reader` is.

    Args:
        model: in an engine.
        addresses: what is read, one per layer of the tables.
        tables: where results go.
        max_chunk_bytes: room for logits, in a worker.
        product: the engine has its own: only ``"auto"``, ``"torch"`` and ``"tiles"`` mean it.
        tokens: ids whose log-probability and rank are read in each cell; -1 for none.
        divergences: which divergences from the last layer are read.
        apart: nothing changes: which rows share a product is the engine's own affair.

    Raises:
        InputError: a product that is not the engine's, or all logits are to be brought home.
    """

    def __init__(
        self,
        model: VLLMModel,
        addresses: Sequence[Address],
        tables: Tables,
        max_chunk_bytes: int,
        product: str,
        tokens: Int[Tensor, "cell token"] | None = None,
        divergences: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        if product not in ("auto", "torch", "tiles"):
            raise InputError(f"product={product!r}: inside vLLM the engine's own product is used. Leave it out.")
        if tables.logits is not None:
            raise InputError(
                "keep='logits' would bring whole vocabularies home from vLLM. Use keep='residuals' and decode the cells you need."
            )
        row = 4 * model.vocab_size
        if max_chunk_bytes < (2 if divergences else 1) * row:
            raise InputError(f"max_chunk_bytes={max_chunk_bytes} has no room for logits: use at least {2 * row}.")
        model.check_layers(addresses)
        self.model, self.addresses, self.tables = model, list(addresses), tables
        self.tokens = tokens if tokens is not None and tokens.shape[-1] else None
        self.options: dict[str, Any] = {
            "top_k": tables.top_ids.shape[-1],
            "divergences": list(divergences),
            "keep": None if tables.residuals is None else "residuals",
            "max_chunk_bytes": max_chunk_bytes,
        }

    def read(self, batch: batching.Batch, cells: Cells) -> None:
        """One batch through the engine."""
        row, position, cell = cells.of_batch(batch)
        # One position may be asked for in two cells: the engine reads it once.
        width = max(batch.lengths)
        places, of_cell = (row * width + position).unique(return_inverse=True)
        table = torch.full((len(batch.prompts) * width,), -1, dtype=torch.int32)
        table[places] = torch.arange(len(places), dtype=torch.int32)
        first = torch.empty_like(places).scatter_(0, of_cell, cell)
        ids = {i: batch.ids[i, :length].tolist() for i, length in enumerate(batch.lengths)}
        with self._asking(first, table.view(-1, width)):
            self.model.run(ids)
            found = self.model.answer()
        self._put(cell, {n: t[..., of_cell] if n == "divergences" else t[:, of_cell] for n, t in found.items()})

    def read_residuals(self, rows: Float[Tensor, "layer cell d_model"], there: Bool[Tensor, " cell"]) -> None:
        """Reduce residuals that were kept, without a forward; as :meth:`murano.reader.Reader.read_residuals`."""
        cell = there.nonzero().flatten()
        if self.options["divergences"] and Address(self.model.n_layers - 1) not in self.addresses:
            raise InputError(
                f"Divergences need the last layer, L{self.model.n_layers - 1}.resid_post, which was not kept."
            )
        with self._asking(cell, None):
            self.model.call("murano_feed", pack({"rows": rows[:, cell]}))
            self._put(cell, self.model.answer())

    def flush(self) -> None:
        """Nothing waits here."""

    def _asking(self, cell: Int[Tensor, " cell"], table: Tensor | None) -> Any:
        tokens = None if self.tokens is None else self.tokens[cell].clamp(min=0)
        return self.model.asking(self.addresses, len(cell), table, tokens, **self.options)

    def _put(self, cell: Int[Tensor, " cell"], found: dict[str, Tensor]) -> None:
        for name, values in found.items():
            table = getattr(self.tables, name)
            if name == "divergences":
                table[:, :, cell] = values
            else:
                table[:, cell] = values
        if self.tokens is not None:
            layer, nobody = slice(None), self.tokens[cell] < 0
            log_probs, ranks = self.tables.token_log_probs, self.tables.token_ranks
            log_probs[layer, cell] = log_probs[layer, cell].masked_fill(nobody, torch.nan)
            ranks[layer, cell] = ranks[layer, cell].masked_fill(nobody, NO_RANK)
        for address, note in self.model.odd.items():
            if not any(note.split(" from ")[0] in other for other in self.tables.odd.values()):
                self.tables.odd[address] = note


@dataclass(frozen=True)
class Written:
    """What an engine wrote, read at every token: ``prompt × steps`` cells in ``tables``, step by step within each prompt.

    Args:
        tables: one row per layer and cell; ``token_log_probs`` and ``token_ranks`` are of the token that was written there.
        tokens: the tokens of each prompt; fewer than steps where it ended.
        own_log_probs: the log-probability that the engine itself gave to each.
    """

    tables: Tables
    tokens: list[list[int]]
    own_log_probs: list[list[float]]


def read_generation(
    model: VLLMModel,
    encoded: Sequence[Sequence[int]],
    addresses: Sequence[Address],
    *,
    max_new_tokens: int,
    top_k: int = 5,
    max_chunk_bytes: int,
    max_held_bytes: int,
    each: Sequence[Mapping[str, Any]] = (),
    **sampling: Any,
) -> Written:
    """Let the engine continue prompts, and read the row that each new token is predicted from.

    Args:
        model: in an engine.
        encoded: the tokens of each prompt.
        addresses: what is read, one per layer of the tables.
        max_new_tokens: how many tokens each prompt is continued by at most.
        top_k: how many tokens of each distribution are kept.
        max_chunk_bytes: room for logits, in a worker.
        max_held_bytes: room in a worker for rows, which wait until it is known what was written; says how many prompts run together.
        each: settings of each prompt, of those below.
        sampling: of vLLM's ``SamplingParams``: ``stop_token_ids``, ``temperature``, ``top_p``, ``seed``.
    """
    steps, n_layers = max_new_tokens, len(addresses) + 1
    tables = Tables.empty(len(addresses), len(encoded) * steps, top_k, 1)
    tokens: list[list[int]] = []
    own: list[list[float]] = []
    at_once = max(1, max_held_bytes // (n_layers * steps * model.d_model * model.stream_dtype.itemsize))
    for start in range(0, len(encoded), at_once):
        group = encoded[start : start + at_once]
        cells, n_cells = number_cells([range(len(ids) - 1, len(ids) - 1 + steps) for ids in group])
        with model.asking(addresses, n_cells, cells, top_k=top_k, max_chunk_bytes=max_chunk_bytes, late_tokens=1):
            own_settings = dict(enumerate(each[start : start + at_once]))
            done = model.run(dict(enumerate(group)), max_tokens=steps, each=own_settings, logprobs=0, **sampling)
            written = [done[i][0] for i in range(len(group))]
            ids = torch.tensor([[*ids, *[0] * (steps - len(ids))] for ids in written])
            found = model.answer(ids.view(-1, 1))
        there = (
            (torch.arange(steps) < torch.tensor([len(ids) for ids in written]).unsqueeze(1)).flatten().nonzero()[:, 0]
        )
        for name, values in found.items():
            if name != "divergences":
                getattr(tables, name)[:, start * steps + there] = values[:, there]
        tables.odd |= model.odd
        tokens += written
        own += [done[i][1] for i in range(len(group))]
    return Written(tables, tokens, own)
