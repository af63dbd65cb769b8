"""Anatomy: the blocks of a causal LM in the order in which they are called, found by watching one small forward.

No config is read and no names are assumed: blocks are the outermost modules in lists that are called one after another and return the
stream. A family that calls a block twice has two layers there; a multimodal model leads to its text tower, for only that
one is called when only text goes in.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.errors import UnsupportedModelError
from murano.model.stream import Path, StreamLayout, find_tensor, get_at
from murano.model.watch import Call, Watcher, at_rest, logits_of

#: Sizes of the watched batch: odd numbers that a model is unlikely to have as another axis.
BATCH, POSITIONS = 3, 7


@dataclass(frozen=True)
class Block:
    """One call of one block.

    Args:
        name: the module's dotted name.
        module: the module.
        layout: how its output holds the stream.
        input_path: where the stream lies in its arguments.
        output_path: where the stream lies in what it returns.
        recorded: what it returned while it was watched.
    """

    name: str
    module: nn.Module
    layout: StreamLayout
    input_path: Path
    output_path: Path
    recorded: Any


@dataclass(frozen=True)
class Anatomy:
    """What a model is made of.

    Args:
        model: the whole causal LM.
        blocks: its block calls, in order; the layers of every lens.
        final_norm: name of the norm between the last block and the unembedding, if there is one.
        head: name of the unembedding module, if it is one.
        embedding_rows: how many ids the token embedding has.
        vocab_size: how many logits the model returns.
    """

    model: nn.Module
    blocks: tuple[Block, ...]
    final_norm: str | None
    head: str | None
    embedding_rows: int
    vocab_size: int

    @property
    def layout(self) -> StreamLayout:
        """How the last block's output, which the tail reads, holds the stream."""
        return self.blocks[-1].layout

    @property
    def d_model(self) -> int:
        """The width of the residual stream."""
        return self.layout.width

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream: float32 in some families whose weights are smaller."""
        dtype: torch.dtype = get_at(self.blocks[-1].recorded, self.blocks[-1].output_path).dtype
        return dtype

    @property
    def modules(self) -> list[nn.Module]:
        """The distinct modules behind the block calls."""
        return list({id(block.module): block.module for block in self.blocks}.values())


def probe_ids(model: nn.Module, rows: int, batch: int, positions: int, seed: int) -> Int[Tensor, "batch position"]:
    """Ids for a proof, where the model takes them: see :func:`draw_ids`."""
    return draw_ids(getattr(model, "config", None), rows, batch, positions, seed).to(embedding_device(model))


def draw_ids(config: Any, rows: int, batch: int, positions: int, seed: int) -> Int[Tensor, "batch position"]:
    """Ids for a proof: drawn from the vocabulary, special ones and padding left out, the same at every load."""
    special: set[int] = set()
    for part in {id(c): c for c in (config, text_config(config)) if c is not None}.values():
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special.update(
                    v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int)
                )
    generator = torch.Generator().manual_seed(seed)
    usable = torch.tensor([i for i in range(rows) if i not in special] if rows < 4096 else range(1000, rows - 500))
    return usable[torch.randint(len(usable), (batch, positions), generator=generator)]


def text_config(config: Any) -> Any:
    """The part of a config that describes the text model; the config itself where there is only one."""
    if config is None:
        return None
    getter = getattr(config, "get_text_config", None)
    try:
        return getter(decoder=True) if getter is not None else config
    except (ValueError, TypeError):
        return config


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The token embedding, where the model says which it is."""
    try:
        return model.get_input_embeddings()  # type: ignore[operator, no-any-return]
    except (AttributeError, NotImplementedError):
        return None


def embedding_device(model: nn.Module) -> torch.device:
    """The device on which the model expects its ids."""
    embedding = input_embedding(model)
    for module in (embedding, model):
        for parameter in module.parameters() if module is not None else ():
            if parameter.device.type != "meta":
                return parameter.device
    return torch.device("cpu")


def embedding_rows(model: nn.Module) -> int:
    """How many ids the model can embed.

    Raises:
        UnsupportedModelError: the model has no token embedding.
    """
    weight = getattr(input_embedding(model), "weight", None)
    if weight is not None and weight.ndim == 2:
        return int(weight.shape[0])
    size = getattr(text_config(getattr(model, "config", None)), "vocab_size", None)
    if isinstance(size, int):
        return size
    raise UnsupportedModelError(f"{type(model).__name__} has no token embedding that ids could be read from.")


def run(model: nn.Module, ids: Int[Tensor, "batch position"], **kwargs: Any) -> Any:
    """One forward on bare ids: no cache, no mask; arguments that the model does not take are left out."""
    accepted = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "return_dict": True, **kwargs}
    given = {name: value for name, value in wanted.items() if name in accepted}
    return model(input_ids=ids, **given)


def find_anatomy(model: nn.Module) -> Anatomy:
    """Watch one small forward and find the blocks.

    Args:
        model: a causal LM, weights loaded.

    Raises:
        UnsupportedModelError: no stack of blocks can be found, or what the model returns is not one row of logits for
            each position.
    """
    name = type(model).__name__
    rows = embedding_rows(model)
    ids = probe_ids(model, rows, BATCH, POSITIONS, seed=0)
    with at_rest(model), Watcher(model) as watcher:
        try:
            output = run(model, ids)
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} can't run on token ids alone ({type(error).__name__}: {error}), so it can't be read as a causal LM."
            ) from error
    logits = logits_of(output)
    if logits is None:
        raise UnsupportedModelError(f"{name} returns no logits, so it is no causal language model.")
    if logits.shape[:-1] != (BATCH, POSITIONS):
        raise UnsupportedModelError(
            f"{name} returns logits of shape {tuple(logits.shape)} for {BATCH} prompts of {POSITIONS} tokens. "
            "A lens needs one row of logits per position; heads that are a stack of codebooks can't be read."
        )
    calls = _block_calls(model, watcher.calls)
    if not calls:
        raise UnsupportedModelError(
            f"{name} has no stack of blocks that return the residual stream, so there are no layers to read."
        )
    blocks = tuple(_block(call) for call in calls)
    norm, head = _tail_modules(watcher.calls, calls[-1], int(logits.shape[-1]))
    return Anatomy(model, blocks, norm, head, rows, int(logits.shape[-1]))


def _layout(structure: Any) -> tuple[StreamLayout, Path] | None:
    path = find_tensor(structure, lambda t: StreamLayout.of(t, BATCH, POSITIONS) is not None)
    if path is None:
        return None
    layout = StreamLayout.of(get_at(structure, path), BATCH, POSITIONS)
    assert layout is not None
    return layout, path


def _block_calls(model: nn.Module, calls: Sequence[Call]) -> list[Call]:
    """The calls of modules in lists that return the stream: outermost lists only, all of the last one's layout."""
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    candidates = [
        call
        for call in calls
        if call.name.rpartition(".")[0] in lists and any(True for _ in call.module.children()) and _layout(call.output)
    ]
    inside = {call.name for call in candidates}
    outermost = [call for call in candidates if not inside & set(call.parents)]
    if not outermost:
        return []
    last = _layout(outermost[-1].output)
    assert last is not None
    return [call for call in outermost if (found := _layout(call.output)) is not None and found[0] == last[0]]


def _block(call: Call) -> Block:
    found = _layout(call.output)
    assert found is not None
    layout, output_path = found
    shape = get_at(call.output, output_path).shape
    input_path = find_tensor(call.inputs, lambda t: t.shape == shape and t.is_floating_point()) or ()
    return Block(call.name, call.module, layout, input_path, output_path, call.output)


def _tail_modules(calls: Sequence[Call], last: Call, vocab: int) -> tuple[str | None, str | None]:
    """Names of the final norm and of the unembedding: what is called after the last block, outside of it."""
    after = [call for call in calls[calls.index(last) + 1 :] if last.name not in call.parents]
    norm = next((c.name for c in after if "norm" in type(c.module).__name__.lower()), None)
    heads = [
        c.name
        for c in after
        if isinstance(c.output, Tensor) and c.output.shape[-1] >= vocab and not any(c.module.children())
    ]
    return norm, heads[-1] if heads else None


def stream_in(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float[Tensor, "..."]:
    """The stream as a block's arguments hold it."""
    tensor: Tensor = get_at({**dict(enumerate(args)), **kwargs}, block.input_path)
    return tensor
