"""The logit lens as one function: prompts in, what each layer predicts out.

Data takes this way: prompts → tokens → batches of one length order → a forward that hands out the residual stream as it passes → rows
asked for → the proved tail, a bounded chunk at a time → the few numbers asked for, written to their place in the user's order.
"""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from murano.address import Address, lens_address
from murano.artifacts.logit_lens import LogitLensResult
from murano.artifacts.words import NO_TOKEN
from murano.errors import InputError, ReadoutError
from murano.model import MuranoModel, batching, residuals
from murano.model.proof import rounding
from murano.prompts import PromptBatch, as_prompts
from murano.artifacts.checkpoint import Checkpoint
from murano.readout.reduce import CPU_SLICE_BYTES, reduce_rows

logger = logging.getLogger(__name__)

#: Room for one chunk of logits. 32 MiB are 170 rows of a vocabulary of 49 152 in float32: enough for a product near its peak speed.
MAX_CHUNK_BYTES = 32 << 20
#: Tokens of one forward, padding counted: what bounds its activations.
MAX_BATCH_TOKENS = 2048
#: Batches between two saves of a checkpoint.
CHECKPOINT_BATCHES = 8


class LensInterrupted(KeyboardInterrupt):
    """The lens was stopped by the user; says how far it came."""


def parse_layers(layers: Any, n_layers: int | None = None) -> tuple[Address, ...]:
    """The addresses that ``layers`` names, in the user's order.

    Args:
        layers: ``"all"``, an int, a range, an address, or a list of any of these; ``"embeddings"`` is the row before block 0.
        n_layers: how many layers the model has; without it ``"all"`` gives nothing and negative layers stay as they are.

    Raises:
        InputError: what is no address, is not on the residual stream, is outside the model, or is named twice.
    """
    is_one = isinstance(layers, (str, int, Address)) or (
        isinstance(layers, tuple) and len(layers) == 2 and isinstance(layers[1], str) and layers[1] != "all"
    )
    items: Iterable[Any] = [layers] if is_one else layers
    try:
        items = list(items)
    except TypeError:
        raise InputError(f"layers={layers!r} is neither 'all' nor a layer nor a list of layers.") from None
    found: list[Address] = []
    for item in items:
        if isinstance(item, str) and item == "all":
            found.extend(Address(i) for i in range(n_layers or 0))
            continue
        nested = item if isinstance(item, (range, slice)) else None
        if isinstance(nested, slice):
            nested = range(*nested.indices(n_layers)) if n_layers is not None else range(0)
        for one in nested if nested is not None else [item]:
            address = lens_address(one)
            found.append(address if n_layers is None else address.resolve(n_layers))
    twice = [a for i, a in enumerate(found) if a in found[:i]]
    if twice:
        raise InputError(f"'{twice[0]}' is named twice in layers={layers!r}.")
    if not found and n_layers is not None:
        raise InputError(f"layers={layers!r} names no layer.")
    return tuple(found)


def parse_positions(positions: Any) -> tuple[int, ...] | None:
    """The positions that are read of each prompt; ``None`` for all of them.

    Args:
        positions: ``"all"``, ``"last"``, an int, or a list or range of ints; negative ones count from a prompt's end.

    Raises:
        InputError: anything else, or no position at all.
    """
    if isinstance(positions, str):
        if positions in ("all", "last"):
            return None if positions == "all" else (-1,)
        raise InputError(f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1].")
    try:
        found = (positions.__index__(),) if hasattr(positions, "__index__") else tuple(p.__index__() for p in positions)
    except (TypeError, AttributeError):
        raise InputError(f"positions={positions!r} is unknown. Use 'all', 'last', or token indices such as [0, -1].") from None
    if not found:
        raise InputError("positions is empty: use 'all', 'last', or token indices such as [0, -1].")
    return found


def check_top_k(top_k: Any, vocab_size: int | None = None) -> int:
    """``top_k`` if it can be had.

    Raises:
        InputError: it is no whole number from 1 to the size of the vocabulary.
    """
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1 or (vocab_size is not None and top_k > vocab_size):
        upper = f"to {vocab_size}, the size of the vocabulary" if vocab_size is not None else "upwards"
        raise InputError(f"top_k={top_k!r}: it must be a whole number from 1 {upper}.")
    return top_k


@dataclass
class _Cells:
    """Where results go: every requested position of every prompt is a cell, on a grid aligned at the prompts' ends."""

    input_ids: Int[Tensor, "prompt position"]
    position_index: Int[Tensor, "prompt position"]

    @classmethod
    def of(cls, encoded: Sequence[Sequence[int]], positions: tuple[int, ...] | None, skipped: set[int]) -> _Cells:
        width = len(positions) if positions is not None else max((len(e) for i, e in enumerate(encoded) if i not in skipped), default=0)
        ids = torch.full((len(encoded), width), NO_TOKEN)
        index = torch.full((len(encoded), width), -1)
        for prompt, tokens in enumerate(encoded):
            if prompt in skipped:
                continue
            here = list(range(len(tokens))) if positions is None else [p % len(tokens) for p in positions]
            at = torch.tensor(here)
            index[prompt, width - len(here) :] = at
            ids[prompt, width - len(here) :] = torch.tensor(list(tokens))[at]
        return cls(ids, index)

    def of_batch(self, batch: batching.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Row in the batch, position in the prompt, and flat cell, of every cell of a batch."""
        prompts = torch.tensor(batch.prompts)
        row, column = (self.position_index[prompts] >= 0).nonzero(as_tuple=True)
        prompt = prompts[row]
        return row, self.position_index[prompt, column], prompt * self.position_index.shape[1] + column


@dataclass
class _Tables:
    """The results, filled cell by cell; one row per layer and cell."""

    top_ids: Tensor
    top_probs: Tensor
    entropy: Tensor
    log_normalizer: Tensor
    residuals: Tensor | None = None
    odd: dict[Address, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, layers: int, cells: int, top_k: int) -> _Tables:
        def nan(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"))

        ids = torch.full((layers, cells, top_k), NO_TOKEN, dtype=torch.int32)
        return cls(ids, nan(layers, cells, top_k), nan(layers, cells), nan(layers, cells))


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
    checkpoint: Path | None = None,
) -> LogitLensResult:
    """Read the residual stream at every layer through the model's own final norm and unembedding.

    Args:
        model: the model.
        prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects.
        layers: ``"all"``, an int, a range, an address or a list of these, in the order wanted; negative ints count from the last
            layer, ``"embeddings"`` is the row before block 0.
        positions: ``"all"``, ``"last"``, or token indices; negative ones count from each prompt's end.
        top_k: how many tokens to keep of each distribution.
        keep: ``"residuals"`` keeps the residuals too, so that any other question can be asked of them later.
        max_chunk_bytes: room for one chunk of logits; results do not depend on it beyond rounding.
        max_batch_tokens: tokens of one forward; results do not depend on it beyond rounding.
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
    cells = _Cells.of(encoded, wanted_positions, set(notes))
    n_cells = cells.input_ids.numel()
    tables = _Tables.empty(len(addresses), n_cells, top_k)
    if keep == "residuals":
        tables.residuals = torch.full((len(addresses), n_cells, model.d_model), float("nan"), dtype=model.anatomy.stream_dtype)
    reader = _Reader(model, addresses, tables, max_chunk_bytes)
    good = [i for i in range(len(encoded)) if i not in notes]
    batches = batching.make_batches(encoded, max_tokens=max_batch_tokens, mix_lengths=model.check_readout().pads, order=good)
    sections = [batches[i : i + CHECKPOINT_BATCHES] for i in range(0, len(batches), CHECKPOINT_BATCHES)]
    request = [list(map(str, addresses)), encoded, str(positions), top_k, keep, max_chunk_bytes, max_batch_tokens]
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


class _Reader:
    """Reads one batch after another into the tables, through one buffer for logits.

    Rows of several layers, and of several batches, are gathered until they fill a chunk: a product of many rows is far cheaper than
    many products of a few.
    """

    def __init__(self, model: MuranoModel, addresses: Sequence[Address], tables: _Tables, max_chunk_bytes: int) -> None:
        self.model, self.addresses, self.tables = model, addresses, tables
        self.tail = model.tail
        self.last = Address(model.n_layers - 1)
        # ln_final is the last block's output after the norm: reading it through the rest of the tail is reading that block.
        self.sources = [self.last if a.component == "ln_final" else a for a in addresses]
        self.mid = model.mid if any(a.component == "resid_mid" for a in addresses) else {}
        residuals.check_places(model.anatomy, addresses, self.mid)
        row = self.tail.buffer(1, model.vocab_size)
        row_bytes = row.numel() * row.element_size()
        if max_chunk_bytes < row_bytes:
            raise InputError(f"max_chunk_bytes={max_chunk_bytes} has no room for one row of logits: use at least {row_bytes}.")
        self.chunk = max_chunk_bytes // row_bytes
        if self.chunk > 64:  # products run best on whole panels
            self.chunk -= self.chunk % 64
        self.buffer = row
        self.scratch: Tensor | None = None
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def read(self, batch: batching.Batch, cells: _Cells) -> None:
        """One forward; the wanted layers are reduced as they pass, and the last one is held against the model's own logits."""
        row, position, cell = cells.of_batch(batch)
        final: list[Tensor] = []

        def on_stream(address: Address, stream: Float[Tensor, "batch position d_model"]) -> None:
            if address in self.sources:
                self._take(address, stream[row.to(stream.device), position.to(stream.device)], cell)
                # A replayed forward can't run inside the forward that is being read: there rows wait until it has ended.
                if self.tail.name == "short":
                    self.flush(whole_chunks=True)
            if address == self.last:
                final.append(stream[:1, batch.lengths[0] - 1])

        logits = residuals.forward(
            self.model.anatomy,
            batch.ids.to(self.model.device),
            {*self.sources, self.last},
            on_stream,
            ending=self.model.ending,
            mid=self.mid,
        )
        self.flush(whole_chunks=True)
        assert logits is not None
        self._check(final[0], logits[:1, -1], batch)

    def _take(self, source: Address, rows: Float[Tensor, "row d_model"], cell: Int[Tensor, " row"]) -> None:
        n_cells = self.tables.entropy.shape[1]
        for layer, address in enumerate(self.addresses):
            if self.sources[layer] == source:
                self._note_odd(address, rows)
                self.waiting.append((rows, layer * n_cells + cell))
                if self.tables.residuals is not None:
                    self.tables.residuals[layer, cell] = rows.to("cpu", self.tables.residuals.dtype)

    def flush(self, *, whole_chunks: bool) -> None:
        """Project and reduce the rows that wait.

        Args:
            whole_chunks: leave what does not fill a chunk for later.
        """
        while self.waiting and (not whole_chunks or sum(len(rows) for rows, _ in self.waiting) >= self.chunk):
            room, rows, places = self.chunk, [], []
            while self.waiting and room:
                waiting, place = self.waiting.pop(0)
                if len(waiting) > room:
                    self.waiting.insert(0, (waiting[room:], place[room:]))
                    waiting, place = waiting[:room], place[:room]
                rows.append(waiting.to(self.buffer.device))
                places.append(place)
                room -= len(waiting)
            self._reduce(torch.cat(rows) if len(rows) > 1 else rows[0], torch.cat(places))

    def _reduce(self, rows: Float[Tensor, "row d_model"], place: Int[Tensor, " row"]) -> None:
        tables = self.tables
        stats = reduce_rows(self._project(rows), tables.top_ids.shape[-1], self.tail.finish, self.scratch)
        tables.top_ids.flatten(0, 1)[place] = stats.top_ids.to("cpu", torch.int32)
        tables.top_probs.flatten(0, 1)[place] = stats.top_probs.cpu()
        tables.entropy.view(-1)[place] = stats.entropy.cpu()
        tables.log_normalizer.view(-1)[place] = stats.log_normalizer.cpu()

    def _project(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        n = len(rows)
        if len(self.buffer) < n:
            vocab = self.model.vocab_size
            self.buffer = self.tail.buffer(n, vocab)
            if self.buffer.device.type == "cpu":
                self.scratch = torch.empty(min(n, max(1, CPU_SLICE_BYTES // (4 * vocab))), vocab)
        return self.tail.project(rows, self.buffer[:n])

    def _note_odd(self, address: Address, rows: Tensor) -> None:
        peak = rows.abs().amax(dim=-1)
        for what, where in (("not finite", ~peak.isfinite()), ("all zero", peak == 0)):
            count = int(where.sum())
            if count and not any(what in note for note in self.tables.odd.values()):
                self.tables.odd[address] = f"Residuals are {what} from {address} on ({count} of {len(rows)} rows there)."

    def _check(self, last: Float[Tensor, "1 d_model"], own: Float[Tensor, "1 vocab"], batch: batching.Batch) -> None:
        read = self._project(last)
        read = (self.tail.finish(read) if self.tail.finish is not None else read)[..., : own.shape[-1]].float().cpu()
        theirs = own.float().cpu()
        finite = theirs.isfinite() & read.isfinite()
        gap = float((read - theirs)[finite].abs().max()) if bool(finite.any()) else 0.0
        # The row was computed alone here and in a batch there: products of another shape round differently.
        if gap > 4 * rounding(own) or bool((theirs.isfinite() != read.isfinite()).any()):
            raise ReadoutError(
                f"The lens disagrees with the model: at {self.last}, last position of prompt {batch.prompts[0]}, a logit differs by {gap:.3g}. "
                "Nothing that was read can be trusted. Was the model changed after it was loaded? Make a new MuranoModel from it."
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
