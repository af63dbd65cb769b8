"""Reading the residual stream while a forward runs, and the model's own logits at its end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.address import Address
from murano.errors import InputError
from murano.model.anatomy import Anatomy, Block, probe_ids, run, stream_in
from murano.model.proof import another_shape, difference
from murano.model.stream import get_at, put_at
from murano.model.watch import Watcher, at_rest, logits_of

#: How the last position's logits come out of the model's own forward without those of all positions.
Ending = Literal["argument", "narrow", "full"]
OnStream = Callable[[Address, Float[Tensor, "batch position d_model"]], None]


class _Enough(Exception):
    """Everything that was asked for has been read: the rest of the forward is not run."""


@torch.no_grad()
def find_ending(anatomy: Anatomy) -> Ending:
    """How this model gives the logits of the last position alone: tried, and compared with all of them."""
    ids = probe_ids(anatomy.model, anatomy.embedding_rows, 2, 5, seed=4)
    with at_rest(anatomy.model):
        logits = logits_of(run(anatomy.model, ids))
    assert logits is not None
    endings: list[Ending] = ["narrow"]
    if "logits_to_keep" in inspect.signature(anatomy.model.forward).parameters:
        endings.insert(0, "argument")
    streams: list[Tensor] = []
    for ending in endings:
        streams.clear()
        try:
            layers = [Address(i) for i in range(len(anatomy.blocks))]
            found = forward(anatomy, ids, layers, lambda _, stream: streams.append(stream), ending=ending)
        except Exception:
            continue
        # Asked for the last logits alone, some families run their last blocks on the last position alone: nothing to read there.
        if any(stream.shape[:2] != ids.shape for stream in streams):
            continue
        if found is not None and difference(found[:, -1:], logits[:, -1:]) <= another_shape(logits):
            return ending
    return "full"


def forward(
    anatomy: Anatomy,
    ids: Int[Tensor, "batch position"],
    wanted: Collection[Address] = (),
    on_stream: OnStream | None = None,
    *,
    ending: Ending | None = "full",
    mid: Mapping[int, tuple[nn.Module, Any]] | None = None,
    call: Callable[..., Any] = run,
) -> Float[Tensor, "batch position vocab"] | None:
    """Run the model once and hand out the residual stream as it passes.

    Args:
        anatomy: the model and its blocks.
        ids: the tokens.
        wanted: which addresses to hand out.
        on_stream: called with each of them, in the order in which they pass.
        ending: how to get the logits; ``None`` stops the forward after the last wanted address and gives none.
        mid: where ``resid_mid`` can be read, by layer (see :func:`find_mid`).
        call: runs the model on the tokens: a plain forward, or one that goes on from a cache.

    Returns:
        The model's own logits: of all positions for ``"full"``, else of the last one.
    """
    model, blocks = anatomy.model, anatomy.blocks
    batch = ids.shape[0]
    missing = set(wanted)
    calls = {"enter": 0, "exit": 0}

    def give(address: Address, block: Block, tensor: Tensor) -> None:
        if address in missing and on_stream is not None:
            missing.discard(address)
            on_stream(address, block.layout.rows(tensor, batch))
            if ending is None and not missing:
                raise _Enough

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer = calls["enter"]
        calls["enter"] += 1
        if layer == 0:
            give(Address(None, "embeddings"), blocks[0], stream_in(blocks[0], args, kwargs))
        if Address(layer, "resid_pre") in missing:
            give(Address(layer, "resid_pre"), blocks[layer], stream_in(blocks[layer], args, kwargs))

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        layer = calls["exit"]
        calls["exit"] += 1
        block = blocks[layer]
        tensor = get_at(output, block.output_path)
        give(Address(layer, "resid_post"), block, tensor)
        if ending == "narrow" and layer == len(blocks) - 1:
            last = block.layout.rows(tensor, batch)[:, -1:]
            return put_at(output, block.output_path, block.layout.tensor(last))
        return None

    def middle(layer: int, path: Any) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = get_at({**dict(enumerate(args)), **kwargs}, path)
            if tensor.ndim == 2:  # OPT flattens prompts and positions before its MLP
                tensor = tensor.unflatten(0, ids.shape)
            give(Address(layer, "resid_mid"), blocks[layer], tensor)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            address = Address(None, name)
            if calls["exit"] == len(blocks) and address in missing and on_stream is not None:
                missing.discard(address)
                on_stream(address, output.reshape(batch, -1, output.shape[-1]))
                if ending is None and not missing:
                    raise _Enough

        return hook

    hooks: list[Any] = []
    for module in anatomy.modules:
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    for address in wanted:
        layer = address.layer
        if address.component == "resid_mid" and mid is not None and layer is not None and layer in mid:
            module, path = mid[layer]
            hooks.append(module.register_forward_pre_hook(middle(layer, path), with_kwargs=True))
    for component, name in (("ln_final", anatomy.final_norm), ("lm_head", anatomy.head)):
        if Address(None, component) in missing and name is not None:
            hooks.append(model.get_submodule(name).register_forward_hook(after(component)))
    options = {"logits_to_keep": 1} if ending == "argument" else {}
    try:
        with at_rest(model, grad=torch.is_grad_enabled()):
            return logits_of(call(model, ids, **options))
    except _Enough:
        return None
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def find_mid(anatomy: Anatomy) -> dict[int, tuple[nn.Module, Any]]:
    """Where the stream between attention and MLP can be read: the input of the module that reads it.

    A block has such a place if a module inside it is given what came in plus what an earlier module of it returned, or a fixed
    multiple of that. Blocks whose attention and MLP run side by side have none, nor have those that norm the sum themselves.

    Returns:
        For each layer that has one, the module and where the stream lies in its arguments.
    """
    ids = probe_ids(anatomy.model, anatomy.embedding_rows, 2, 5, seed=5)
    with at_rest(anatomy.model), Watcher(anatomy.model) as watcher:
        run(anatomy.model, ids)
    found: dict[int, tuple[nn.Module, Any]] = {}
    block_calls = [c for c in watcher.calls if c.name in {b.name for b in anatomy.blocks}]
    for layer, (block, call) in enumerate(zip(anatomy.blocks, block_calls, strict=False)):
        stream = stream_in(block, call.args, call.kwargs)
        start = watcher.calls.index(call)
        inside = [c for c in watcher.calls[start + 1 :] if call.name in c.parents]
        inside = inside[
            : next((i for i, c in enumerate(watcher.calls[start + 1 :]) if call.name not in c.parents), len(inside))
        ]
        written: list[Tensor] = []
        for child in inside:
            if child.parents[-1] != call.name:
                continue
            for key, value in child.inputs.items():
                same = isinstance(value, Tensor) and value.numel() == stream.numel() and value is not stream
                if same and any(_is_sum(value.reshape(stream.shape), stream, w) for w in written):
                    found.setdefault(layer, (child.module, (key,)))
            output = child.output[0] if isinstance(child.output, (tuple, list)) and child.output else child.output
            if isinstance(output, Tensor) and output.shape == stream.shape:
                written.append(output)
    return found


def _is_sum(value: Tensor, stream: Tensor, written: Tensor) -> bool:
    """Whether ``value`` is ``stream + c · written`` for some number c."""
    if torch.equal(value, stream + written):
        return True
    change, written = (value - stream).double(), written.double()
    scale = (change * written).sum() / (written * written).sum()
    return bool(scale != 0) and bool((change - scale * written).abs().max() <= 1e-5 * change.abs().max())


def check_places(anatomy: Anatomy, addresses: Collection[Address], mid: dict[int, Any]) -> None:
    """Refuse an address that this model does not have.

    Raises:
        InputError: naming the address and those that exist.
    """
    for address in addresses:
        if address.component == "resid_mid" and address.layer not in mid:
            have = f"layers {sorted(mid)}" if mid else "no layer"
            raise InputError(
                f"'{address}' does not exist in {type(anatomy.model).__name__}: {have} of it has a module that takes the stream "
                "in after attention and before the MLP. Use resid_pre or resid_post."
            )
        name = {"ln_final": anatomy.final_norm, "lm_head": anatomy.head}.get(address.component, "")
        if name is None:
            raise InputError(
                f"'{address}' does not exist in {type(anatomy.model).__name__}: no such module is called after its last block."
            )
