"""A long prompt in less memory: what reads each position by itself takes a piece of the prompt at a time.

An MLP widens every position to several times the residual stream and narrows it again: at thousands of positions that is most of what a
forward holds. Which modules may be cut up is not told by their names: they hold linear maps and norms alone, and were seen to give a piece
what they give it within the whole. Main memory that was freed is given back before each of them, before a block's output is read, and
before the next block starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from murano.model.anatomy import POSITIONS, Anatomy, probe_ids, run
from murano.model.proof import difference, rounding
from murano.model.watch import Watcher, at_rest, replaced_forward
from murano.room import give_back

#: Prompts of more positions run in pieces, and how many positions a piece has.
LONG, PIECE = 2048, 1024


@torch.no_grad()
def find_positionwise(anatomy: Anatomy) -> list[nn.Module]:
    """The modules inside blocks that give each position what they would give it alone: in most families the MLPs.

    Args:
        anatomy: a model and its blocks.
    """
    blocks = {block.name for block in anatomy.blocks}
    ids = probe_ids(anatomy.model, anatomy.embedding_rows, 1, 2 * POSITIONS, seed=8)
    found: dict[str, nn.Module] = {}
    with at_rest(anatomy.model):
        with Watcher(anatomy.model) as watcher:
            run(anatomy.model, ids)
        for call in watcher.calls:
            if blocks.isdisjoint(call.parents) or found.keys() & {call.name, *call.parents}:
                continue
            if _may_be_cut(call.module) and _is_same_in_pieces(call.module, call.inputs, call.output):
                found[call.name] = call.module
    return list(found.values())


def _may_be_cut(module: nn.Module) -> bool:
    """Whether it is more than one linear map, made of nothing that could look at other positions, or remember them."""
    linear = [part for part in module.modules() if isinstance(part, (nn.Linear, Conv1D))]
    others = [part for part in module.modules() if part not in linear and "norm" not in type(part).__name__.lower()]
    return len(linear) > 1 and not any(own for part in others for own in (part._parameters, part._buffers))


def _is_same_in_pieces(module: nn.Module, inputs: dict[Any, Any], output: Any) -> bool:
    given = inputs.get(0)
    if len(inputs) != 1 or not isinstance(given, Tensor) or not isinstance(output, Tensor):
        return False
    if given.ndim < 2 or given.shape[:-1] != output.shape[:-1] or given.shape[-2] != 2 * POSITIONS:
        return False
    try:
        whole = module(given)  # what was recorded may have been added to since
        pieces = torch.cat([module(piece.contiguous()) for piece in given.split(POSITIONS - 2, dim=-2)], dim=-2)
    except Exception:  # the family's own code may refuse these shapes in any way it likes
        return False
    return difference(pieces, whole) <= rounding(whole)


@contextlib.contextmanager
def in_pieces(modules: Sequence[nn.Module], blocks: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Let modules take :data:`PIECE` positions at a time; one with a hook inside, which would see pieces, runs whole.

    Args:
        modules: those that were shown to read each position by itself.
        blocks: before and after each of them, main memory that was freed goes back to the system.
    """
    cut = [
        module for module in modules if not any(_is_watched(part) for part in module.modules() if part is not module)
    ]
    hooks: list[RemovableHandle] = []
    for block in blocks:  # after it, too, its output is read
        hooks += [
            block.register_forward_pre_hook(lambda *_: give_back()),
            block.register_forward_hook(lambda *_: give_back()),
        ]
    try:
        with replaced_forward(cut, lambda module: partial(_forward, module.forward)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a module's forward gives, made piece by piece."""
    given = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(given, Tensor) or given.shape[-2] <= PIECE:
        return forward(*args, **kwargs)
    if given.device.type == "cpu":
        give_back()  # what the attention before it has freed
    out: Float[Tensor, "*batch position d"] | None = None
    for start in range(0, given.shape[-2], PIECE):
        piece = forward(given[..., start : start + PIECE, :].contiguous())
        out = piece.new_empty(*given.shape[:-1], piece.shape[-1]) if out is None else out
        out[..., start : start + PIECE, :] = piece
    return out
