"""The matrix product of rows and unembedding: nearly all the time that a lens takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Float[Tensor, "row d"], Float[Tensor, "vocab d"], Float[Tensor, "row vocab"]], None]


def torch_product(rows: Float[Tensor, "row d"], weight: Float[Tensor, "vocab d"], out: Float[Tensor, "row vocab"]) -> None:
    """The product as torch itself does it: at equal shapes the model's own numbers to the bit."""
    torch.mm(rows, weight.T, out=out)
