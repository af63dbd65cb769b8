"""Who is measured: each reads the same prompts on the same float32 weights."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from murano import MuranoModel, Prompt
from murano.lens import MAX_BATCH_TOKENS, MAX_CHUNK_BYTES, logit_lens
from murano.tiles import plan

Ids = list[list[int]]
Run = Callable[[], Any]


def model_in_float32() -> MuranoModel:
    """The bundled model, its weights loaded and nothing proved or measured yet."""
    model = MuranoModel(dtype=torch.float32)
    assert next(model.hf_model.parameters()).dtype == torch.float32
    return model


def has_products() -> bool:
    """Whether this Murano lets its matrix product be chosen."""
    return "product" in inspect.signature(logit_lens).parameters


@dataclass(frozen=True)
class Contender:
    """One way to read a model.

    Args:
        label: what it is called in the table.
        make: given a model, token ids and ``"all"`` or ``"last"``, makes what is made once and returns the run.
        positions: which of ``"all"`` and ``"last"`` it can do.
        own_model: it leaves hooks on the module, and so gets one of its own.
    """

    label: str
    make: Callable[[MuranoModel, Ids, str], Run]
    positions: tuple[str, ...] = ("all", "last")
    own_model: bool = False


def same_batches(ids: Ids) -> Iterator[Tensor]:
    """Prompts of one length in the batches that Murano makes of them, so that forwards are the same."""
    per_batch = max(1, MAX_BATCH_TOKENS // len(ids[0]))
    for start in range(0, len(ids), per_batch):
        yield torch.tensor(ids[start : start + per_batch])


def chunk_rows(vocab: int) -> int:
    """Rows of a chunk of logits, as Murano makes them by default."""
    rows = max(1, MAX_CHUNK_BYTES // (4 * vocab))
    return rows - rows % 64 if rows > 64 else rows


def _murano(**asked: Any) -> Callable[[MuranoModel, Ids, str], Run]:
    def make(model: MuranoModel, ids: Ids, positions: str) -> Run:
        model.check_readout()
        prompts = [Prompt(token_ids=tuple(i)) for i in ids]
        return lambda: logit_lens(model, prompts, positions=positions, **asked)

    return make


def bare_product(model: MuranoModel, ids: Ids, positions: str, tiles: bool = False, library: str = "torch") -> Run:
    """The floor of a library's own product: forward, norm, and products of the same rows in the same chunks; no result.

    Args:
        model: the model.
        ids: the prompts.
        positions: ``"all"`` or ``"last"``.
        tiles: multiply many rows with a tile of the vocabulary at a time, as Murano does, instead of as many as whole rows of logits
            have room for.
        library: ``"torch"``, or ``"onednn"`` with all of the weight packed beforehand.
    """
    hf: Any = model.hf_model
    blocks, norm, weight = hf.model.layers, hf.model.norm, hf.lm_head.weight
    room, width = chunk_rows(weight.shape[0]), weight.shape[0]
    planned = plan(torch.empty(1, width), 5, MAX_CHUNK_BYTES) if tiles else None
    if planned is not None:
        room, width = planned
    tiles_of_weight = weight.detach().split(width)
    if library == "onednn":
        tiles_of_weight = [torch.ops.mkldnn._reorder_linear_weight(tile, room) for tile in tiles_of_weight]

    @torch.no_grad()
    def run() -> None:
        # As many rows as there are, if they are fewer than a chunk.
        n = len(blocks) * len(ids) * (len(ids[0]) if positions == "all" else 1)
        buffer = torch.empty(min(room, n), width)
        waiting: list[Tensor] = []

        def flush(whole: bool) -> None:
            rows = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting.clear()
            while len(rows) >= room or (len(rows) and not whole):
                now, rows = rows[:room], rows[room:]
                hidden = norm(now)
                for tile in tiles_of_weight:
                    if library == "onednn":
                        torch.ops.mkldnn._linear_pointwise(hidden, tile, None, "none", [], "")
                    else:
                        torch.mm(hidden, tile.T, out=buffer.view(-1)[: len(now) * len(tile)].view(len(now), -1))
            waiting.append(rows)

        def hook(module: Any, args: Any, output: Any) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            stream = stream if positions == "all" else stream[:, -1]
            waiting.append(stream.reshape(-1, stream.shape[-1]))
            flush(whole=True)

        hooks = [block.register_forward_hook(hook) for block in blocks]
        try:
            for batch in same_batches(ids):
                hf.model(input_ids=batch, use_cache=False)
            flush(whole=False)
        finally:
            for handle in hooks:
                handle.remove()

    return run


def plain_transformers(model: MuranoModel, ids: Ids, positions: str) -> Run:
    """What a user writes without a library: per layer norm, head, softmax, the best token; eight prompts at a time."""
    hf: Any = model.hf_model
    norm, head = hf.model.norm, hf.lm_head

    @torch.no_grad()
    def run() -> list[Any]:
        found = []
        for start in range(0, len(ids), 8):
            out = hf(input_ids=torch.tensor(ids[start : start + 8]), output_hidden_states=True, use_cache=False)
            for layer, hidden in enumerate(out.hidden_states[1:]):
                rows = hidden if positions == "all" else hidden[:, -1:]
                # The last hidden state of transformers is normed already.
                logits = head(rows if layer == len(out.hidden_states) - 2 else norm(rows))
                found.append(logits.softmax(dim=-1).max(dim=-1))
        return found

    return run


def forward_alone(keep: int) -> Callable[[MuranoModel, Ids, str], Run]:
    """The model's own forward, no lens: with all logits, or the last position's only."""

    def make(model: MuranoModel, ids: Ids, positions: str) -> Run:
        hf: Any = model.hf_model

        @torch.no_grad()
        def run() -> None:
            for batch in same_batches(ids):
                hf(input_ids=batch, use_cache=False, logits_to_keep=keep)

        return run

    return make


def nnterp_lens(model: MuranoModel, ids: Ids, positions: str) -> Run:
    """nnterp's ``logit_lens``: the whole distribution at the last position."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from nnterp.interventions import logit_lens as theirs

        wrapped = model.nnterp
    wrapped.tokenizer.padding_side = "left"  # it refuses to find the last position otherwise; nothing is padded here

    @torch.no_grad()
    def run() -> Any:
        return theirs(wrapped, ids)

    return run


CONTENDERS: dict[str, Contender] = {
    "murano": Contender("Murano, top-5 + entropy", _murano(top_k=5)),
    "murano-top1": Contender("Murano, top-1", _murano(top_k=1)),
    "bare": Contender("bare product (torch.mm)", bare_product),
    "bare-tiles": Contender("bare product in Murano's tiles", partial(bare_product, tiles=True)),
    "bare-onednn": Contender("bare product in tiles by oneDNN", partial(bare_product, tiles=True, library="onednn")),
    "transformers": Contender("transformers, softmax per layer", plain_transformers),
    "nnterp": Contender("nnterp logit_lens", nnterp_lens, ("last",), own_model=True),
    "forward": Contender("plain forward, last logits", forward_alone(1)),
    "forward-all": Contender("plain forward, all logits", forward_alone(0)),
}
if has_products():
    CONTENDERS["murano-torch"] = Contender("Murano, product='torch'", _murano(top_k=5, product="torch"))
