"""The matrix product of rows and unembedding, whole or a tile of the vocabulary at a time: nearly all the time that a lens takes.

The same float32 product runs at very different speeds through different libraries, and which is fastest differs from processor to
processor. Those that are at hand and as accurate as torch's are timed once on the real weight, together with the reduction that follows
(another library's threads may still be spinning when torch's start), and the fastest is used. So is how many rows are reduced together,
which is a matter of caches. Nothing global is set: the choice is for this weight only, and
:meth:`~murano.MuranoModel.decode` never uses it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from murano.errors import InputError
from murano.readout.reduce import CPU_SLICE_BYTES, Reduction, slice_rows
from murano.readout.request import PRODUCTS, check_choice
from murano.readout.search import Search

logger = logging.getLogger(__name__)
Name = TypeVar("Name")

#: The logits of the tokens from one on, as many as ``out`` has room for: ``product(rows, first, out)``. What is returned is ``out``, where
#: the library can be told where to write.
Product = Callable[[Float[Tensor, "row d"], int, Float[Tensor, "row token"]], Float[Tensor, "row token"]]

#: How much faster than the first another must be, and faster in every round: on a busy machine less is noise.
GAIN, ROUNDS = 1.05, 3
#: Seconds after which the threads that another library left spinning have gone to sleep.
NAP = 0.04
#: How many tokens are mostly kept of a row.
USUAL_K = 5
#: Slices of this size are reduced faster than :data:`~murano.readout.reduce.CPU_SLICE_BYTES` where the cores' common cache is fast (AMD).
LARGE_SLICE_BYTES = 16 << 20
#: oneDNN keeps a copy of the weight in its own order; a larger one is not worth the memory.
MAX_PACKED_BYTES = 256 << 20


def torch_product(weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None) -> Product:
    """The product as torch's ``linear`` does it: of whole rows, and at equal shapes, the model's own numbers to the bit."""

    def product(rows: Tensor, first: int, out: Tensor) -> Tensor:
        tile = slice(first, first + out.shape[1])
        if bias is None:
            return torch.mm(rows, weight[tile].T, out=out)
        return torch.addmm(bias[tile], rows, weight[tile].T, out=out)

    return product


def numpy_product(weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None) -> Product:
    """The product through numpy's BLAS, on the same memory."""
    import numpy

    def product(rows: Tensor, first: int, out: Tensor) -> Tensor:
        tile = slice(first, first + out.shape[1])
        numpy.matmul(rows.contiguous().numpy(), weight[tile].numpy().T, out=out.numpy())
        return out if bias is None else out.add_(bias[tile])

    return product


def onednn_product(
    weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None, *, rows: int
) -> Product:
    """The product through oneDNN, on a copy of the weight in the order it likes best for chunks of ``rows``."""
    packed: dict[tuple[int, int], Tensor] = {}

    def product(hidden: Tensor, first: int, out: Tensor) -> Tensor:
        key, tile = (first, out.shape[1]), slice(first, first + out.shape[1])
        if key not in packed:  # tile by tile, so that what is only timed is not copied whole
            packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight[tile], rows)
        of_tile = bias[tile] if bias is not None else None
        logits: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed[key], of_tile, "none", [], "")
        return logits

    return product


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


def checksum(weight: Float[Tensor, "vocab d"]) -> str:
    """What differs when a weight was written to, through ``.data`` too, which torch does not count; empty for one that is never packed."""
    if (weight.device.type, weight.dtype) != ("cpu", torch.float32) or not 0 < weight.nbytes <= MAX_PACKED_BYTES:
        return ""
    of_rows, of_columns = (torch.linspace(0.5, 1.5, n) for n in weight.shape)
    return str(float(torch.mv(weight.detach(), of_columns).dot(of_rows)))


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
        return Choice(base, torch_product(weight, bias))
    candidates = {base: torch_product(weight, bias)}
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
        candidates |= _others(weight, bias, rows)
    if product != "auto":
        if product not in candidates:
            raise InputError(
                f"product={product!r} can't be had for this unembedding ({weight.dtype}, {weight.device}). Use 'torch'."
            )
        return Choice(product, candidates[product])
    if len(candidates) == 1:
        return Choice(base, candidates[base])
    with torch.no_grad():
        return _fastest(candidates, weight, bias, rows, width)


def _others(weight: Tensor, bias: Tensor | None, rows: int) -> dict[str, Product]:
    """The products of other libraries that can be had for this weight."""
    found = {"numpy": numpy_product(weight, bias)}
    if torch.backends.mkldnn.is_available() and weight.nbytes <= MAX_PACKED_BYTES:
        product = onednn_product(weight, bias, rows=rows)
        try:
            product(torch.zeros(rows, weight.shape[1]), 0, torch.empty(rows, 1))
            found["onednn"] = product
        except (RuntimeError, AttributeError) as error:  # another build of torch may lack these operators
            logger.debug("oneDNN's product can't be had: %s", error)
    return found


def _fastest(candidates: dict[str, Product], weight: Tensor, bias: Tensor | None, rows: int, width: int) -> Choice:
    """The fastest of those that are accurate; the first is the one that all are measured against."""
    base = next(iter(candidates))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, weight.shape[1], generator=generator)
    out = torch.empty(rows, width)
    scratch = {size: torch.empty(slice_rows(rows, width, size), width) for size in (CPU_SLICE_BYTES, LARGE_SLICE_BYTES)}
    exact = hidden[:16].double() @ weight[:4096].double().T + (bias[:4096].double() if bias is not None else 0.0)
    errors = {
        name: float((product(hidden, 0, out)[:16, :4096].double() - exact[:, :width]).abs().max())
        for name, product in candidates.items()
    }
    accurate = {name: product for name, product in candidates.items() if errors[name] <= 3 * errors[base]}

    def read(product: Product, slice_bytes: int, whole: bool) -> float:
        started = time.perf_counter()
        logits = product(hidden, 0, out)
        started = started if whole else time.perf_counter()
        Reduction(Search(rows, USUAL_K, width), None, scratch[slice_bytes]).add(logits)
        return time.perf_counter() - started

    slice_bytes, _ = _race({size: partial(read, candidates[base], size, False) for size in scratch})
    best, seconds = _race({name: partial(read, product, slice_bytes, True) for name, product in accurate.items()}, NAP)
    operations = 2 * rows * width * weight.shape[1] / 1e9
    gflops = {name: operations / took for name, took in seconds.items()}
    logger.info("Product for the unembedding: %s (GFLOP/s: %s)", best, {name: round(g) for name, g in gflops.items()})
    return Choice(best, candidates[best], gflops, errors, slice_bytes)


def _race(runs: Mapping[Name, Callable[[], float]], nap: float = 0.0) -> tuple[Name, dict[Name, float]]:
    """Which is fastest, and the median seconds of each; the first, where none is clearly faster.

    Args:
        runs: each says how many seconds it took.
        nap: seconds to wait before another one's turn.
    """
    first = next(iter(runs))
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):  # in turn, so that a machine that slows down slows all of them
        for name, run in runs.items():
            if min(seconds[name], default=0.0) > min(seconds[first], default=math.inf):
                continue  # it has lost
            time.sleep(nap)
            run()  # wakes its threads
            seconds[name].append(run())
    median = {name: statistics.median(times) for name, times in seconds.items()}
    faster = [
        name
        for name, times in seconds.items()
        if median[name] * GAIN <= median[first]
        and all(own < of_first for own, of_first in zip(times, seconds[first], strict=False))
    ]
    return min(faster, key=lambda name: median[name], default=first), median
