"""Modules as linear maps: what is linear by itself, and norms with the scale that they had in a run.

Nothing is known of a module but what it returns. A *norm* is ``scale(x) · gain ⊙ x`` with one number ``scale(x)`` per row (of ``x`` less
its mean, where it centres) and perhaps a bias; that form is fitted and then compared in every element, here and again in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

#: Contributions are added up in double precision, so that what is left over is the model's own rounding.
EXACT = torch.float64

Function = Callable[[Tensor], Tensor]


def tolerance(dtype: torch.dtype) -> float:
    """How far, relative to its size, a computation in this dtype may be off."""
    # Norms of most families compute in float32 whatever the weights are, so that float64 is no better.
    return 2e-5 if dtype in (torch.float64, torch.float32) else 2 * torch.finfo(dtype).eps


def exact(tensor: Tensor) -> Tensor:
    """In double precision, wherever the device has it."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else EXACT)


@dataclass(frozen=True)
class Norm:
    """A norm, as it was found to work.

    Args:
        gain: what each element is multiplied with, up to the scale.
        bias: what is added.
        centres: whether a row's mean is taken away first.
    """

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    centres: bool

    def scale(self, x: Float[Tensor, "row d"], y: Float[Tensor, "row d"]) -> tuple[Float[Tensor, " row"], float]:
        """The number that each row was scaled with, and how far the form is off, relative to what the norm returned.

        Args:
            x: what the norm was given.
            y: what it returned.
        """
        form = self.gain * self._centred(exact(x))
        scaled = exact(y) - self.bias
        scale = (form * scaled).sum(-1) / (form * form).sum(-1).clamp_min(1e-300)
        misfit = (scaled - scale.unsqueeze(-1) * form).abs().amax(-1) / scaled.abs().amax(-1).clamp_min(1e-300)
        return scale, float(misfit.max()) if len(misfit) else 0.0

    def pull(self, w: Float[Tensor, "row answer d"], scale: Float[Tensor, " row"]) -> Float[Tensor, "row answer d"]:
        """The direction before the norm that reads what ``w`` reads after it, its scale as it was."""
        return self._centred(w * self.gain) * scale[:, None, None]

    def _centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centres else x


@torch.no_grad()
def find_norm(function: Function, width: int, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """The norm that a function is; ``None`` if it is none.

    Args:
        function: takes and returns ``[1, row, width]``.
        width: of its rows.
        dtype: of what it is given.
        device: where.
    """

    def call(rows: Tensor) -> Tensor:
        return exact(function(rows.to(device=device, dtype=dtype).unsqueeze(0)).squeeze(0))

    generator = torch.Generator().manual_seed(0)
    # With a mean of their own: by these rows, a norm that centres and one that does not are far apart.
    rows = (torch.randn(5, width, generator=generator) + 1.0).to(dtype).double()
    signs = torch.where(torch.rand(1, width, generator=generator) < 0.5, -1.0, 1.0).double()
    try:
        bias = call(torch.zeros(1, width))[0].nan_to_num(0.0)
        given, signed = call(rows), call(signs) - bias
    except Exception:  # the function may refuse these rows in any way it likes
        return None
    if given.shape != rows.shape or not bool(given.isfinite().all()):
        return None
    fits = []
    for centres in (False, True):
        flat = (signs - signs.mean() if centres else signs).to(bias.device)
        norm = Norm((signed / flat)[0], bias, centres)
        fits.append((norm.scale(rows.to(bias.device), given)[1], norm))
    misfit, best = min(fits, key=lambda fit: fit[0])
    return best if misfit <= 2 * tolerance(dtype) else None


@torch.no_grad()
def is_linear(function: Function, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a function of ``[1, row, width]`` is linear but for a bias, row by row."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 1, 3, width, generator=generator).to(device=device, dtype=dtype)
    try:
        zero, one, other, both = (exact(function(x.clone())) for x in (torch.zeros_like(a), a, b, a + b))
        alone = exact(function(a[:, :1].clone()))
    except Exception:
        return False
    if both.shape[:2] != a.shape[:2] or not bool(both.isfinite().all()):
        return False
    limit = 2 * tolerance(dtype) * float(torch.stack([one.abs().max(), other.abs().max()]).max())
    return bool((one + other - zero - both).abs().max() <= limit and (alone - one[:, :1]).abs().max() <= limit)


def pull_linear(
    function: Function, w: Float[Tensor, "row answer out"], width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "row answer width"], Float[Tensor, "row answer"]]:
    """The direction before a linear function that reads what ``w`` reads after it, and what its bias adds.

    The function's own transpose does it, whatever it is made of: the gradient of a linear function is the same everywhere.
    """
    flat = w.flatten(0, 1).to(device=device, dtype=dtype).unsqueeze(0)
    with torch.enable_grad():
        at = torch.zeros(1, flat.shape[1], width, device=device, dtype=dtype, requires_grad=True)
        out = function(at)
        (pulled,) = torch.autograd.grad(out, at, flat.to(out.device, out.dtype))
    offset = (exact(out.detach().to(w.device))[0] * exact(w).flatten(0, 1)).sum(-1)
    return exact(pulled[0].to(w.device)).unflatten(0, w.shape[:2]), offset.view(w.shape[:2])
