"""The direction in the residual stream that one logit reads, the final norm's scale frozen at its value in a run.

With that scale fixed, everything from the stream to a logit is linear: the norm's gain and its centring, projections and multipliers, the
unembedding's row. What is not linear is a soft-cap; it is left out, and the logit that remains is the one before the cap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.errors import ReadoutError, UnsupportedModelError
from murano.model import MuranoModel
from murano.model.linear import Norm, exact, find_norm, is_linear, pull_linear, tolerance
from murano.model.tail import Arithmetic, ModuleCall, ShortPath


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions of some rows, one for each answer.

    Args:
        rows: the directions.
        bias: what is added to each logit whatever the stream is.
        logits: the model's logits, before a soft-cap.
        capped: the model's own logits.
        rounding: how far each row's logits may be off.
    """

    rows: Float[Tensor, "row answer d_model"]
    bias: Float[Tensor, "row answer"]
    logits: Float[Tensor, "row answer"]
    capped: Float[Tensor, "row answer"]
    rounding: Float[Tensor, " row"]


@dataclass(frozen=True, eq=False)
class LinearReadout:
    """A model's short path as a norm between linear maps.

    Args:
        tail: the short path.
        before: each step up to the unembedding, and the norm that it is; ``None`` for a linear one.
        gain: what each logit of the unembedding is multiplied with after it.
        offset: what is added to it.
        cap: the soft-cap that is left out, in words; empty where there is none.
    """

    tail: ShortPath
    before: tuple[tuple[ModuleCall | Arithmetic, Norm | None], ...]
    gain: Float[Tensor, " vocab"]
    offset: Float[Tensor, " vocab"]
    cap: str

    @classmethod
    def of(cls, model: MuranoModel) -> LinearReadout:
        """Find it.

        Raises:
            UnsupportedModelError: the model is replayed, or does something between its last block and its logits that is neither linear,
                nor a norm, nor a soft-cap.
        """
        tail, name = model.tail, type(model.hf_model).__name__
        if not isinstance(tail, ShortPath):
            raise UnsupportedModelError(
                f"The logits of {name} can't be attributed: {model.check_readout().reason}, so that there is no direction in the stream "
                "that a logit reads."
            )
        before: list[tuple[ModuleCall | Arithmetic, Norm | None]] = []
        rows = torch.randn(1, 4, model.d_model, generator=torch.Generator().manual_seed(2))
        rows = rows.to(device=model.device, dtype=model.anatomy.stream_dtype)
        for step in tail.steps[: tail.head]:
            place = (rows.shape[-1], rows.dtype, rows.device)
            norm = None if is_linear(step, *place) else find_norm(step, *place)
            if norm is None and not is_linear(step, *place):
                raise UnsupportedModelError(
                    f"The logits of {name} can't be attributed: {step}, between its last block and its unembedding, is neither linear "
                    "nor a norm."
                )
            before.append((step, norm))
            rows = step(rows)
        # A plain Linear need not be asked, and asking a large one costs as much as reading with it.
        if tail.weight is None and not is_linear(tail.steps[tail.head], rows.shape[-1], rows.dtype, rows.device):
            raise UnsupportedModelError(
                f"The logits of {name} can't be attributed: {tail.steps[tail.head]} is not linear."
            )
        gain, offset, cap = _after(tail, rows[:, :1], name)
        return cls(tail, tuple(before), gain, offset, cap)

    def directions(self, rows: Float[Tensor, "row d_model"], ids: Int[Tensor, "row answer"]) -> Directions:
        """The directions that the logits of some ids read at these rows.

        Args:
            rows: the stream after the last block.
            ids: the answers of each row; -1 reads id 0, and is to be left out by the caller.

        Raises:
            ReadoutError: a norm does not work as it was found to: the model was changed meanwhile.
        """
        seen = [rows.unsqueeze(0)]
        for step, _ in self.before:
            seen.append(step(seen[-1]))
        ids = ids.clamp_min(0)
        hidden = exact(seen[-1][0]).cpu().unsqueeze(1)
        w, bias = self._unembedding(seen[-1], ids)
        raw = (w * hidden).sum(-1) + bias
        size = ((w.abs() * hidden.abs()).sum(-1) + bias.abs()) * self.gain[ids].abs()
        logits = capped = raw * self.gain[ids] + self.offset[ids]
        if self.cap:  # the cap's own steps may be of the whole vocabulary's width
            own = self.tail.after_head(self.tail.steps[self.tail.head](seen[-1]))[0]
            capped = exact(own).gather(1, ids.to(own.device)).cpu()
        w, bias = w * self.gain[ids].unsqueeze(-1), bias * self.gain[ids] + self.offset[ids]
        for index in reversed(range(len(self.before))):
            step, norm = self.before[index]
            x, y = seen[index][0].cpu(), seen[index + 1][0].cpu()
            if norm is None:
                w, more = pull_linear(step, w, x.shape[-1], x.dtype, seen[index].device)
            else:
                norm = on_cpu(norm)
                scale, misfit = norm.scale(x, y)
                check_norm(misfit, x.dtype, str(step))
                more = w @ norm.bias
                w = norm.pull(w, scale)
            bias = bias + more
        limit = size.amax(-1).clamp_min(1.0) * tolerance(rows.dtype) * (1 if rows.dtype.itemsize >= 4 else 4)
        return Directions(w, bias, logits, capped, limit)

    def _unembedding(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The unembedding's row of each id, and its bias."""
        head = self.tail.steps[self.tail.head]
        module = head.module if isinstance(head, ModuleCall) else None
        if type(module) is nn.Linear:
            weight = exact(module.weight[ids.to(module.weight.device)]).cpu()
            bias = (
                exact(module.bias[ids.to(module.bias.device)]).cpu()
                if module.bias is not None
                else torch.zeros(ids.shape)
            )
            return weight, bias.to(weight.dtype)
        known, which = ids.unique(return_inverse=True)
        one = torch.zeros(len(known), 1, head(hidden[:, :1]).shape[-1], dtype=torch.float64)
        one.scatter_(2, known.view(-1, 1, 1), 1.0)
        rows, bias = pull_linear(head, one, hidden.shape[-1], hidden.dtype, hidden.device)
        return rows[which, 0], bias[which, 0]


def on_cpu(norm: Norm) -> Norm:
    """The same norm for rows on the CPU, where contributions are added up."""
    return Norm(norm.gain.cpu(), norm.bias.cpu(), norm.centres)


def check_norm(misfit: float, dtype: torch.dtype, name: str) -> None:
    """Refuse a norm that did not work as it was found to.

    Raises:
        ReadoutError: naming it.
    """
    if not misfit <= 4 * tolerance(dtype):
        raise ReadoutError(
            f"{name} is no longer the norm that it was found to be (off by {misfit:.2g}): was the model changed?"
        )


def _after(tail: ShortPath, hidden: Tensor, name: str) -> tuple[Tensor, Tensor, str]:
    """Gain and offset of the arithmetic on logits, and the soft-cap that is left out of it.

    Args:
        tail: the short path.
        hidden: a row as the unembedding takes it.
        name: of the model's class.
    """
    like = tail.steps[tail.head](hidden)
    zero, one = torch.zeros_like(like), torch.ones_like(like)
    cap = False
    for step in tail.steps[tail.head + 1 :]:
        y = [exact(step(torch.full_like(zero, x))) for x in (0.0, 1.0, 2.0, -3.0)]
        linear = all(
            torch.allclose(y[i] - y[0], x * (y[1] - y[0]), rtol=1e-2 if zero.dtype.itemsize < 4 else 1e-4)
            for i, x in ((2, 2.0), (3, -3.0))
        )
        if linear:
            zero, one = step(zero), step(one)
            continue
        small = step(torch.full_like(zero, 0.01))
        if not (bool((y[0] == 0).all()) and torch.allclose(small, torch.full_like(small, 0.01), rtol=1e-2)):
            raise UnsupportedModelError(
                f"The logits of {name} can't be attributed: {step}, after its unembedding, is not linear."
            )
        cap = True
        zero, one = zero[..., : small.shape[-1]], one[..., : small.shape[-1]]
    words = " → ".join(map(str, tail.steps[tail.head + 1 :])) if cap else ""
    offset = exact(zero)[0, 0].cpu()
    return exact(one)[0, 0].cpu() - offset, offset, words
