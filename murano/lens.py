"""The logit lens as one function: prompts in, what each layer predicts out.

Data takes this way: prompts → tokens → batches of one length order → a forward that hands out the residual stream as it passes → rows
asked for → the proved tail, a bounded chunk at a time → the few numbers asked for, written to their place in the user's order.
"""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from murano.address import Address
from murano.artifacts.checkpoint import Checkpoint
from murano.artifacts.logit_lens import LogitLensResult
from murano.errors import InputError
from murano.model import MuranoModel, batching
from murano.prompts import PromptBatch, as_prompts
from murano.reader import Cells, Reader, Tables
from murano.readout.request import check_top_k, parse_layers, parse_positions

logger = logging.getLogger(__name__)

#: Room for one chunk of logits. 32 MiB are 170 rows of a vocabulary of 49 152 in float32: enough for a product near its peak speed.
MAX_CHUNK_BYTES = 32 << 20
#: Tokens of one forward, padding counted: what bounds its activations.
MAX_BATCH_TOKENS = 2048
#: Batches between two saves of a checkpoint.
CHECKPOINT_BATCHES = 8


class LensInterrupted(KeyboardInterrupt):
    """The lens was stopped by the user; says how far it came."""


@torch.no_grad()
def logit_lens(
    model: MuranoModel,
    prompts: Any,
    *,
    layers: Any = "all",
    positions: Any = "all",
    top_k: int = 5,
    keep: str | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    on_error: str = "raise",
    product: str = "auto",
    checkpoint: Path | None = None,
) -> LogitLensResult:
    """Read the residual stream at every layer through the model's own final norm and unembedding.

    Args:
        model: the model.
        prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects.
        layers: ``"all"``, an int, a range or slice, an address or a list of these, in the order wanted; negative ints count from
            the last layer, ``"embeddings"`` is the row before block 0. A string may hold several: ``"embeddings,0-5"``.
        positions: ``"all"``, ``"last"``, or token indices; negative ones count from each prompt's end.
        top_k: how many tokens to keep of each distribution.
        keep: ``"residuals"`` keeps the residuals too, so that any other question can be asked of them later.
        max_chunk_bytes: room for one chunk of logits; results do not depend on it beyond rounding.
        max_batch_tokens: tokens of one forward; results do not depend on it beyond rounding.
        product: which matrix product to use: ``"auto"`` times those at hand and takes the fastest that is as accurate as torch's,
            ``"torch"`` pins torch's own, as a checkpoint does.
        checkpoint: a file to keep what was read so far in, every :data:`CHECKPOINT_BATCHES` batches; with the file of a lens that was
            killed it goes on from there, with the same result to the bit. The caller removes it.
        on_error: ``"raise"`` to refuse the whole set for one bad prompt, ``"skip"`` to leave it out and say so in ``notes``.

    Raises:
        InputError: prompts, layers, positions or ``top_k`` that this model can't take; before any forward.
        ReadoutError: the last layer's reading is not the model's own prediction.
    """
    batch_of_prompts = as_prompts(prompts)
    model.check_layers(parse_layers(layers))
    wanted_positions = parse_positions(positions)
    check_top_k(top_k)
    if keep not in (None, "residuals"):
        raise InputError(f"keep={keep!r} is unknown. Use keep='residuals'.")
    addresses = parse_layers(layers, model.n_layers)
    check_top_k(top_k, model.vocab_size)
    encoded, notes = _encode(model, batch_of_prompts, wanted_positions, on_error)
    cells = Cells.of(encoded, wanted_positions, set(notes))
    n_cells = cells.input_ids.numel()
    tables = Tables.empty(len(addresses), n_cells, top_k)
    if keep == "residuals":
        tables.residuals = torch.full(
            (len(addresses), n_cells, model.d_model), float("nan"), dtype=model.anatomy.stream_dtype
        )
    if checkpoint is not None and product == "auto":
        product = "torch"  # what is fastest may change between two runs, and with it the last bits
    reader = Reader(model, addresses, tables, max_chunk_bytes, product)
    good = [i for i in range(len(encoded)) if i not in notes]
    batches = batching.make_batches(
        encoded, max_tokens=max_batch_tokens, mix_lengths=model.check_readout().pads, order=good
    )
    sections = [batches[i : i + CHECKPOINT_BATCHES] for i in range(0, len(batches), CHECKPOINT_BATCHES)]
    request = [
        list(map(str, addresses)),
        encoded,
        str(positions),
        top_k,
        keep,
        max_chunk_bytes,
        max_batch_tokens,
        product,
    ]
    saved = Checkpoint(checkpoint, request, tables) if checkpoint is not None else None
    first = saved.load() if saved is not None else 0
    done = sum(len(batch.prompts) for section in sections[:first] for batch in section)
    with tqdm(total=len(good), initial=done, unit="prompt", desc="logit lens", delay=2.0, leave=False) as progress:
        try:
            for index, section in enumerate(sections[first:], start=first):
                todo = list(section)
                while todo:
                    batch = todo.pop(0)
                    try:
                        reader.read(batch, cells)
                    except torch.cuda.OutOfMemoryError:
                        if len(batch.prompts) == 1:
                            raise
                        todo[:0] = _halves(batch, encoded)
                        continue
                    done += len(batch.prompts)
                    progress.update(len(batch.prompts))
                # Rows of one section never share a chunk with the next one's: so a resumed lens computes the same products.
                if saved is not None or index == len(sections) - 1:
                    reader.flush(whole_chunks=False)
                if saved is not None:
                    saved.save(index + 1)
        except KeyboardInterrupt:
            kept = f"{checkpoint} keeps what was read" if saved is not None else "nothing was kept"
            raise LensInterrupted(f"The lens was stopped after {done} of {len(good)} prompts; {kept}.") from None
    _warn(tables.odd)
    shape = (len(addresses), *cells.input_ids.shape)
    return LogitLensResult(
        addresses=addresses,
        top_ids=tables.top_ids.unflatten(1, shape[1:]),
        top_probs=tables.top_probs.unflatten(1, shape[1:]),
        entropy=tables.entropy.view(shape),
        log_normalizer=tables.log_normalizer.view(shape),
        input_ids=cells.input_ids,
        attention_mask=cells.position_index >= 0,
        position_index=cells.position_index,
        words=model.words,
        model=describe(model),
        readout=model.check_readout().to_dict(),
        residuals=tables.residuals.unflatten(1, shape[1:]) if tables.residuals is not None else None,
        notes=(*notes.values(), *tables.odd.values()),
    )


def _encode(
    model: MuranoModel, prompts: PromptBatch, positions: tuple[int, ...] | None, on_error: str
) -> tuple[list[list[int]], dict[int, str]]:
    """Tokens of every prompt, and what is wrong with those that can't be read."""
    if on_error not in ("raise", "skip"):
        raise InputError(f"on_error={on_error!r} is unknown. Use 'raise' or 'skip'.")
    encoded: list[list[int]] = []
    bad: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        ids: list[int] = []
        try:
            ids = batching.encode(prompt, model.tokenizer)
            wrong = batching.check_ids(ids, rows=model.anatomy.embedding_rows, context=model.context)
        except InputError as error:
            wrong = f"can't be read ({error})"
        outside = [p for p in positions or () if not -len(ids) <= p < len(ids)]
        if not wrong and outside:
            wrong = f"has {len(ids)} tokens, so it has no position {outside[0]}"
        if wrong:
            bad[index] = f"Prompt {index} {wrong}: {str(prompt)!r:.60}."
            if on_error == "raise":
                raise InputError(bad[index] + ("" if len(prompts) == 1 else " With on_error='skip' it is left out."))
        encoded.append(ids)
    if len(bad) == len(prompts):
        raise InputError(f"Every prompt was left out. {bad[0]}")
    return encoded, bad


def _halves(batch: batching.Batch, encoded: Sequence[Sequence[int]]) -> list[batching.Batch]:
    """The same prompts in two batches, after the device ran out of memory."""
    n = len(batch.prompts)
    torch.cuda.empty_cache()
    logger.warning("Out of device memory with %d prompts in a batch: going on with halves.", n)
    parts = []
    for prompts in (batch.prompts[: n // 2], batch.prompts[n // 2 :]):
        parts += batching.make_batches(encoded, max_tokens=batch.ids.numel(), mix_lengths=True, order=prompts)
    return parts


def _warn(odd: dict[Address, str]) -> None:
    for note in odd.values():
        warnings.warn(note, stacklevel=4)


def describe(model: MuranoModel) -> dict[str, Any]:
    """What an artifact says about the model it was read from."""
    packages = ("murano-interp", "torch", "transformers", "tokenizers", "numpy")
    return {
        "model_id": model.model_id,
        "revision": model.revision,
        "class": type(model.hf_model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "d_model": model.d_model,
        "vocab_size": model.vocab_size,
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
