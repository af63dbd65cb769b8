"""The matrix product of rows and unembedding: nearly all the time that a lens takes.

The same float32 product runs at very different speeds through different libraries, and which is fastest differs from processor to
processor. Those that are at hand and as accurate as torch's are timed once on the real weight, together with the reduction that follows
(another library's threads may still be spinning when torch's start), and the fastest is used. Nothing global is set: the choice is for
this weight only, and :meth:`~murano.MuranoModel.decode` never uses it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from murano.errors import InputError, nearest
from murano.readout.reduce import reduce_rows, slice_rows

logger = logging.getLogger(__name__)

Product = Callable[[Float[Tensor, "row d"], Float[Tensor, "vocab d"], Float[Tensor, "row vocab"]], None]

#: What ``product=`` may be.
NAMES = ("auto", "torch", "onednn", "numpy")
#: How much faster than torch's another product must be before it is worth leaving torch's: on a busy machine less than this is noise, and
#: where it pays (AMD's processors) it is twice as fast.
GAIN = 1.25
#: oneDNN keeps a copy of the weight in its own order; a larger one is not worth the memory.
MAX_PACKED_BYTES = 256 << 20


def torch_product(
    rows: Float[Tensor, "row d"], weight: Float[Tensor, "vocab d"], out: Float[Tensor, "row vocab"]
) -> None:
    """The product as torch itself does it: at equal shapes the model's own numbers to the bit."""
    torch.mm(rows, weight.T, out=out)


def numpy_product(
    rows: Float[Tensor, "row d"], weight: Float[Tensor, "vocab d"], out: Float[Tensor, "row vocab"]
) -> None:
    """The product through numpy's BLAS, on the same memory."""
    import numpy

    numpy.matmul(rows.contiguous().numpy(), weight.numpy().T, out=out.numpy())


def onednn_product(weight: Float[Tensor, "vocab d"], rows: int) -> Product:
    """The product through oneDNN, on a copy of the weight in the order it likes best for chunks of ``rows``."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def product(hidden: Tensor, _weight: Tensor, out: Tensor) -> None:
        out.copy_(torch.ops.mkldnn._linear_pointwise(hidden, packed, None, "none", [], ""))

    return product


@dataclass(frozen=True)
class Choice:
    """Which product is used, and why.

    Args:
        name: ``"torch"``, ``"onednn"`` or ``"numpy"``.
        product: the product itself.
        gflops: what each candidate reached on the real weight, in 1e9 operations of the product a second, the reduction's time
            included; empty where nothing was timed.
        errors: the largest error of each against float64.
    """

    name: str
    product: Product
    gflops: dict[str, float]
    errors: dict[str, float]


def choose(weight: Tensor, rows: int, product: str = "auto") -> Choice:
    """Choose the product for chunks of ``rows`` rows.

    Args:
        weight: the unembedding, ``[vocab, d]``.
        rows: how many rows a chunk has.
        product: ``"auto"`` for the fastest that is as accurate as torch's, or the name of one.

    Raises:
        InputError: there is no such product, or not for this weight.
    """
    if product not in NAMES:
        raise InputError(
            f"product={product!r} is unknown.{nearest(product, NAMES)} Use one of {', '.join(map(repr, NAMES))}."
        )
    if product == "torch":
        return Choice("torch", torch_product, {}, {})
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    candidates = dict(_candidates(weight.detach(), rows)) if plain else {}
    if product != "auto":
        if product not in candidates:
            raise InputError(
                f"product={product!r} can't be had for this unembedding ({weight.dtype}, {weight.device}). Use 'torch'."
            )
        return Choice(product, candidates[product], {}, {})
    with torch.no_grad():
        return _fastest({"torch": torch_product, **candidates}, weight.detach(), rows)


def _candidates(weight: Tensor, rows: int) -> Iterator[tuple[str, Product]]:
    if torch.backends.mkldnn.is_available() and weight.numel() * weight.element_size() <= MAX_PACKED_BYTES:
        try:
            yield "onednn", onednn_product(weight, rows)
        except (RuntimeError, AttributeError) as error:  # another build of torch may lack these operators
            logger.debug("oneDNN's product can't be had: %s", error)
    yield "numpy", numpy_product


def _fastest(candidates: dict[str, Product], weight: Tensor, rows: int) -> Choice:
    if len(candidates) == 1:
        return Choice("torch", torch_product, {}, {})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, weight.shape[1], generator=generator)
    out = torch.empty(rows, weight.shape[0])
    scratch = torch.empty(slice_rows(rows, weight.shape[0]), weight.shape[0])
    exact = hidden[:16].double() @ weight[:4096].double().T
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    for name, product in list(candidates.items()):
        product(hidden, weight, out)  # also the warm-up
        errors[name] = float((out[:16, :4096].double() - exact).abs().max())
        if errors[name] > 3 * errors["torch"]:
            del candidates[name]
    for _ in range(2):  # in turn, so that a machine that slows down slows all of them
        for name, product in candidates.items():
            for warm in (False, True, True):  # cold, it would pay for the threads that the one before it left spinning
                started = time.perf_counter()
                product(hidden, weight, out)
                reduce_rows(out, 1, None, scratch)
                if warm:
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(median, key=lambda name: median[name] * (1 if name == "torch" else GAIN))
    operations = 2 * rows * weight.numel() / 1e9
    choice = Choice(best, candidates[best], {name: operations / s for name, s in median.items()}, errors)
    logger.info("Product for the unembedding: %s (GFLOP/s: %s)", best, {n: round(g) for n, g in choice.gflops.items()})
    return choice
