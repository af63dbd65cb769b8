"""Many rows, a tile of the vocabulary at a time: product and reduction together.

The unembedding is fetched from memory once for many hundred rows instead of once for as many as have room for all their logits, and what
the product writes is reduced while it is in cache. That more than pays for the reduction.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from murano.model.product import Product, gather
from murano.model.tail import ShortPath
from murano.readout.reduce import CPU_SLICE_BYTES, LOG2_E, Reduction, RowStats, slice_rows
from murano.readout.search import Search

#: Tokens in a tile, and the most rows that are read together.
WIDTH, MOST_ROWS = 4096, 768
#: How often so many rows take turns with a tile, where few tokens are kept of each: a library that packs the tile does it once for all.
TURNS, FEW_TOKENS = 4, 5
#: Fewer rows are read whole.
FEWEST_ROWS = 256
#: Rows and columns that a product takes together.
PANEL = 64
#: Tokens asked about, as a share of the vocabulary, from which on rows are read whole.
MOST_TOKENS = 1 / 8


def whole_panels(n: int) -> int:
    """``n``, less what fills no panel: products run best on whole ones."""
    return n - n % PANEL if n > PANEL else n


def plan(row: Float[Tensor, "1 vocab"], top_k: int, max_bytes: int) -> tuple[int, int] | None:
    """How many rows and tokens are read together; ``None`` where whole rows are as good.

    Args:
        row: room for one row of logits.
        top_k: how many tokens are kept of each row.
        max_bytes: room for logits.
    """
    vocab = row.shape[1]
    tiles = vocab // WIDTH
    if tiles < 2 or not Search(1, top_k, vocab).grouped:
        return None
    width = -(-vocab // (tiles * PANEL)) * PANEL
    rows = whole_panels(min(MOST_ROWS, max_bytes // (width * row.element_size())))
    return (rows, width) if rows >= FEWEST_ROWS else None


def turns(top_k: int) -> int:
    """How often rows take turns with a tile: what is kept of all of them meanwhile grows with ``top_k``."""
    return max(1, TURNS * FEW_TOKENS // max(top_k, FEW_TOKENS))


class Tiles:
    """Reads rows a tile of the vocabulary at a time.

    Args:
        tail: one whose logits can be had a few tokens at a time.
        product: how the unembedding is multiplied.
        rows: the most rows that are multiplied together.
        width: tokens in a tile.
        slice_bytes: bytes of logits that are reduced together.
    """

    def __init__(
        self, tail: ShortPath, product: Product, rows: int, width: int, slice_bytes: int = CPU_SLICE_BYTES
    ) -> None:
        self.tail, self.product, self.rows, self.width, self.slice_bytes = tail, product, rows, width, slice_bytes

    def read(
        self, rows: Float[Tensor, "row d_model"], top_k: int, tokens: Int[Tensor, "row token"] | None
    ) -> tuple[RowStats, Bool[Tensor, " row"]] | None:
        """What is kept of each row, and whether it can be relied on: where not, the row has to be read whole.

        Args:
            rows: the stream.
            top_k: how many tokens to keep.
            tokens: ids whose log-probability and rank are wanted.

        Returns:
            ``None`` if none of these rows can be read so.
        """
        weight = self.tail.tiles
        hidden = self.tail.before_head(rows.unsqueeze(0)).squeeze(0)
        if weight is None or not self.tail.multiplies(hidden, weight):
            return None
        if tokens is not None and len(different := tokens.unique()) > MOST_TOKENS * len(weight):
            return None
        hidden = hidden.to(weight.device)
        # Where nothing comes between product and exponential, the unit is changed before the product: a pass less over the logits.
        in_bits = self.tail.finish is None and self.tail.bias is None and hidden.dtype == torch.float32
        if in_bits:
            hidden = hidden * LOG2_E
        # Nothing is held for the next time: a long prompt's forward needs the room in between.
        room = weight.new_empty(min(self.rows, len(hidden)) * self.width)
        scratch = torch.empty(slice_rows(self.rows, self.width, self.slice_bytes), self.width)
        foreseen = self._foresee(hidden, different, tokens) if tokens is not None else None
        reduction = Reduction(
            Search(len(hidden), top_k, len(weight)), self.tail.finish, scratch, tokens, foreseen, in_bits
        )
        for first, width in self._tiles(len(weight)):
            out = room[: len(room) // self.width * width].view(-1, width)
            reduction.add(self.tail.unembed(hidden, first, out, self.product), first)
        return reduction.stats(), reduction.sure()

    def logits(self, rows: Float[Tensor, "row d_model"], like: Tensor) -> Float[Tensor, "row vocab"]:
        """All logits of a few rows, before :attr:`~murano.model.tail.ShortPath.finish`, by the same product.

        Args:
            rows: the stream.
            like: a row of logits.
        """
        out = like.new_empty(len(rows), like.shape[1])
        hidden = self.tail.before_head(rows.unsqueeze(0)).squeeze(0)
        if not self.tail.multiplies(hidden, out):
            return self.tail.raw(rows)
        for first, width in self._tiles(like.shape[1]):
            tile = out.new_empty(len(rows), width)
            out[:, first : first + width] = gather(self.tail.unembed(hidden, first, tile, self.product), tile)
        return out

    def _tiles(self, vocab: int) -> list[tuple[int, int]]:
        """Where each tile begins, and how many tokens it has."""
        return [(first, min(self.width, vocab - first)) for first in range(0, vocab, self.width)]

    def _foresee(
        self, hidden: Float[Tensor, "row d"], different: Int[Tensor, " id"], tokens: Int[Tensor, "row token"]
    ) -> Float[Tensor, "row token"]:
        """The logits of tokens before their tiles come, so that larger ones can be counted in all of them.

        Products of as many rows and of whole panels mostly round alike, whichever tokens are in them; where not,
        :meth:`Reduction.sure` says so.
        """
        panels = -(-len(different) // PANEL) * PANEL
        ids = different.repeat(-(-panels // len(different)))[:panels]
        product, logits = self.product.of(ids), hidden.new_empty(len(hidden), len(ids))
        gather(product(hidden, 0, logits.new_empty(min(self.rows, len(hidden)), len(ids))), logits)
        if self.tail.finish is not None:
            logits = self.tail.finish(logits)
        return logits.float().gather(1, torch.searchsorted(different, tokens))
