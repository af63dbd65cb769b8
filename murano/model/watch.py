"""Watching one forward: who is called, in which order, with what, and what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Call:
    """One call of one module during a watched forward.

    Args:
        name: the module's dotted name.
        module: the module.
        parents: the modules that were running when it was called, outermost first.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: what it returned.
    """

    name: str
    module: nn.Module
    parents: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = field(default=None)

    @property
    def inputs(self) -> dict[Any, Any]:
        """Arguments by position or name."""
        return {**dict(enumerate(self.args)), **self.kwargs}


class Watcher:
    """Records the calls of a model's modules while it is open.

    Args:
        model: the module to watch, with all that is inside it.
        on_enter: called before each module runs.
        on_exit: called after it; what it returns, unless ``None``, replaces the output.
    """

    def __init__(
        self,
        model: nn.Module,
        on_enter: Callable[[Call], None] | None = None,
        on_exit: Callable[[Call], Any] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self._model, self._on_enter, self._on_exit = model, on_enter, on_exit
        self._running: list[Call] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Watcher:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._exit, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(name, module, tuple(c.name for c in self._running), args, kwargs)
            self.calls.append(call)
            self._running.append(call)
            if self._on_enter is not None:
                self._on_enter(call)

        return hook

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._running.pop()
        call.output = output
        return self._on_exit(call) if self._on_exit is not None else None


@contextlib.contextmanager
def at_rest(model: nn.Module, *, grad: bool = False) -> Iterator[None]:
    """Run a model without dropout and, unless asked, without a graph; its training flag is put back afterwards."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Leave a model's own parameters out of any graph that is made meanwhile: a gradient then reaches what was passed in alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def replaced_forward(
    modules: Sequence[nn.Module], replacement: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Let ``replacement(module)`` run in place of each module's forward; whatever replaced that before is put back."""
    missing = object()
    before = [module.__dict__.get("forward", missing) for module in modules]
    try:
        for module in modules:
            module.forward = replacement(module)
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is missing:
                del module.__dict__["forward"]
            else:
                module.forward = own


def logits_of(output: Any) -> Tensor | None:
    """The logits in what a causal LM returned."""
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        logits = output[0]
    return logits if isinstance(logits, Tensor) else None
