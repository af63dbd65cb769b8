"""Adding vectors to the residual stream while a model runs, and letting it write meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from murano.address import Address
from murano.errors import InputError
from murano.model.anatomy import Anatomy
from murano.model.stream import get_at, put_at


class Continuation(NamedTuple):
    """What a model wrote.

    Args:
        ids: the new tokens of each prompt.
        texts: the same as text.
    """

    ids: list[list[int]]
    texts: list[str]


def check_vectors(add: Any, n_layers: int, d_model: int) -> dict[int, Float[Tensor, " d_model"]]:
    """The vector to add after each layer.

    Raises:
        InputError: what is given is no such mapping, or an address or a vector of it can't be used.
    """
    if not isinstance(add, Mapping):
        raise InputError(f'add={add!r:.60}: give a vector for each place, such as add={{"L10.resid_post": vector}}.')
    found: dict[int, Tensor] = {}
    for given, vector in add.items():
        address = Address.parse(given).resolve(n_layers)
        if address.component != "resid_post" or address.layer is None:
            before = f"L{address.layer - 1}.resid_post" if address.layer else "L0.resid_post"
            hint = (
                f" What enters layer {address.layer} is '{before}'."
                if address.component == "resid_pre" and address.layer
                else ""
            )
            raise InputError(f"A vector can be added at L<i>.resid_post, not at '{address}'.{hint}")
        if address.layer in found:
            raise InputError(f"'{address}' is named twice in add.")
        if not isinstance(vector, Tensor) or tuple(vector.shape) != (d_model,):
            shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise InputError(f"What is added at '{address}' must be a tensor of shape ({d_model},), not {shape}.")
        if not bool(vector.isfinite().all()):
            raise InputError(f"What is added at '{address}' is not finite.")
        found[address.layer] = vector.detach()
    return found


@contextlib.contextmanager
def added(anatomy: Anatomy, vectors: Mapping[int, Float[Tensor, " d_model"]]) -> Iterator[None]:
    """Add vectors to what leaves the layers of a model, at every position, in every forward inside the ``with``.

    Raises:
        InputError: a family whose stream is not one row for each position.
    """
    if vectors and not anatomy.layout.standard:
        raise InputError(
            f"{type(anatomy.model).__name__} keeps its stream as {anatomy.layout}: no vector can be added to it."
        )
    calls = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls = 0

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        layer, calls = calls, calls + 1
        if layer not in vectors:
            return None
        path = anatomy.blocks[layer].output_path
        stream = get_at(output, path)
        return put_at(output, path, stream + vectors[layer].to(stream))

    hooks = [anatomy.model.register_forward_pre_hook(begin)]
    hooks += [module.register_forward_hook(leave) for module in anatomy.modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
