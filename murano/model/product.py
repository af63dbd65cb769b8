"""The matrix product of rows and unembedding, whole or a tile of the vocabulary at a time: nearly all the time that a lens takes.

The same float32 product runs at very different speeds through different libraries, and which is fastest differs from processor to
processor. Those that are at hand and as accurate as torch's are timed once on the real weight, together with the reduction that follows
(another library's threads may still be spinning when torch's start), and the fastest is used. Nothing global is set: the choice is for
this weight only, and :meth:`~murano.MuranoModel.decode` never uses it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from murano.errors import InputError
from murano.readout.reduce import Reduction, slice_rows
from murano.readout.request import PRODUCTS, check_choice
from murano.readout.search import Search

logger = logging.getLogger(__name__)

#: Writes the logits of the tokens from one on, as many as there is room for: ``product(rows, first, out)``.
Product = Callable[[Float[Tensor, "row d"], int, Float[Tensor, "row token"]], None]

#: How much faster than torch's another product must be before it is worth leaving torch's: on a busy machine less than this is noise, and
#: where it pays (AMD's processors) it is twice as fast.
GAIN = 1.25
#: oneDNN keeps a copy of the weight in its own order; a larger one is not worth the memory.
MAX_PACKED_BYTES = 256 << 20


def torch_product(weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None) -> Product:
    """The product as torch's ``linear`` does it: of whole rows, and at equal shapes, the model's own numbers to the bit."""

    def product(rows: Tensor, first: int, out: Tensor) -> None:
        tile = slice(first, first + out.shape[1])
        if bias is None:
            torch.mm(rows, weight[tile].T, out=out)
        else:
            torch.addmm(bias[tile], rows, weight[tile].T, out=out)

    return product


def numpy_product(weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None) -> Product:
    """The product through numpy's BLAS, on the same memory."""
    import numpy

    def product(rows: Tensor, first: int, out: Tensor) -> None:
        tile = slice(first, first + out.shape[1])
        numpy.matmul(rows.contiguous().numpy(), weight[tile].numpy().T, out=out.numpy())
        if bias is not None:
            out.add_(bias[tile])

    return product


def onednn_product(
    weight: Float[Tensor, "vocab d"], bias: Float[Tensor, " vocab"] | None = None, *, rows: int
) -> Product:
    """The product through oneDNN, on a copy of the weight in the order it likes best for chunks of ``rows``."""
    packed: dict[tuple[int, int], Tensor] = {}

    def product(hidden: Tensor, first: int, out: Tensor) -> None:
        key, tile = (first, out.shape[1]), slice(first, first + out.shape[1])
        if key not in packed:  # tile by tile, so that what is only timed is not copied whole
            packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight[tile], rows)
        of_tile = bias[tile] if bias is not None else None
        out.copy_(torch.ops.mkldnn._linear_pointwise(hidden, packed[key], of_tile, "none", [], ""))

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
    """

    name: str
    product: Product
    gflops: dict[str, float]
    errors: dict[str, float]


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
        return Choice(base, torch_product(weight, bias), {}, {})
    candidates = {base: torch_product(weight, bias)}
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous():
        candidates |= _others(weight, bias, rows)
    if product != "auto":
        if product not in candidates:
            raise InputError(
                f"product={product!r} can't be had for this unembedding ({weight.dtype}, {weight.device}). Use 'torch'."
            )
        return Choice(product, candidates[product], {}, {})
    if len(candidates) == 1:
        return Choice(base, candidates[base], {}, {})
    with torch.no_grad():
        return _fastest(candidates, weight, bias, rows, width)


def _others(weight: Tensor, bias: Tensor | None, rows: int) -> dict[str, Product]:
    """The products of other libraries that can be had for this weight."""
    found = {"numpy": numpy_product(weight, bias)}
    if torch.backends.mkldnn.is_available() and weight.numel() * weight.element_size() <= MAX_PACKED_BYTES:
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
    out, scratch = torch.empty(rows, width), torch.empty(slice_rows(rows, width), width)
    exact = hidden[:16].double() @ weight[:4096].double().T + (bias[:4096].double() if bias is not None else 0.0)
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}

    def run(product: Product) -> float:
        started = time.perf_counter()
        product(hidden, 0, out)
        Reduction(Search(rows, 1, width), None, scratch).add(out)
        return time.perf_counter() - started

    for name, product in list(candidates.items()):
        run(product)  # the warm-up
        product(hidden, 0, out)
        errors[name] = float((out[:16, :4096].double() - exact[:, :width]).abs().max())
        if errors[name] > 3 * errors[base]:
            del candidates[name]
    for _ in range(2):  # in turn, so that a machine that slows down slows all of them
        for name, product in candidates.items():
            if name not in seconds or min(seconds[name]) <= min(seconds[base]):
                run(product)  # cold, it would pay for the threads that the one before it left spinning
                seconds.setdefault(name, []).extend([run(product), run(product)])
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(median, key=lambda name: median[name] * (1 if name == base else GAIN))
    operations = 2 * rows * width * weight.shape[1] / 1e9
    choice = Choice(best, candidates[best], {name: operations / s for name, s in median.items()}, errors)
    logger.info("Product for the unembedding: %s (GFLOP/s: %s)", best, {n: round(g) for n, g in choice.gflops.items()})
    return choice
