"""The tail: from the residual stream after the last block to logits, by the model's own code.

Nothing here is written from a config. The *short path* is what the model was seen to do after its last block (modules it
called, elementwise arithmetic it did between them), done again on any rows. The *replay* runs the model's own forward
with every block bypassed and the last one returning the rows. Which of the two may be used is decided in
:mod:`murano.model.proof`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murano.model.anatomy import Anatomy, embedding_device, probe_ids, run
from murano.model.product import Product, TorchProduct, gather
from murano.model.stream import get_at, put_at, same_numbers
from murano.model.watch import Call, Watcher, at_rest, logits_of, replaced_forward

#: Stands in a recorded operation for the tensor that flows.
_FLOW = object()


@dataclass(frozen=True)
class ModuleCall:
    """A module that the model calls with the stream alone."""

    name: str
    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        device = next((p.device for p in self.module.parameters() if p.device.type != "meta"), x.device)
        out: Tensor = self.module(x.to(device))
        return out

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Arithmetic:
    """Elementwise arithmetic between modules: a multiplier, a soft-cap, a cast, a bias, a slice of the vocabulary."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        if self.function._schema.is_mutable:  # the recorded in-place operation must not reach what it was given
            x = x.clone()
        args = [x if a is _FLOW else a.to(x.device) if isinstance(a, Tensor) else a for a in self.args]
        out: Tensor = self.function(*args, **self.kwargs)
        return out

    @property
    def is_scalar(self) -> bool:
        """Whether it does the same to every number, whatever token it belongs to."""
        others = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]
        narrows = self.function is torch.ops.aten.slice.Tensor
        return not narrows and all(other.numel() == 1 for other in others)

    def __str__(self) -> str:
        name = self.function._schema.name.rpartition("::")[2]
        values = [a.flatten()[0].item() if isinstance(a, Tensor) and a.numel() == 1 else a for a in self.args]
        shown = ["x" if v is _FLOW else f"[{v.numel()}]" if isinstance(v, Tensor) else f"{v}" for v in values]
        return f"{name}({', '.join([*shown, *(str(v) for v in self.kwargs.values())])})"


class ShortPath:
    """Norm, unembedding and elementwise arithmetic, as the model was seen to do them.

    Args:
        steps: what is done to the rows, in order.
        head: index of the unembedding among the steps; all after it is arithmetic on logits.
    """

    name = "short"

    def __init__(self, steps: Sequence[ModuleCall | Arithmetic], head: int) -> None:
        self.steps = tuple(steps)
        self.head = head

    def __call__(self, rows: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position vocab"]:
        return self.after_head(self.raw(rows))

    def before_head(self, rows: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position d_head"]:
        """Everything up to the unembedding: what it is given."""
        for step in self.steps[: self.head]:
            rows = step(rows)
        return rows

    def raw(self, rows: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position vocab"]:
        """What the bare unembedding gives, before any arithmetic on logits."""
        return self.steps[self.head](self.before_head(rows))

    def after_head(self, logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row vocab"]:
        """The family's arithmetic on logits; nothing in most."""
        for step in self.steps[self.head + 1 :]:
            logits = step(logits)
        return logits

    def buffer(self, rows: int, vocab: int) -> Tensor:
        """Room for the logits of that many rows, where the unembedding writes them."""
        head = self.steps[self.head]
        weight = getattr(head.module, "weight", None) if isinstance(head, ModuleCall) else None
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            return torch.empty(rows, vocab)
        return torch.empty(rows, weight.shape[0], dtype=weight.dtype, device=weight.device)

    @property
    def finish(self) -> Callable[[Tensor], Tensor] | None:
        """What is still to be done to the logits of :meth:`project`; ``None`` where that is nothing."""
        return self.after_head if len(self.steps) > self.head + 1 else None

    @property
    def weight(self) -> Float[Tensor, "vocab d"] | None:
        """The unembedding matrix, where the head is a plain Linear: packed and quantised heads keep their own arithmetic."""
        head = self.steps[self.head]
        return head.module.weight if isinstance(head, ModuleCall) and type(head.module) is nn.Linear else None

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """What that Linear adds to each token's logit."""
        head = self.steps[self.head]
        return head.module.bias if isinstance(head, ModuleCall) and type(head.module) is nn.Linear else None

    @property
    def tiles(self) -> Float[Tensor, "vocab d"] | None:
        """:attr:`weight`, where the logits of some tokens can be had without the others'."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu":
            return None
        after = self.steps[self.head + 1 :]
        return weight if all(isinstance(step, Arithmetic) and step.is_scalar for step in after) else None

    def project(
        self, rows: Float[Tensor, "row d_model"], out: Float[Tensor, "row vocab"], product: Product | None = None
    ) -> Float[Tensor, "row vocab"]:
        """Logits of rows before :attr:`finish`, written into ``out`` where the head allows it.

        Args:
            rows: the stream.
            out: room for them.
            product: how the unembedding is multiplied; as torch does it without one.
        """
        hidden = self.before_head(rows.unsqueeze(0)).squeeze(0)
        if not self.multiplies(hidden, out):
            return self.steps[self.head](hidden.unsqueeze(0)).squeeze(0)
        return gather(self.unembed(hidden, 0, out, product), out)

    def multiplies(self, hidden: Float[Tensor, "row d"], out: Tensor) -> bool:
        """Whether the head is a plain product of these rows, with nothing to cast."""
        return self.weight is not None and self.weight.dtype == hidden.dtype == out.dtype

    def unembed(
        self,
        hidden: Float[Tensor, "row d"],
        first: int,
        out: Float[Tensor, "most token"],
        product: Product | None = None,
    ) -> Iterable[Float[Tensor, "some token"]]:
        """Logits of the tokens from ``first`` on, as many as ``out`` has room for, in blocks of rows; see :class:`Product`."""
        weight = self.weight
        assert weight is not None
        return (product or TorchProduct(weight, self.bias))(hidden.to(weight.device), first, out)

    def describe(self) -> str:
        """The steps in words."""
        return " → ".join(map(str, self.steps))


class Replay:
    """The model's own forward with its blocks bypassed and the rows injected after the last one.

    Args:
        anatomy: the model and its blocks.
    """

    name = "replay"

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._filler = int(probe_ids(anatomy.model, anatomy.embedding_rows, 1, 1, seed=3)[0, 0])

    def __call__(
        self, rows: Float[Tensor, "batch position d_model"], ids: Int[Tensor, "batch position"] | None = None
    ) -> Float[Tensor, "batch position vocab"]:
        """Logits of the rows.

        Args:
            rows: the stream after the last block.
            ids: what the embedding is given; it can't matter, and the proof shows that it does not.
        """
        blocks, model = self.anatomy.blocks, self.anatomy.model
        batch, positions = rows.shape[:2]
        if ids is None:
            ids = torch.full((batch, positions), self._filler, device=embedding_device(model))
        calls = 0

        def forward(module: nn.Module, *_: Any, **__: Any) -> Any:
            nonlocal calls
            block = blocks[calls]
            calls += 1
            device = next((p.device for p in module.parameters() if p.device.type != "meta"), rows.device)
            last = calls == len(blocks)
            filler = rows if last else torch.zeros_like(rows)
            return put_at(block.recorded, block.output_path, block.layout.tensor(filler.to(device)))

        bypassed = replaced_forward(self.anatomy.modules, lambda module: partial(forward, module))
        with bypassed, at_rest(model, grad=torch.is_grad_enabled()):
            logits = logits_of(run(model, ids))
        assert logits is not None
        return logits

    finish = None
    weight = bias = tiles = None

    def buffer(self, rows: int, vocab: int) -> Tensor:
        """Room for the logits of that many rows; only its size matters here."""
        parameter = next((p for p in self.anatomy.model.parameters() if p.is_floating_point()), torch.empty(0))
        return torch.empty(rows, vocab, dtype=parameter.dtype, device=parameter.device)

    def project(
        self, rows: Float[Tensor, "row d_model"], out: Float[Tensor, "row vocab"], product: Product | None = None
    ) -> Float[Tensor, "row vocab"]:
        """Logits of rows; the model's own forward makes them, so ``out`` and ``product`` are not used."""
        return self(rows.unsqueeze(1)).squeeze(1)

    def describe(self) -> str:
        """The path in words."""
        return "the model's own forward, blocks bypassed"


class _Recorder(TorchDispatchMode):
    """Follows one tensor from the last block to the logits; gives up as soon as something else is done to it."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = start
        self.kept: list[Tensor] = [start]  # holds what was seen, so that an address in memory is not used again
        self.steps: list[ModuleCall | Arithmetic] = []
        self.depth = 0
        self.failed = ""

    def enter(self, call: Call) -> None:
        self.depth += 1

    def leave(self, call: Call, is_block: bool) -> None:
        self.depth -= 1
        if self.depth or is_block or self.failed:
            return
        inputs = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
        if not any(v is self.current for v in inputs):
            return
        if len(call.args) != 1 or inputs != [self.current] or not isinstance(call.output, Tensor):
            self.failed = f"{call.name} takes or returns more than the stream"
            return
        self.steps.append(ModuleCall(call.name, call.module))
        self._advance(call.output)

    def _advance(self, tensor: Tensor) -> None:
        self.current = tensor
        self.kept.append(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.depth or self.failed or not any(a is self.current for a in args):
            return out
        if isinstance(out, Tensor):
            if out is not self.current and out.shape == self.current.shape and _is_same(out, self.current):
                self._advance(out)  # a view, a slice of everything, a multiplication by one
                return out
            others = [a for a in args if isinstance(a, Tensor) and a is not self.current]
            elementwise = (torch.Tag.pointwise in function.tags or function is torch.ops.aten._to_copy.default) and (
                out.shape == self.current.shape
            )
            narrows = function is torch.ops.aten.slice.Tensor and out.shape[:-1] == self.current.shape[:-1]
            if (elementwise or narrows) and all(o.ndim <= 1 for o in others):
                taken = [_FLOW if a is self.current else a for a in args]
                if narrows and len(taken) > 1:
                    taken[1] = -1  # the vocabulary is the last axis, of single rows as well
                self.steps.append(Arithmetic(function, tuple(taken), kwargs))
                self._advance(out)
                return out
        self.failed = f"{function} is no elementwise arithmetic"
        return out


def _is_same(a: Tensor, b: Tensor) -> bool:
    with torch.utils._python_dispatch._disable_current_modes():
        return same_numbers(a, b)


def trace_short_path(anatomy: Anatomy, ids: Int[Tensor, "batch position"]) -> tuple[ShortPath | None, str]:
    """Watch what the model does after its last block.

    Args:
        anatomy: the model and its blocks.
        ids: tokens to run.

    Returns:
        The short path, or ``None`` and the reason why there is none.
    """
    if not anatomy.layout.standard:
        return None, f"the stream is not one vector per position but {anatomy.layout}"
    count = 0
    recorder: _Recorder | None = None
    names = {block.name for block in anatomy.blocks}

    def on_enter(call: Call) -> None:
        if recorder is not None:
            recorder.enter(call)

    def on_exit(call: Call) -> None:
        nonlocal count, recorder
        if recorder is not None:
            if recorder.depth > 0:
                recorder.leave(call, False)
            else:  # a module that was running when the last block returned ends here
                return
        elif call.name in names:
            count += 1
            if count == len(anatomy.blocks):
                recorder = _Recorder(get_at(call.output, anatomy.blocks[-1].output_path))
                recorder.__enter__()  # type: ignore[no-untyped-call]

    with at_rest(anatomy.model), Watcher(anatomy.model, on_enter, on_exit):
        try:
            logits = logits_of(run(anatomy.model, ids))
        finally:
            if recorder is not None:
                recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if recorder is None or logits is None:
        return None, "the last block was not reached"
    if recorder.failed:
        return None, recorder.failed
    if not same_numbers(recorder.current, logits):
        return None, "the logits are not what the recorded steps lead to"
    heads = [i for i, s in enumerate(recorder.steps) if isinstance(s, ModuleCall)]
    if not heads:
        return None, "no module unembeds"
    return ShortPath(recorder.steps, heads[-1]), ""


Tail = ShortPath | Replay
