"""Captured: what ``model.capture`` read, under any of the names by which one asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from murano.address import Address
from murano.errors import MissingAddressError

Rows = Float[Tensor, "prompt position width"]


class Captured(Mapping[Address, Rows]):
    """Rows by address, in the order in which they were asked for.

    Args:
        rows: what was read, by address with the layer counted from 0.
        n_layers: how many layers the model has: ``captured[-1]`` is the last one's stream.

    Raises:
        MissingAddressError: on reading what was not captured; it is an ``InputError`` and a ``KeyError``.

    >>> import torch
    >>> captured = Captured({Address(3): torch.ones(1, 2, 4)}, n_layers=4)
    >>> captured["L3.resid_post"] is captured[3] is captured[-1] is captured[3, "resid_post"]
    True
    """

    def __init__(self, rows: Mapping[Address, Rows], n_layers: int) -> None:
        self._rows = dict(rows)
        self._n_layers = n_layers

    def __getitem__(self, address: Any, /) -> Rows:
        wanted = Address.parse(address).resolve(self._n_layers)
        if wanted not in self._rows:
            raise MissingAddressError(f"'{wanted}' was not captured. Captured: {', '.join(map(str, self))}.")
        return self._rows[wanted]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Captured({', '.join(f'{address}: {list(rows.shape)}' for address, rows in self.items())})"
