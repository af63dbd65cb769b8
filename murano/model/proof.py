"""The proof of a readout: made when a model is loaded, kept with it, and carried by every artifact.

The test that means something is the *cross test*: while prompt A's tokens run, prompt B's last residual is injected, and
B's logits must come out. A tail that also reads A's tokens, an earlier block or a second stream fails it; a test with one prompt
would pass whatever the tail reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murano.errors import UnsupportedModelError
from murano.model.anatomy import BATCH, POSITIONS, Anatomy, probe_ids, run
from murano.model.rope import turning_lengths
from murano.model.stream import get_at
from murano.model.tail import Replay, ShortPath, Tail, trace_short_path
from murano.model.watch import at_rest, logits_of


@dataclass(frozen=True)
class ReadoutProof:
    """How residuals become logits in this model, and how that was shown to be the model's own way.

    Args:
        path: ``"short"`` (norm, unembedding and arithmetic as they were recorded) or ``"replay"`` (the model's own forward
            with its blocks bypassed).
        steps: what the path does, in words.
        exact: whether every logit of the cross test was equal to the bit.
        max_difference: the largest absolute difference of a logit in the cross test.
        row_difference: the largest absolute difference when rows are read one at a time, at another matrix shape.
        padding_difference: the largest absolute difference of a logit when tokens are appended after it.
        pads: whether prompts of different lengths may share a batch. Where they may not (a sparse attention whose choice
            depends on the length, or a rope whose factors do), only prompts of one length do.
        scale: the largest absolute logit, to judge the differences by.
        prompts: the token ids on which it was proved.
        n_layers: how many block calls there are.
        model_class: the class of the model.
        dtype: of the logits.
        reason: why the short path is not used, where it is not.
    """

    path: str
    steps: str
    exact: bool
    max_difference: float
    row_difference: float
    padding_difference: float
    pads: bool
    scale: float
    prompts: list[list[list[int]]] = field(repr=False)
    n_layers: int
    model_class: str
    dtype: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are saved."""
        return asdict(self)

    def __str__(self) -> str:
        found = "equal to the bit" if self.exact else f"largest difference {self.max_difference:.3g}"
        lines = [
            f"{self.model_class}: {self.n_layers} layers, read by the {self.path} path",
            f"  {self.steps}",
            f"  cross test on {BATCH} × {POSITIONS} tokens in {self.dtype}: {found} (largest logit {self.scale:.3g})",
            f"  rows read one by one: {self.row_difference:.3g}; tokens appended: {self.padding_difference:.3g}"
            + ("" if self.pads else " (so only prompts of one length share a batch)"),
        ]
        if self.reason:
            lines.append(f"  no short path: {self.reason}")
        return "\n".join(lines)


def rounding(logits: Tensor) -> float:
    """How far two correct computations of these logits may differ: products of another shape round differently."""
    eps = {torch.float64: 1e-12, torch.float32: 2e-5}.get(logits.dtype, torch.finfo(logits.dtype).eps * 2)
    finite = logits[logits.isfinite()]
    return float(eps * max(1.0, float(finite.abs().max()) if finite.numel() else 1.0))


def another_shape(logits: Tensor) -> float:
    """How far these logits may be from those of a forward of another shape: in half precision more, but never as far as a wrong one."""
    return rounding(logits) * (1 if logits.dtype.itemsize >= 4 else 4)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; equal infinities do not count, a NaN or another shape is infinite."""
    if a.shape != b.shape:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    gap = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


@torch.no_grad()
def prove(anatomy: Anatomy) -> tuple[Tail, ReadoutProof]:
    """Find the tail and prove it.

    Args:
        anatomy: a model and its blocks.

    Returns:
        The tail that may be used, and its proof.

    Raises:
        UnsupportedModelError: neither path gives the model's own logits, or later tokens change earlier predictions.
    """
    model, name = anatomy.model, type(anatomy.model).__name__
    a = probe_ids(model, anatomy.embedding_rows, BATCH, POSITIONS, seed=1)
    b = probe_ids(model, anatomy.embedding_rows, BATCH, POSITIONS, seed=2)
    stream, logits = residual_stream(anatomy, b)
    if bool(logits.isnan().any()):
        start = next(
            (f"L{i}.resid_post" for i, rows in enumerate(stream) if not bool(rows.isfinite().all())), "the final norm"
        )
        raise UnsupportedModelError(
            f"{name} predicts NaN: not finite from {start} on, in {str(logits.dtype).removeprefix('torch.')}. "
            "Were all its weights loaded, and can this dtype hold them?"
        )
    last = stream[-1]
    limit = rounding(logits)
    other_shape = another_shape(logits)
    leak = _leak(anatomy, b, logits)
    if leak > other_shape:
        raise UnsupportedModelError(
            f"{name} is not causal: later tokens change its earlier predictions, by up to {leak:.3g} logits. An encoder has no "
            "next-token prediction to look for; a decoder of this family may need is_decoder=True in its config, and a model that "
            "quantises activations with one scale for all tokens must be loaded without that."
        )
    padding, picks = _padding_difference(anatomy, b, logits)
    replay = Replay(anatomy)
    short, reason = trace_short_path(anatomy, a)
    tried: list[str] = []
    for tail in (short, replay):
        if tail is None:
            continue
        try:
            crossed = tail(last) if isinstance(tail, ShortPath) else tail(last, a)
            gap = difference(crossed, logits)
            row_gap = difference(rows_apart(tail, last), logits)
        except Exception as error:  # the family's own code may refuse these shapes in any way it likes
            tried.append(f"{tail.name} path: {type(error).__name__}: {error}")
            continue
        if gap > limit or row_gap > other_shape:
            tried.append(f"{tail.name} path: off by {max(gap, row_gap):.3g} logits")
            continue
        if isinstance(tail, ShortPath) and gap > 0:
            exact_replay = difference(replay(last, a), logits)
            if exact_replay < gap:
                tried.append(f"short path: off by {gap:.3g} logits where replay is off by {exact_replay:.3g}")
                continue
        proof = ReadoutProof(
            path=tail.name,
            steps=tail.describe(),
            exact=gap == 0,
            max_difference=gap,
            row_difference=row_gap,
            padding_difference=padding,
            pads=padding <= other_shape and not picks and not turning_lengths(getattr(model, "config", None)),
            scale=float(logits[logits.isfinite()].abs().max()),
            prompts=[a.tolist(), b.tolist()],
            n_layers=len(anatomy.blocks),
            model_class=name,
            dtype=str(logits.dtype).removeprefix("torch."),
            reason=reason or "; ".join(tried),
        )
        return tail, proof
    raise UnsupportedModelError(
        f"{name} can't be read by a lens: its logits do not follow from the output of its last block "
        f"({anatomy.blocks[-1].name}) alone. Tried {'; '.join(tried)}."
    )


def residual_stream(
    anatomy: Anatomy, ids: Tensor
) -> tuple[list[Float[Tensor, "batch position d_model"]], Float[Tensor, "batch position vocab"]]:
    """The stream after every block, and the model's own logits, of one plain forward."""
    found: list[Tensor] = []
    blocks = anatomy.blocks

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        block = blocks[len(found)]
        found.append(block.layout.rows(get_at(output, block.output_path), ids.shape[0]))

    hooks = [module.register_forward_hook(hook) for module in anatomy.modules]
    try:
        with at_rest(anatomy.model):
            logits = logits_of(run(anatomy.model, ids))
    finally:
        for handle in hooks:
            handle.remove()
    assert logits is not None
    return found, logits


def rows_apart(tail: Tail, rows: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position vocab"]:
    """Logits of the same rows, each as a prompt of one token: the shape in which the lens reads them."""
    flat = rows.reshape(-1, 1, rows.shape[-1])
    logits = tail(flat if isinstance(tail, Replay) else flat.transpose(0, 1))
    return logits.reshape(*rows.shape[:2], -1)


def _leak(anatomy: Anatomy, ids: Tensor, logits: Tensor) -> float:
    """How much earlier predictions change when later tokens do, at the same length.

    In half precision it is the median row that counts: a router that is near a tie may choose otherwise for a few tokens, where
    attention to later tokens moves every one.
    """
    kept = ids.shape[1] // 2
    changed = torch.cat([ids[:, :kept], ids[:, :-kept].flip(1)], dim=1)
    with at_rest(anatomy.model):
        moved = logits_of(run(anatomy.model, changed))
    assert moved is not None
    if logits.dtype.itemsize >= 4:
        return difference(moved[:, :kept], logits[:, :kept])
    rows = [difference(moved[i, j], logits[i, j]) for i in range(ids.shape[0]) for j in range(kept)]
    return sorted(rows)[len(rows) // 2]


class _Picks(TorchDispatchMode):
    """Notes whether something picks the largest of as many numbers as there are positions.

    Where that is a sparse attention, which of two equal scores it picks depends on how many there are: a test on a few tokens may
    well miss it.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions, self.seen = positions, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = {torch.ops.aten.topk: 2, torch.ops.aten.sort: 1}.get(function.overloadpacket)
        if place is not None:
            axis = kwargs.get("dim", args[place] if len(args) > place else -1)
            self.seen |= args[0].ndim > 0 and args[0].shape[axis] == self.positions
        return function(*args, **kwargs)


def _padding_difference(anatomy: Anatomy, ids: Tensor, logits: Tensor) -> tuple[float, bool]:
    """How much the predictions of a prompt change when tokens are appended to it, and whether the model picks among positions."""
    worst, picks = 0.0, False
    for extra in (4, 1, 9):
        longer = torch.cat([ids, ids.repeat(1, 2)[:, :extra].flip(1)], dim=1)
        watch = _Picks(longer.shape[1])
        with at_rest(anatomy.model), watch:
            padded = logits_of(run(anatomy.model, longer))
        assert padded is not None
        worst = max(worst, difference(padded[:, : ids.shape[1]], logits))
        picks = (
            watch.seen if extra == 4 else picks and watch.seen
        )  # an expert count that happens to be one of the lengths is none
    return worst, picks
