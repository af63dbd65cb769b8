"""What the tests hold Murano against: plain hooks and plain forwards that know nothing of it.

The stream is unpacked here by rules written for the tests alone; the only thing taken from Murano is which modules it calls blocks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from murano.model import MuranoModel
from support.tiny_models import tiny_inputs, tiny_model
from support.tiny_tokenizer import tiny_tokenizer


@lru_cache(1)
def held(family: str, dtype: torch.dtype = torch.float32) -> MuranoModel:
    """A tiny model of a family, as Murano holds it; the last one is kept."""
    return MuranoModel(tiny_model(family, dtype=dtype), tokenizer=tiny_tokenizer())


def fresh(family: str, dtype: torch.dtype = torch.float32, **tokenizer: Any) -> MuranoModel:
    """A tiny model of a family that a test may change."""
    return MuranoModel(tiny_model(family, dtype=dtype), tokenizer=tiny_tokenizer(**tokenizer))


def own_logits(model: Any, ids: Tensor) -> Tensor:
    """transformers' own logits of every position."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **options).logits
    return logits


def unpack(output: Any, batch: int, positions: int) -> Tensor:
    """``[batch, position, d]`` of what a block returned, by its shape alone."""
    while not isinstance(output, Tensor):
        output = output[0]
    shape = tuple(output.shape)
    if shape[:2] == (batch, positions):
        return output.flatten(2)
    if shape[1:3] == (batch, positions):  # parallel streams in front: gemma3n
        return torch.cat(list(output), dim=-1) if shape[0] == 1 else output.permute(1, 2, 0, 3).flatten(2)
    raise AssertionError(f"the test does not know how to read a block output of shape {shape}")


def own_stream(model: Any, ids: Tensor, blocks: Sequence[str]) -> tuple[list[Tensor], Tensor]:
    """The stream after every block call, and the logits of the same forward."""
    seen: list[Tensor] = []
    batch, positions = ids.shape

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(unpack(output, batch, positions).clone())

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in dict.fromkeys(blocks)]
    try:
        logits = own_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return seen, logits


def logits_with_injected(model: Any, ids: Tensor, blocks: Sequence[str], last: Tensor) -> Tensor:
    """The model's own logits of ``ids`` when what its last block call returns is overwritten by ``last``."""
    calls = 0
    batch, positions = ids.shape

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < len(blocks):
            return None
        holder, tensor = None, output
        while not isinstance(tensor, Tensor):
            holder, tensor = tensor, tensor[0]
        if tuple(tensor.shape[:2]) == (batch, positions):
            new = last.reshape(tensor.shape)
        else:
            new = last.unflatten(2, (tensor.shape[0], tensor.shape[3])).permute(2, 0, 1, 3).contiguous()
        return new if holder is None else type(holder)([new, *holder[1:]])

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in dict.fromkeys(blocks)]
    try:
        return own_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def block_names(model: MuranoModel) -> list[str]:
    """The names of the block calls, in order."""
    return [block.name for block in model.anatomy.blocks]


def ids_of(model: MuranoModel, *, batch: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    """Token ids that the model takes."""
    return tiny_inputs(model.hf_model, batch, length, seed)  # type: ignore[arg-type]


@contextlib.contextmanager
def forwards(module: nn.Module) -> Iterator[list[int]]:
    """Counts the forwards of a model while it is open."""
    count = [0]

    def hook(*_: Any) -> None:
        count[0] += 1

    handle = module.register_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()
