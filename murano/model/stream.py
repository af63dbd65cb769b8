"""Where the residual stream lies inside what a block takes and returns.

Families differ: a tensor, a tuple whose first item is the stream, ``[batch, position, d]``, ``[position, batch, d]``, all
positions flattened, several parallel streams ``[stream, batch, position, d]``. A :class:`StreamLayout` is found once, by
the sizes of one watched forward, and turns any of these into ``[batch, position, d_model]`` and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

#: The path to a tensor inside nested tuples, lists and dicts (model outputs included).
Path = tuple[Any, ...]


@dataclass(frozen=True)
class StreamLayout:
    """How one tensor holds a row of the residual stream for each position of each prompt.

    Args:
        batch_dim: the axis of prompts; -1 when prompts and positions are flattened into axis 0.
        position_dim: the axis of positions.
        rest: the sizes of the axes that are left: ``(d,)``, or ``(streams, d)`` where a family keeps several.
    """

    batch_dim: int
    position_dim: int
    rest: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, batch: int, positions: int) -> StreamLayout | None:
        """The layout of a tensor that was made from ``batch`` prompts of ``positions`` tokens; ``None`` if it has none."""
        if not tensor.is_floating_point():
            return None
        shape = list(tensor.shape)
        if tensor.ndim == 2 and shape[0] == batch * positions:
            return cls(-1, 0, (shape[1],))
        if tensor.ndim < 3 or batch not in shape or positions not in shape:
            return None
        batch_dim, position_dim = shape.index(batch), shape.index(positions)
        rest = tuple(size for dim, size in enumerate(shape) if dim not in (batch_dim, position_dim))
        return cls(batch_dim, position_dim, rest)

    @property
    def width(self) -> int:
        """How many numbers make a row: ``d_model``, all parallel streams counted."""
        width = 1
        for size in self.rest:
            width *= size
        return width

    @property
    def standard(self) -> bool:
        """Whether this is ``[batch, position, d_model]`` already."""
        return (self.batch_dim, self.position_dim, len(self.rest)) == (0, 1, 1)

    def rows(self, tensor: Tensor, batch: int) -> Float[Tensor, "batch position d_model"]:
        """The stream as ``[batch, position, d_model]``; a view wherever that is possible."""
        if self.standard:
            return tensor
        if self.batch_dim < 0:
            return tensor.reshape(batch, -1, self.width)
        return tensor.movedim((self.batch_dim, self.position_dim), (0, 1)).flatten(2)

    def tensor(self, rows: Float[Tensor, "batch position d_model"]) -> Tensor:
        """The inverse of :meth:`rows`: the tensor that the model's own code expects."""
        if self.standard:
            return rows
        if self.batch_dim < 0:
            return rows.reshape(-1, self.width)
        split = rows.reshape(*rows.shape[:2], *self.rest)
        return split.movedim((0, 1), (self.batch_dim, self.position_dim)).contiguous()


def find_tensor(structure: Any, accept: Callable[[Tensor], bool], path: Path = ()) -> Path | None:
    """The path to the first tensor in a nested structure that is accepted."""
    if isinstance(structure, Tensor):
        return path if accept(structure) else None
    items: Any = ()
    if isinstance(structure, dict):
        items = structure.items()
    elif isinstance(structure, (tuple, list)):
        items = enumerate(structure)
    for key, item in items:
        found = find_tensor(item, accept, (*path, key))
        if found is not None:
            return found
    return None


def get_at(structure: Any, path: Path) -> Any:
    """What lies at a path."""
    for key in path:
        structure = structure[key]
    return structure


def put_at(structure: Any, path: Path, value: Any) -> Any:
    """The same structure with another value at a path; the original is left alone."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(structure, dict):
        changed = structure.copy()
        changed[key] = put_at(structure[key], rest, value)
        return changed
    items = [put_at(item, rest, value) if i == key else item for i, item in enumerate(structure)]
    if hasattr(structure, "_fields"):  # a namedtuple
        return type(structure)(*items)
    return type(structure)(items)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or hold the same numbers."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
