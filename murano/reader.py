"""Reading one batch after another: rows of the residual stream through the tail, a bounded chunk at a time, into tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts.words import NO_TOKEN
from murano.errors import InputError, ReadoutError
from murano.model import MuranoModel, batching, residuals
from murano.model.proof import rounding
from murano.readout.reduce import reduce_rows, slice_rows

#: Chunks from which on it pays to time the matrix products that are at hand.
WORTH_TIMING = 100


@dataclass
class Cells:
    """Where results go: every requested position of every prompt is a cell, on a grid aligned at the prompts' ends."""

    input_ids: Int[Tensor, "prompt position"]
    position_index: Int[Tensor, "prompt position"]

    @classmethod
    def of(cls, encoded: Sequence[Sequence[int]], positions: tuple[int, ...] | None, skipped: set[int]) -> Cells:
        width = (
            len(positions)
            if positions is not None
            else max((len(e) for i, e in enumerate(encoded) if i not in skipped), default=0)
        )
        ids = torch.full((len(encoded), width), NO_TOKEN)
        index = torch.full((len(encoded), width), -1)
        for prompt, tokens in enumerate(encoded):
            if prompt in skipped:
                continue
            here = list(range(len(tokens))) if positions is None else [p % len(tokens) for p in positions]
            at = torch.tensor(here)
            index[prompt, width - len(here) :] = at
            ids[prompt, width - len(here) :] = torch.tensor(list(tokens))[at]
        return cls(ids, index)

    def of_batch(self, batch: batching.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Row in the batch, position in the prompt, and flat cell, of every cell of a batch."""
        prompts = torch.tensor(batch.prompts)
        row, column = (self.position_index[prompts] >= 0).nonzero(as_tuple=True)
        prompt = prompts[row]
        return row, self.position_index[prompt, column], prompt * self.position_index.shape[1] + column


@dataclass
class Tables:
    """The results, filled cell by cell; one row per layer and cell."""

    top_ids: Tensor
    top_probs: Tensor
    entropy: Tensor
    log_normalizer: Tensor
    residuals: Tensor | None = None
    odd: dict[Address, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, layers: int, cells: int, top_k: int) -> Tables:
        def nan(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"))

        ids = torch.full((layers, cells, top_k), NO_TOKEN, dtype=torch.int32)
        return cls(ids, nan(layers, cells, top_k), nan(layers, cells), nan(layers, cells))


class Reader:
    """Reads one batch after another into the tables, through one buffer for logits.

    Rows of several layers, and of several batches, are gathered until they fill a chunk: a product of many rows is far cheaper than
    many products of a few.
    """

    def __init__(
        self, model: MuranoModel, addresses: Sequence[Address], tables: Tables, max_chunk_bytes: int, product: str
    ) -> None:
        self.model, self.addresses, self.tables = model, addresses, tables
        self.tail = model.tail
        self.last = Address(model.n_layers - 1)
        # ln_final is the last block's output after the norm: reading it through the rest of the tail is reading that block.
        self.sources = [self.last if a.component == "ln_final" else a for a in addresses]
        self.mid = model.mid if any(a.component == "resid_mid" for a in addresses) else {}
        residuals.check_places(model.anatomy, addresses, self.mid)
        row = self.tail.buffer(1, model.vocab_size)
        row_bytes = row.numel() * row.element_size()
        if max_chunk_bytes < row_bytes:
            raise InputError(
                f"max_chunk_bytes={max_chunk_bytes} has no room for one row of logits: use at least {row_bytes}."
            )
        self.chunk = max_chunk_bytes // row_bytes
        if self.chunk > 64:  # products run best on whole panels
            self.chunk -= self.chunk % 64
        self.buffer = row
        self.scratch: Tensor | None = None
        self.waiting: list[tuple[Tensor, Tensor]] = []
        # Timing the products costs as much as a few chunks: not worth it for a few chunks.
        few = tables.entropy.numel() < WORTH_TIMING * self.chunk
        self.product = model.product(self.chunk, "torch" if product == "auto" and few else product).product

    def read(self, batch: batching.Batch, cells: Cells) -> None:
        """One forward; the wanted layers are reduced as they pass, and the last one is held against the model's own logits."""
        row, position, cell = cells.of_batch(batch)
        final: list[Tensor] = []

        def on_stream(address: Address, stream: Float[Tensor, "batch position d_model"]) -> None:
            if address in self.sources:
                self._take(address, stream[row.to(stream.device), position.to(stream.device)], cell)
                # A replayed forward can't run inside the forward that is being read: there rows wait until it has ended.
                if self.tail.name == "short":
                    self.flush(whole_chunks=True)
            if address == self.last:
                final.append(stream[:1, batch.lengths[0] - 1])

        logits = residuals.forward(
            self.model.anatomy,
            batch.ids.to(self.model.device),
            {*self.sources, self.last},
            on_stream,
            ending=self.model.ending,
            mid=self.mid,
        )
        self.flush(whole_chunks=True)
        assert logits is not None
        self._check(final[0], logits[:1, -1], batch)

    def _take(self, source: Address, rows: Float[Tensor, "row d_model"], cell: Int[Tensor, " row"]) -> None:
        n_cells = self.tables.entropy.shape[1]
        for layer, address in enumerate(self.addresses):
            if self.sources[layer] == source:
                self._note_odd(address, rows)
                self.waiting.append((rows, layer * n_cells + cell))
                if self.tables.residuals is not None:
                    self.tables.residuals[layer, cell] = rows.to("cpu", self.tables.residuals.dtype)

    def flush(self, *, whole_chunks: bool) -> None:
        """Project and reduce the rows that wait.

        Args:
            whole_chunks: leave what does not fill a chunk for later.
        """
        while self.waiting and (not whole_chunks or sum(len(rows) for rows, _ in self.waiting) >= self.chunk):
            room, rows, places = self.chunk, [], []
            while self.waiting and room:
                waiting, place = self.waiting.pop(0)
                if len(waiting) > room:
                    self.waiting.insert(0, (waiting[room:], place[room:]))
                    waiting, place = waiting[:room], place[:room]
                rows.append(waiting.to(self.buffer.device))
                places.append(place)
                room -= len(waiting)
            self._reduce(torch.cat(rows) if len(rows) > 1 else rows[0], torch.cat(places))

    def _reduce(self, rows: Float[Tensor, "row d_model"], place: Int[Tensor, " row"]) -> None:
        tables = self.tables
        stats = reduce_rows(self._project(rows), tables.top_ids.shape[-1], self.tail.finish, self.scratch)
        tables.top_ids.flatten(0, 1)[place] = stats.top_ids.to("cpu", torch.int32)
        tables.top_probs.flatten(0, 1)[place] = stats.top_probs.cpu()
        tables.entropy.view(-1)[place] = stats.entropy.cpu()
        tables.log_normalizer.view(-1)[place] = stats.log_normalizer.cpu()

    def _project(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        n = len(rows)
        if len(self.buffer) < n:
            vocab = self.model.vocab_size
            self.buffer = self.tail.buffer(n, vocab)
            if self.buffer.device.type == "cpu":
                self.scratch = torch.empty(slice_rows(n, vocab), vocab)
        return self.tail.project(rows, self.buffer[:n], self.product)

    def _note_odd(self, address: Address, rows: Tensor) -> None:
        peak = rows.abs().amax(dim=-1)
        for what, where in (("not finite", ~peak.isfinite()), ("all zero", peak == 0)):
            count = int(where.sum())
            if count and not any(what in note for note in self.tables.odd.values()):
                self.tables.odd[address] = (
                    f"Residuals are {what} from {address} on ({count} of {len(rows)} rows there)."
                )

    def _check(self, last: Float[Tensor, "1 d_model"], own: Float[Tensor, "1 vocab"], batch: batching.Batch) -> None:
        read = self._project(last)
        read = (self.tail.finish(read) if self.tail.finish is not None else read)[..., : own.shape[-1]].float().cpu()
        theirs = own.float().cpu()
        finite = theirs.isfinite() & read.isfinite()
        gap = float((read - theirs)[finite].abs().max()) if bool(finite.any()) else 0.0
        # The row was computed alone here and in a batch there: products of another shape round differently.
        if gap > 4 * rounding(own) or bool((theirs.isfinite() != read.isfinite()).any()):
            raise ReadoutError(
                f"The lens disagrees with the model: at {self.last}, last position of prompt {batch.prompts[0]}, "
                f"a logit differs by {gap:.3g}. "
                "Nothing that was read can be trusted. Was the model changed after it was loaded? Make a new MuranoModel from it."
            )
