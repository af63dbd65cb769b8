"""Reading one batch after another: rows of the residual stream through the tail, a bounded chunk at a time, into tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.address import Address
from murano.artifacts.words import NO_TOKEN
from murano.errors import InputError, ReadoutError
from murano.model import MuranoModel, batching, residuals
from murano.model.product import Product
from murano.model.proof import rounding
from murano.model.tail import ShortPath
from murano.readout.reduce import RowStats, reduce_rows, slice_rows
from murano.readout.request import check_whole
from murano.readout.stats import log_softmax
from murano.tiles import FEWEST_ROWS, Tiles, plan, turns, whole_panels
from murano.waiting import Waiting

logger = logging.getLogger(__name__)

#: Rows from which on it pays to time the matrix products that are at hand.
WORTH_TIMING = 16384
#: The rank of a token that was not asked about in a cell.
NO_RANK = -1


@dataclass
class Cells:
    """Where results go: every requested position of every prompt is a cell, on a grid aligned at the prompts' ends."""

    input_ids: Int[Tensor, "prompt position"]
    position_index: Int[Tensor, "prompt position"]

    @classmethod
    def of(cls, encoded: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Cells:
        """The cells of prompts of which these positions are read, none for a prompt that is left out."""
        width = max(map(len, positions), default=0)
        ids = torch.full((len(encoded), width), NO_TOKEN)
        index = torch.full((len(encoded), width), -1)
        for prompt, (tokens, here) in enumerate(zip(encoded, positions, strict=True)):
            if here:
                at = torch.tensor([p % len(tokens) for p in here])
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
    token_log_probs: Tensor
    token_ranks: Tensor
    divergences: Tensor
    residuals: Tensor | None = None
    logits: Tensor | None = None
    odd: dict[Address, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, layers: int, cells: int, top_k: int, tokens: int = 0, divergences: int = 0) -> Tables:
        def nan(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"))

        ids = torch.full((layers, cells, top_k), NO_TOKEN, dtype=torch.int32)
        return cls(
            ids,
            nan(layers, cells, top_k),
            nan(layers, cells),
            nan(layers, cells),
            nan(layers, cells, tokens),
            torch.full((layers, cells, tokens), NO_RANK, dtype=torch.int32),
            nan(divergences, layers, cells),
        )


class Reader:
    """Reads one batch after another into the tables, through one buffer for logits.

    Rows of several layers, and of several batches, are gathered until they fill a chunk: a product of many rows is far cheaper than
    many products of a few.

    Args:
        model: the model.
        addresses: what is read, one per layer of the tables.
        tables: where results go.
        max_chunk_bytes: room for logits.
        product: which matrix product.
        tokens: ids whose log-probability and rank are read in each cell; -1 for none.
        divergences: which divergences from the last layer are read, as many as the tables have room for.
        apart: whether rows of different layers never share a product, so that a layer's numbers do not depend on which others are read.

    Raises:
        InputError: no room for one row, or an address that does not exist.
    """

    def __init__(
        self,
        model: MuranoModel,
        addresses: Sequence[Address],
        tables: Tables,
        max_chunk_bytes: int,
        product: str,
        tokens: Int[Tensor, "cell token"] | None = None,
        divergences: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        self.model, self.addresses, self.tables = model, addresses, tables
        self.tail = model.tail
        self.last = Address(model.n_layers - 1)
        # ln_final is the last block's output after the norm: reading it through the rest of the tail is reading that block.
        self.sources = [self.last if a.component == "ln_final" else a for a in addresses]
        self.mid = model.mid if any(a.component == "resid_mid" for a in addresses) else {}
        residuals.check_places(model.anatomy, addresses, self.mid)
        max_chunk_bytes = check_whole("max_chunk_bytes", max_chunk_bytes)
        row = self.tail.buffer(1, model.vocab_size)
        row_bytes = row.numel() * row.element_size()
        fewest = 2 if divergences else 1  # a row and what it diverges from
        if max_chunk_bytes < fewest * row_bytes:
            raise InputError(
                f"max_chunk_bytes={max_chunk_bytes} has no room for {'two rows' if divergences else 'one row'} of logits: "
                f"use at least {fewest * row_bytes}."
            )
        self.tokens = tokens if tokens is not None and tokens.shape[-1] else None
        self.divergences = tuple(divergences)
        #: Rows of one forward that can't be read before it has ended, and their layers in the tables.
        self.held: list[tuple[int, Tensor]] = []
        self.whole = self.chunk = whole_panels(max_chunk_bytes // row_bytes)
        width, tiles = row.shape[1], None
        if product != "torch" and not divergences and tables.logits is None and self.tail.tiles is not None:
            tiles = plan(row, tables.top_ids.shape[-1], max_chunk_bytes)
        rows = self.chunk
        if tiles is not None:
            rows, width = tiles
            self.chunk = rows * turns(tables.top_ids.shape[-1])
        self.buffer = row
        self.scratch: Tensor | None = None
        self.apart = apart
        self.waiting = Waiting(min(self.chunk, max(1, tables.entropy.numel())), row.device)
        # Timing the products costs as much as a few chunks: not worth it for a few chunks.
        few = tables.entropy.numel() < WORTH_TIMING
        chosen = model.product(rows, "tiles" if product == "auto" and few else product, width)
        self.slice_bytes = chosen.slice_bytes
        self.product: Product | None = chosen.product if tiles is None else None
        self.tiles: Tiles | None = None
        if tiles is not None and isinstance(self.tail, ShortPath):
            self.tiles = Tiles(self.tail, chosen.product, *tiles, chosen.slice_bytes)

    def read(self, batch: batching.Batch, cells: Cells) -> None:
        """One forward; the wanted layers are reduced as they pass, and the last one is held against the model's own logits."""
        row, position, cell = cells.of_batch(batch)
        logger.info("Forward of %d prompts × %d tokens, read at %d places", *batch.ids.shape, len(self.addresses))
        final: list[Tensor] = []
        # A replayed tail can't run inside the forward that is being read, and divergences need the last layer.
        inside = self.tail.name == "short" and not self.divergences
        self.held = []

        def on_stream(address: Address, stream: Float[Tensor, "batch position d_model"]) -> None:
            place = (row.to(stream.device), position.to(stream.device))
            if address in self.sources:
                step = self.chunk if inside else max(1, len(cell))
                # Of a long prompt's rows few at a time are copied.
                rows = stream[place] if len(cell) <= step else None
                self._note_odd(address, *((stream, place) if rows is None else (rows,)))
                for start in range(0, len(cell), step):
                    part = slice(start, start + step)
                    some = stream[place[0][part], place[1][part]] if rows is None else rows
                    self._take(address, some, cell[part], later=not inside)
            if address == self.last:
                final.append(stream[:1, batch.lengths[0] - 1])
                if self.divergences:
                    final.append(stream[place])

        ending = self.model.ending  # found out by forwards of its own
        with self.model.in_pieces(batch.ids.shape[1]):
            logits = residuals.forward(
                self.model.anatomy,
                batch.ids.to(self.model.device),
                {*self.sources, self.last},
                on_stream,
                ending=ending,
                mid=self.mid,
            )
        if self.divergences:
            self._compare(final[1], cell)
        while self.held:
            self._gather(*self.held.pop(0), cell)
        assert logits is not None
        self._check(final[0], logits[:1, -1], batch)

    def read_rows(self, rows: Mapping[Address, Float[Tensor, "row d_model"]], cell: Int[Tensor, " row"]) -> None:
        """Reduce rows that a forward has handed out; what does not fill a chunk waits for more.

        Args:
            rows: of each source, one row for each cell; of the last layer too where divergences from it are read.
            cell: where they go.
        """
        for address, of_layer in rows.items():
            self._note_odd(address, of_layer)
            self._take(address, of_layer, cell, later=bool(self.divergences))
        if self.divergences:
            self._compare(rows[self.last], cell)

    def keep_rows(self, rows: Mapping[Address, Float[Tensor, "row d_model"]], cell: Int[Tensor, " row"]) -> None:
        """Keep the residuals of rows that a forward has handed out, and read nothing of them."""
        for address, of_layer in rows.items():
            self._note_odd(address, of_layer)
            self._keep(address, of_layer, cell)

    def read_residuals(self, rows: Float[Tensor, "layer cell d_model"], there: Bool[Tensor, " cell"]) -> None:
        """Reduce residuals that were kept, without a forward.

        Args:
            rows: one for each address and cell.
            there: which cells hold a position.

        Raises:
            InputError: divergences without the last layer's residuals.
        """
        cell = there.nonzero().flatten()
        if self.divergences and self.last not in self.sources:
            raise InputError(f"Divergences need the last layer, {self.last}, which was not kept.")
        # The same source may be named twice: as a layer and as what is read after it.
        for source, of_layer in dict(zip(self.sources, rows, strict=True)).items():
            self._note_odd(source, of_layer[cell])
            self._take(source, of_layer[cell], cell, later=bool(self.divergences))
        if self.divergences:
            self._compare(rows[self.sources.index(self.last), cell], cell)
        self.flush()

    def _take(
        self, source: Address, rows: Float[Tensor, "row d_model"], cell: Int[Tensor, " row"], *, later: bool
    ) -> None:
        for layer in self._keep(source, rows, cell):
            if later:
                self.held.append((layer, rows))
            else:
                self._gather(layer, rows, cell)

    def _keep(self, source: Address, rows: Float[Tensor, "row d_model"], cell: Int[Tensor, " row"]) -> list[int]:
        """Keep a source's residuals where that was asked for, and say which layers of the tables read it."""
        layers = [layer for layer, own in enumerate(self.sources) if own == source]
        if self.tables.residuals is not None:
            for layer in layers:
                self.tables.residuals[layer, cell] = rows.to("cpu", self.tables.residuals.dtype)
        return layers

    def _gather(self, layer: int, rows: Float[Tensor, "row d_model"], cell: Int[Tensor, " row"]) -> None:
        """Read the chunks that rows of a layer fill; what is left of them waits."""
        for chunk in self.waiting.add(rows, layer * self.tables.entropy.shape[1] + cell):
            self._read(*chunk)
        if self.apart:
            self.flush()

    def flush(self) -> None:
        """Read the rows that wait."""
        for chunk in self.waiting.rest():
            self._read(*chunk)

    def _compare(self, final: Float[Tensor, "cell d_model"], cell: Int[Tensor, " cell"]) -> None:
        """Reduce the rows that were held, each beside the last layer's distribution in the same cell."""
        device, n_cells = self.buffer.device, self.tables.entropy.shape[1]
        held, self.held = [(layer, rows.to(device)) for layer, rows in self.held], []
        # Few cells at a time with all their layers: each last distribution is made once, or once for as many layers as fit.
        group = max(1, self.chunk // (len(held) + 1))
        layers = self.chunk // group - 1
        for start in range(0, len(cell), group):
            part = slice(start, start + group)
            last = final[part].to(device)
            for first in range(0, len(held), layers):
                beside = held[first : first + layers]
                logits = self._project(torch.cat([last, *(rows[part] for _, rows in beside)]))
                reference = logits[: len(last)]
                reference = reference if self.tail.finish is None else self.tail.finish(reference)
                place = torch.cat([layer * n_cells + cell[part] for layer, _ in beside])
                self._reduce(logits[len(last) :], place, log_softmax(reference))

    def _read(self, rows: Float[Tensor, "row d_model"], place: Int[Tensor, " row"]) -> None:
        if self.tiles is not None and len(rows) >= FEWEST_ROWS:
            read = self.tiles.read(rows, self.tables.top_ids.shape[-1], self._tokens(place))
            if read is not None:
                stats, sure = read
                self._write(stats, place)
                rows, place = rows[~sure], place[~sure]
        for start in range(0, len(rows), self.whole):
            part = slice(start, start + self.whole)
            self._reduce(self._project(rows[part]), place[part])

    def _reduce(
        self,
        logits: Float[Tensor, "row vocab"],
        place: Int[Tensor, " row"],
        reference: Float[Tensor, "cell vocab"] | None = None,
    ) -> None:
        tables = self.tables
        if tables.logits is not None:
            own = logits if self.tail.finish is None else self.tail.finish(logits)
            tables.logits.flatten(0, 1)[place] = own.to("cpu", tables.logits.dtype)
        stats = reduce_rows(
            logits,
            tables.top_ids.shape[-1],
            self.tail.finish,
            self.scratch,
            tokens=self._tokens(place, logits.device),
            reference=reference,
            divergences=self.divergences,
        )
        self._write(stats, place)

    def _tokens(
        self, place: Int[Tensor, " row"], device: torch.device | str = "cpu"
    ) -> Int[Tensor, "row token"] | None:
        """The tokens that are asked about in each row; any token where there is none."""
        if self.tokens is None:
            return None
        return self.tokens[place % self.tables.entropy.shape[1]].clamp(min=0).to(device)

    def _write(self, stats: RowStats, place: Int[Tensor, " row"]) -> None:
        tables = self.tables
        strange = ~stats.log_normalizer.isfinite()
        if bool(strange.any()):
            layer = int(place[strange.to(place.device)].min()) // tables.entropy.shape[1]
            self._note("not finite", self.addresses[layer], f"Logits are not finite at {self.addresses[layer]}.")
        tables.top_ids.flatten(0, 1)[place] = stats.top_ids.to("cpu", torch.int32)
        tables.top_probs.flatten(0, 1)[place] = stats.top_probs.cpu()
        tables.entropy.view(-1)[place] = stats.entropy.cpu()
        tables.log_normalizer.view(-1)[place] = stats.log_normalizer.cpu()
        if self.tokens is not None and stats.token_log_probs is not None and stats.token_ranks is not None:
            nobody = self.tokens[place % tables.entropy.shape[1]] < 0
            log_probs = stats.token_log_probs.cpu().masked_fill(nobody, torch.nan)
            nobody = log_probs.isnan()  # nor is there a rank among logits that are not finite
            tables.token_log_probs.flatten(0, 1)[place] = log_probs
            ranks = stats.token_ranks.to("cpu", torch.int32)
            tables.token_ranks.flatten(0, 1)[place] = ranks.masked_fill(nobody, NO_RANK)
        for table, name in zip(tables.divergences, self.divergences, strict=True):
            table.view(-1)[place] = stats.divergences[name].cpu()

    def _project(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        n = len(rows)
        if len(self.buffer) < n:
            vocab = self.model.vocab_size
            self.buffer = self.tail.buffer(n, vocab)
            if self.buffer.device.type == "cpu":
                self.scratch = torch.empty(slice_rows(n, vocab, self.slice_bytes), vocab)
        return self.tail.project(rows, self.buffer[:n], self.product)

    def _note_odd(self, source: Address, stream: Float[Tensor, "*row d_model"], place: Any = ...) -> None:
        """Say what is odd about rows of the stream: all of them, or those in some places."""
        peak = torch.linalg.vector_norm(stream, torch.inf, dim=-1)[place]
        for address, own in zip(self.addresses, self.sources, strict=True):
            if own == source:
                for what, where in (("not finite", ~peak.isfinite()), ("all zero", peak == 0)):
                    count = int(where.sum())
                    if count:
                        note = f"Residuals are {what} from {address} on ({count} of {peak.numel()} rows there)."
                        self._note(what, address, note)

    def _note(self, what: str, address: Address, note: str) -> None:
        """Say once what is odd."""
        if not any(what in other for other in self.tables.odd.values()):
            self.tables.odd[address] = note

    def _check(self, last: Float[Tensor, "1 d_model"], own: Float[Tensor, "1 vocab"], batch: batching.Batch) -> None:
        read = self.tiles.logits(last, self.buffer) if self.tiles is not None else self._project(last)
        read = (self.tail.finish(read) if self.tail.finish is not None else read)[..., : own.shape[-1]].float().cpu()
        theirs = own.float().cpu()
        finite = theirs.isfinite() & read.isfinite()
        if bool(theirs.isnan().any()):  # as the lens says too, but perhaps of a layer that was not asked for
            self._note("not finite", self.last, f"The model's own logits are not finite, in prompt {batch.prompts[0]}.")
        gap = float((read - theirs)[finite].abs().max()) if bool(finite.any()) else 0.0
        # The row was computed alone here and in a batch there: products of another shape round differently.
        if gap > 4 * rounding(own) or bool((theirs.isfinite() != read.isfinite()).any()):
            raise ReadoutError(
                f"The lens disagrees with the model: at {self.last}, last position of prompt {batch.prompts[0]}, "
                f"a logit differs by {gap:.3g}. "
                "Nothing that was read can be trusted. Was the model changed after it was loaded? Make a new MuranoModel from it."
            )
