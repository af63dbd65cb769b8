"""The matrix product of rows and unembedding, whole or a tile of the vocabulary at a time: nearly all the time that a lens takes.

The same float32 product runs at very different speeds through different libraries, and which is fastest differs from processor to
processor. Those that are at hand and as accurate as torch's are timed once on the real weight, together with the reduction that follows
(another library's threads may still be spinning when torch's start), and the fastest is used. So is how many rows are reduced together,
which is a matter of caches. Nothing global is set: the choice is for this weight only, and
:meth:`~murano.MuranoModel.decode` never uses it.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from murano.errors import InputError
from murano.readout.reduce import CPU_SLICE_BYTES, Reduction, slice_rows
from murano.readout.request import PRODUCTS, check_choice
from murano.readout.search import Search
from murano.room import give_back

logger = logging.getLogger(__name__)
Name = TypeVar("Name")

#: How much faster than the first another must be, and in how many rounds that is found out.
GAIN, ROUNDS = 1.02, 4
#: The same for what is timed apart from the first, when the machine may have become faster or slower.
GAIN_APART = 1.1
#: Blocks of rows that take turns with a tile of the vocabulary when it is timed. A library that packs the tile does it once for all; with
#: one block, or with a tile that is in cache already, others seem faster than they are.
TURNS_TIMED = 2
#: How many tokens are mostly kept of a row.
USUAL_K = 5
#: Slices of this size are reduced faster than :data:`~murano.readout.reduce.CPU_SLICE_BYTES` where the cores' common cache is fast (AMD).
LARGE_SLICE_BYTES = 8 << 20
#: Rows that oneDNN multiplies together.
ONEDNN_ROWS = 768


class Product(ABC):
    """The product of rows and an unembedding, of as many tokens as are wanted.

    Args:
        weight: the unembedding.
        bias: what is added to each token's logit.
    """

    def __init__(self, weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None) -> None:
        self.weight, self.bias = weight, bias

    @abstractmethod
    def __call__(
        self, rows: Float[Tensor, "row d"], first: int, out: Float[Tensor, "most token"]
    ) -> Iterator[Float[Tensor, "some token"]]:
        """Logits of the tokens from ``first`` on, as many as ``out`` has room for.

        They come as blocks of rows, one after the other, each to be done with before the next is asked for.

        Args:
            rows: any number of them.
            first: the first token.
            out: room for a block, which may be in there or elsewhere.
        """

    def of(self, tokens: Int[Tensor, " token"]) -> Product:
        """The same of some tokens: logits round alike, mostly to the bit."""
        return type(self)(self.weight[tokens], self.bias[tokens] if self.bias is not None else None)

    def tile(self, first: int, width: int) -> tuple[Float[Tensor, "token d"], Float[Tensor, " token"] | None]:
        """Weight and bias of the tokens from ``first`` on."""
        tokens = slice(first, first + width)
        return self.weight[tokens], self.bias[tokens] if self.bias is not None else None


class TorchProduct(Product):
    """The product as torch's ``linear`` does it: of whole rows, and at equal shapes, the model's own numbers to the bit."""

    def __call__(self, rows: Tensor, first: int, out: Tensor) -> Iterator[Tensor]:
        weight, bias = self.tile(first, out.shape[1])
        for some in rows.split(len(out)):
            block = out[: len(some)]
            if bias is None:
                torch.mm(some, weight.T, out=block)
            else:
                torch.addmm(bias, some, weight.T, out=block)
            yield block


class NumpyProduct(Product):
    """The product through numpy's BLAS, on the same memory."""

    def __call__(self, rows: Tensor, first: int, out: Tensor) -> Iterator[Tensor]:
        import numpy

        weight, bias = self.tile(first, out.shape[1])
        for some in rows.split(len(out)):
            block = out[: len(some)]
            numpy.matmul(some.contiguous().numpy(), weight.numpy().T, out=block.numpy())
            yield block if bias is None else block.add_(bias)


class OnednnProduct(Product):
    """The product through oneDNN, which likes a weight in an order of its own: a copy of the tile at hand is made in it.

    It can't be told where to write, and makes room of its own for each block.
    """

    def __call__(self, rows: Tensor, first: int, out: Tensor) -> Iterator[Tensor]:
        weight, bias = self.tile(first, out.shape[1])
        if len(weight) < len(self.weight):
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)
        for some in rows.split(ONEDNN_ROWS):
            yield torch.ops.mkldnn._linear_pointwise(some, weight, bias, "none", [], "")


def gather(
    blocks: Iterable[Float[Tensor, "some token"]], out: Float[Tensor, "row token"]
) -> Float[Tensor, "row token"]:
    """What a product gives, in one piece; the first block may be there already."""
    start = 0
    for block in blocks:
        place = out[start : start + len(block)]
        if block.data_ptr() != place.data_ptr():
            place.copy_(block)
        start += len(block)
    return out


@dataclass(frozen=True)
class Choice:
    """Which product is used, and why.

    Args:
        name: ``"torch"``, ``"tiles"`` (torch's, a tile of the vocabulary at a time), ``"onednn"`` or ``"numpy"``.
        product: the product itself.
        gflops: what each candidate reached on the real weight, in 1e9 operations of the product a second, the reduction's time
            included; empty where nothing was timed.
        errors: the largest error of each against float64.
        slice_bytes: how many bytes of logits are reduced together.
    """

    name: str
    product: Product
    gflops: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    slice_bytes: int = CPU_SLICE_BYTES


def choose(weight: Tensor, bias: Tensor | None, rows: int, width: int, product: str = "auto") -> Choice:
    """Choose the product for chunks of ``rows`` rows and ``width`` tokens.

    Args:
        weight: the unembedding, ``[vocab, d]``.
        bias: its bias, ``[vocab]``.
        rows: how many rows a chunk has.
        width: how many tokens; all of them, or a tile of the vocabulary.
        product: ``"auto"`` for the fastest that is as accurate as torch's, or the name of one.

    Raises:
        InputError: there is no such product, or not for this weight.
    """
    check_choice("product", product, PRODUCTS)
    weight, bias = weight.detach(), bias.detach() if bias is not None else None
    base = "tiles" if width < len(weight) else "torch"
    if product in ("torch", "tiles"):
        return Choice(base, TorchProduct(weight, bias))
    candidates: dict[str, Product] = {base: TorchProduct(weight, bias)}
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
        candidates |= _others(weight, bias)
    if product != "auto":
        if product not in candidates:
            raise InputError(
                f"product={product!r} can't be had for this unembedding ({weight.dtype}, {weight.device}). Use 'torch'."
            )
        return Choice(product, candidates[product])
    if len(candidates) == 1:
        return Choice(base, candidates[base])
    with torch.no_grad():
        choice = _fastest(candidates, weight, bias, rows, width)
    give_back()  # or the holes that so many products leave would stay
    return choice


def _others(weight: Tensor, bias: Tensor | None) -> dict[str, Product]:
    """The products of other libraries that can be had for this weight."""
    found: dict[str, Product] = {"numpy": NumpyProduct(weight, bias)}
    if torch.backends.mkldnn.is_available():
        product: Product = OnednnProduct(weight, bias)
        try:
            gather(product(torch.zeros(1, weight.shape[1]), 0, torch.empty(1, 1)), torch.empty(1, 1))
            found["onednn"] = product
        except (RuntimeError, AttributeError) as error:  # another build of torch may lack these operators
            logger.debug("oneDNN's product can't be had: %s", error)
    return found


def _fastest(candidates: dict[str, Product], weight: Tensor, bias: Tensor | None, rows: int, width: int) -> Choice:
    """The fastest of those that are accurate; the first is the one that all are measured against."""
    base = next(iter(candidates))
    generator = torch.Generator().manual_seed(0)
    turns = TURNS_TIMED if width < len(weight) else 1
    hidden = torch.randn(turns * rows, weight.shape[1], generator=generator)
    tiles = itertools.cycle(range(0, len(weight) - width + 1, width))
    out = torch.empty(rows, width)
    scratch = {size: torch.empty(slice_rows(rows, width, size), width) for size in (CPU_SLICE_BYTES, LARGE_SLICE_BYTES)}
    exact = hidden[:16].double() @ weight[:4096].double().T + (bias[:4096].double() if bias is not None else 0.0)
    errors: dict[str, float] = {}
    for name, product in candidates.items():
        gather(product(hidden[:rows], 0, out), out)
        errors[name] = float((out[:16, :4096].double() - exact[:, :width]).abs().max())
    accurate = {name: product for name, product in candidates.items() if errors[name] <= 3 * errors[base]}

    def read(product: Product, slice_bytes: int, whole: bool) -> float:
        some = hidden if whole else hidden[:rows]
        started = time.perf_counter()
        blocks: Iterable[Tensor] = product(some, next(tiles), out)
        if not whole:
            blocks = list(blocks)
            started = time.perf_counter()
        Reduction(Search(len(some), USUAL_K, width), None, scratch[slice_bytes], in_bits=bias is None).add(blocks)
        return time.perf_counter() - started

    slices = _timed({size: partial(read, candidates[base], size, False) for size in scratch})
    slice_bytes = min(slices, key=lambda size: statistics.median(slices[size]))
    runs = {name: partial(read, product, slice_bytes, True) for name, product in accurate.items()}
    # numpy's threads go on spinning for a tenth of a second, at the cost of whoever comes next.
    alone = {name: runs.pop(name) for name in ("numpy",) if name in runs}
    seconds, apart = _timed(runs), _timed(alone)
    best = _clearly_fastest(seconds)
    best = _clearly_fastest({best: seconds[best]} | apart, GAIN_APART)
    seconds |= apart
    operations = 2 * len(hidden) * width * weight.shape[1] / 1e9
    gflops = {name: operations / statistics.median(took) for name, took in seconds.items()}
    logger.info("Product for the unembedding: %s (GFLOP/s: %s)", best, {name: round(g) for name, g in gflops.items()})
    return Choice(best, candidates[best], gflops, errors, slice_bytes)


def _timed(runs: Mapping[Name, Callable[[], float]]) -> dict[Name, list[float]]:
    """Seconds of each, in turn, so that a machine that slows down slows all of them; the first turn wakes threads and is not counted."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(1 + ROUNDS):
        for name, run in runs.items():
            took = run()
            if turn:
                seconds[name].append(took)
    return seconds


def _clearly_fastest(seconds: Mapping[Name, Sequence[float]], gain: float = GAIN) -> Name:
    """The fastest; the first, where none is clearly faster. What disturbs a round disturbs all in it, so gains are taken within rounds."""
    first = next(iter(seconds))
    gains = {name: statistics.median(map(truediv, seconds[first], took)) for name, took in seconds.items()}
    return max((name for name in gains if gains[name] >= gain), key=gains.__getitem__, default=first)
