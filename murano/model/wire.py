"""Tensors and plain values as bytes: what goes to a worker of an engine and comes back, with nothing that could be executed.

The format is safetensors. The bytes of each tensor are sorted by their place in a number before they are compressed: the first bytes of
probabilities, and the upper bytes of token ids, are much alike.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> bytes:
    """Tensors and values as bytes; every bit comes back.

    Args:
        tensors: by name.
        about: plain values, as JSON takes them.
    """
    forms = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    planes = {name: _planes(t) for name, t in tensors.items()}
    metadata = {"about": json.dumps(about or {}), "forms": json.dumps(forms)}
    return zlib.compress(safetensors.torch.save(planes, metadata=metadata))


def unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`pack` was given."""
    raw = zlib.decompress(data)
    length = int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
    planes = safetensors.torch.load(raw)
    tensors = {
        name: planes[name].T.contiguous().view(-1).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape) in json.loads(metadata["forms"]).items()
    }
    return tensors, json.loads(metadata["about"])


def _planes(tensor: Tensor) -> Tensor:
    """The first byte of all numbers, then the second of all, and so on."""
    numbers = tensor.detach().cpu().contiguous().view(-1)
    return numbers.view(torch.uint8).view(-1, tensor.element_size()).T.contiguous()
