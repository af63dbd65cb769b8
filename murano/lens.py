"""The logit lens as one function: prompts in, what each layer predicts out.

Data takes this way: prompts → tokens → batches of one length order → a forward that hands out the residual stream as it passes → rows
asked for → the proved tail, a bounded chunk at a time → the few numbers asked for, written to their place in the user's order.
"""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from murano.answers import Answers, Question, answer_notes, read_sequences, sequences
from murano.artifacts.checkpoint import Checkpoint
from murano.artifacts.logit_lens import LogitLensResult
from murano.engine_reader import reader_of
from murano.errors import InputError
from murano.model import MuranoModel, batching
from murano.model.targets import MODES, answers_of
from murano.prompts import PromptBatch, as_prompts
from murano.reader import Cells, Reader, Tables
from murano.readout.request import (
    check_choice,
    check_model,
    check_options,
    check_top_k,
    check_whole,
    parse_layers,
    parse_positions,
)
from murano.readout.stats import parse_stats
from murano.room import make_room

logger = logging.getLogger(__name__)

#: Room for one chunk of logits. 32 MiB are 170 rows of a vocabulary of 49 152 in float32: enough for a product near its peak speed.
MAX_CHUNK_BYTES = 32 << 20
#: Tokens of one forward, padding counted: what bounds its activations.
MAX_BATCH_TOKENS = 2048
#: Residuals of all layers that wait for the last one, where divergences from it are read.
MAX_HELD_BYTES = 128 << 20
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
    stats: Any = (),
    target_mode: str = "first",
    keep: str | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    on_error: str = "raise",
    product: str = "auto",
    apart: bool = False,
    checkpoint: str | Path | None = None,
) -> LogitLensResult:
    """Read the residual stream at every layer through the model's own final norm and unembedding.

    Args:
        model: the model.
        prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects. The log-probability and rank
            of the targets and foils that they carry are read in every cell.
        layers: ``"all"``, ``"last"``, an int, a range or slice, an address or a list of these, in the order wanted; negative ints
            count from the last layer, ``"embeddings"`` is the row before block 0. A string may hold several: ``"embeddings,0-5"``.
        positions: ``"all"``, ``"last"``, or token indices, ``"0-2"`` and ``"-3:"`` too; negative ones count from each prompt's end.
        top_k: how many tokens to keep of each distribution.
        stats: further statistics of each cell, kept in ``lens.stats``: ``"max_prob"``, ``"margin"``, ``"kl"`` and ``"js"`` from the last
            layer, ``"surprisal"`` and ``"next_rank"`` of the token that follows in the prompt (see :mod:`murano.readout.stats`).
            Divergences hold the residuals of all layers of one batch: layers × tokens × d_model numbers.
        target_mode: a target of several tokens is read by its first one (``"first"``), refused (``"single"``), or read whole
            (``"sequence"``): at each prompt's last position, its log-probabilities summed, each token given those before it.
        keep: ``"residuals"`` keeps the residuals too, so that any other question can be asked of them later; ``"logits"`` keeps
            all logits, if they fit into memory.
        max_chunk_bytes: room for one chunk of logits; results do not depend on it beyond rounding.
        max_batch_tokens: tokens of one forward; results do not depend on it beyond rounding.
        product: which matrix product to use: ``"auto"`` times those at hand and takes the fastest that is as accurate as torch's,
            ``"tiles"`` pins torch's own, many rows by tiles of the vocabulary, as a checkpoint does; ``"torch"`` pins torch's own of whole
            rows: at equal shapes the model's own numbers to the bit.
        apart: give each layer's rows of a batch a product of their own, so that a layer's numbers are the same to the bit whichever
            others are read; slower where a batch has few rows.
        checkpoint: a file to keep what was read so far in, every :data:`CHECKPOINT_BATCHES` batches; with the file of a lens that was
            killed it goes on from there, with the same result to the bit. The caller removes it. A file of something else, or of a lens
            with other prompts or arguments, is refused and stays as it is.
        on_error: ``"raise"`` to refuse the whole set for one bad prompt, ``"skip"`` to leave it out and say so at the end: which
            one and why in ``notes``, its cells empty.

    Raises:
        InputError: prompts, targets, layers, positions or another argument that this model can't take; before any forward.
        ReadoutError: the last layer's reading is not the model's own prediction.
    """
    check_model(model, "logit_lens")
    bad: dict[int, str] = {}
    batch_of_prompts = as_prompts(prompts, bad=bad)
    if bad and on_error != "skip":
        raise InputError(bad[min(bad)] + _skip_hint(batch_of_prompts))
    model.check_layers(parse_layers(layers))
    wanted_positions = parse_positions(positions)
    check_top_k(top_k)
    wanted_stats = parse_stats(stats)
    check_choice("target_mode", target_mode, MODES)
    check_options(
        keep=keep,
        on_error=on_error,
        product=product,
        apart=apart,
        max_chunk_bytes=max_chunk_bytes,
        max_batch_tokens=max_batch_tokens,
    )
    if checkpoint is not None and not isinstance(checkpoint, (str, Path)):
        raise InputError(f"checkpoint={checkpoint!r}: give the name of a file to keep in it what was read so far.")
    max_chunk_bytes, max_batch_tokens = int(max_chunk_bytes), int(max_batch_tokens)
    addresses = parse_layers(layers, model.n_layers)
    top_k = check_top_k(top_k, model.vocab_size)
    encoded, answers, left_out = _encode(model, batch_of_prompts, wanted_positions, target_mode, on_error, bad)
    read_at = [
        [] if i in left_out else list(range(len(ids))) if wanted_positions is None else list(wanted_positions)
        for i, ids in enumerate(encoded)
    ]
    cells = Cells.of(encoded, read_at)
    n_cells = cells.input_ids.numel()
    question = Question.of(answers, encoded, cells, wanted_stats, top_k, model.vocab_size, target_mode)
    kept = {"residuals": model.d_model * model.stream_dtype.itemsize, "logits": model.vocab_size * 4}.get(keep or "", 0)
    tables = make_room(
        partial(_tables, question, model, len(addresses), n_cells, keep),
        len(addresses),
        [len(here) for here in read_at],
        question.bytes_of_cell,
        kept,
        keep,
    )
    if checkpoint is not None and product == "auto":
        product = "tiles"  # what is fastest may change between two runs, and with it the last bits
    if question.divergences and apart:
        raise InputError(
            f"apart=True reads each layer alone, and {question.divergences[0]!r} compares it with the last."
        )
    if question.divergences:
        held = len(addresses) * model.d_model * model.stream_dtype.itemsize
        max_batch_tokens = min(max_batch_tokens, max(1, MAX_HELD_BYTES // held))
    request = [
        *[list(map(str, addresses)), encoded, str(positions), top_k, keep, max_chunk_bytes, max_batch_tokens, product],
        *[question.tokens, list(wanted_stats)],
        *(["apart"] if apart else []),
    ]
    reader = question.reader(model, addresses, tables, max_chunk_bytes, product, apart)
    read_all(
        reader,
        encoded,
        cells,
        left_out=set(left_out),
        max_batch_tokens=max_batch_tokens,
        checkpoint=Checkpoint(Path(checkpoint), request, tables) if checkpoint is not None else None,
    )
    shape = (len(addresses), *cells.input_ids.shape)
    if target_mode == "sequence" and (whole := sequences(encoded, answers, left_out)):
        again = partial(
            reader_of(model), model, addresses, max_chunk_bytes=max_chunk_bytes, product=product, apart=apart
        )
        read_sequences(again, partial(read_all, max_batch_tokens=max_batch_tokens), whole, tables, shape)
    notes = [*left_out.values(), *tables.odd.values(), *answer_notes(answers, target_mode)]
    _warn([*_summary(left_out, len(encoded)), *tables.odd.values(), *answer_notes(answers, target_mode)])
    return LogitLensResult(
        addresses=addresses,
        **question.fields(tables, shape),
        input_ids=cells.input_ids,
        attention_mask=cells.position_index >= 0,
        position_index=cells.position_index,
        lengths=torch.tensor([0 if i in left_out else len(ids) for i, ids in enumerate(encoded)]),
        words=model.words,
        model=describe(model),
        readout=model.check_readout().to_dict(),
        prompts=batch_of_prompts,
        target_mode=target_mode,
        residuals=tables.residuals.unflatten(1, shape[1:]) if tables.residuals is not None else None,
        logits=tables.logits.unflatten(1, shape[1:]) if tables.logits is not None else None,
        notes=tuple(notes),
    )


@torch.no_grad()
def reread(
    lens: LogitLensResult,
    model: MuranoModel,
    *,
    targets: Any = None,
    foils: Any = None,
    stats: Any = (),
    top_k: int | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> LogitLensResult:
    """Ask the residuals that a lens kept another question, without a forward.

    Args:
        lens: read with ``keep="residuals"``.
        model: the model that it was read from.
        targets: the answer of each prompt, as in ``LoadPrompts``, read by its first token; without targets and foils the answers stay as
            they were read.
        foils: what each target is compared with.
        stats: further statistics of each cell; divergences need the last layer among those that were kept.
        top_k: how many tokens to keep; as many as before without it.
        max_chunk_bytes: room for one chunk of logits.

    Returns:
        A new lens of the same cells, read with torch's own product whatever the lens was read with.

    Raises:
        InputError: no residuals were kept, they are of another model, or targets that can't be read.
    """
    if not isinstance(lens, LogitLensResult):
        raise InputError(f"reread asks a lens another question, not a {type(lens).__name__}: reread(lens, model, …).")
    if not isinstance(model, MuranoModel):
        raise InputError(f"reread reads with a MuranoModel, not with a {type(model).__name__}: reread(lens, model, …).")
    if lens.residuals is None or lens.prompts is None:
        raise InputError('No residuals were kept. Read with LogitLens(model, keep="residuals") first.')
    check_top_k(top_k if top_k is not None else 1, model.vocab_size)
    max_chunk_bytes = check_whole("max_chunk_bytes", max_chunk_bytes)
    then, now = lens.model.get("weights"), model.weights
    if model.d_model != lens.residuals.shape[-1] or (bool(then) and bool(now) and then != now):
        raise InputError(
            f"{model.model_id} is not the model that was read, {lens.model.get('model_id')}: "
            f"{'its weights differ' if model.d_model == lens.residuals.shape[-1] else 'its residual stream has another width'}."
        )
    anew = targets is not None or foils is not None
    prompts = lens.prompts
    if anew:
        bare = PromptBatch([replace(p, targets=() if targets is not None else p.targets, foils=()) for p in prompts])
        prompts = as_prompts(bare, targets=targets, foils=foils)
    # A prompt that was left out may be one that can't be read at all.
    there = lens.attention_mask.any(-1).tolist()
    encoded = [batching.encode(p, model.tokenizer) if was else [] for p, was in zip(prompts, there, strict=True)]
    nothing: Answers = {"targets": [], "foils": []}
    answers = [
        answers_of(p, ids, model.tokenizer, model.vocab_size) if anew and ids else nothing
        for p, ids in zip(prompts, encoded, strict=True)
    ]
    cells = Cells(lens.input_ids, lens.position_index)
    k = int(top_k) if top_k is not None else lens.top_ids.shape[-1]
    question = Question.of(answers, encoded, cells, parse_stats(stats), k, model.vocab_size)
    tables = question.tables(len(lens.addresses), lens.input_ids.numel())
    reader = question.reader(model, lens.addresses, tables, max_chunk_bytes, "tiles")
    reader.read_residuals(lens.residuals.flatten(1, 2), cells.position_index.flatten() >= 0)
    found = question.fields(tables, (len(lens.addresses), *lens.input_ids.shape))
    if anew:
        kept = [note for note in lens.notes if "of several tokens" not in note and "special token" not in note]
        new = answer_notes(answers, "first")
        _warn(new)
        found |= {"prompts": prompts, "target_mode": "first", "notes": (*kept, *new)}
    else:
        found = {name: value for name, value in found.items() if not name.startswith(("target_", "foil_"))}
    return LogitLensResult(**{f.name: getattr(lens, f.name) for f in fields(lens)} | found)


def read_all(
    reader: Reader,
    encoded: Sequence[Sequence[int]],
    cells: Cells,
    *,
    left_out: Collection[int] = (),
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Read every prompt into the reader's tables, in batches of one length order.

    Args:
        reader: what reads a batch.
        encoded: the tokens of each prompt.
        cells: which positions of each are read, and where they go.
        left_out: prompts that are not read.
        max_batch_tokens: tokens of one forward.
        checkpoint: what keeps the tables as far as they are filled.
    """
    good = [i for i in range(len(encoded)) if i not in left_out]
    batches = batching.make_batches(
        encoded, max_tokens=max_batch_tokens, mix_lengths=reader.model.check_readout().pads, order=good
    )
    sections = [batches[i : i + CHECKPOINT_BATCHES] for i in range(0, len(batches), CHECKPOINT_BATCHES)]
    first = checkpoint.load() if checkpoint is not None else 0
    done = sum(len(batch.prompts) for section in sections[:first] for batch in section)
    saved = done
    if done:
        logger.warning("The lens goes on from its checkpoint: %d of %d prompts are read already.", done, len(good))
    with tqdm(total=len(good), initial=done, unit="prompt", desc="logit lens", delay=2.0, leave=False) as progress:
        try:
            for index, section in enumerate(sections[first:], start=first):
                todo = list(section)
                while todo:
                    batch = todo.pop(0)
                    try:
                        reader.read(batch, cells)
                    except torch.cuda.OutOfMemoryError as error:
                        if len(batch.prompts) == 1:
                            raise torch.cuda.OutOfMemoryError(
                                f"The device has no room for prompt {batch.prompts[0]} alone, of {batch.lengths[0]} tokens "
                                f"(read {done} of {len(good)}). A dtype of fewer bytes, a smaller max_chunk_bytes or a shorter "
                                f"prompt takes less: {error}"
                            ) from error
                        todo[:0] = _halves(batch, encoded)
                        continue
                    done += len(batch.prompts)
                    progress.update(len(batch.prompts))
                # Rows of one section never share a chunk with the next one's: so a resumed lens computes the same products.
                if checkpoint is not None or index == len(sections) - 1:
                    reader.flush()
                if checkpoint is not None:
                    checkpoint.save(index + 1)
                    saved = done
        except KeyboardInterrupt:
            kept = "nothing was kept"
            if checkpoint is not None and saved:
                kept = f"{checkpoint.path} keeps {saved} of them"
            elif checkpoint is not None:
                kept += f": a checkpoint is saved every {CHECKPOINT_BATCHES} batches"
            raise LensInterrupted(f"The lens was stopped after {done} of {len(good)} prompts; {kept}.") from None


def _tables(question: Question, model: MuranoModel, layers: int, cells: int, keep: str | None) -> Tables:
    """Room for the answers, and for what is kept besides."""
    tables = question.tables(layers, cells)
    if keep == "residuals":
        tables.residuals = torch.full((layers, cells, model.d_model), torch.nan, dtype=model.stream_dtype)
    if keep == "logits":
        tables.logits = torch.full((layers, cells, model.vocab_size), torch.nan)
    return tables


def _encode(
    model: MuranoModel,
    prompts: PromptBatch,
    positions: tuple[int, ...] | None,
    target_mode: str,
    on_error: str,
    no_prompts: Mapping[int, str],
) -> tuple[list[list[int]], list[Answers], dict[int, str]]:
    """Tokens and answers of every prompt, and what is wrong with those that can't be read."""
    encoded: list[list[int]] = []
    answers: list[Answers] = []
    bad = dict(no_prompts)
    for index, prompt in enumerate(prompts):
        ids: list[int] = []
        of: Answers = {"targets": [], "foils": []}
        wrong: str | None = None
        if index in bad:
            encoded.append(ids)
            answers.append(of)
            continue
        try:
            ids = batching.encode(prompt, model.tokenizer)
            wrong = batching.check_ids(ids, rows=model.embedding_rows, context=model.context)
            of = answers_of(prompt, ids, model.tokenizer, model.vocab_size, target_mode)
        except InputError as error:
            wrong = wrong or f"can't be read ({error})"
        outside = [p for p in positions or () if not -len(ids) <= p < len(ids)]
        if not wrong and outside:
            wrong = f"has {len(ids)} tokens, so it has no position {outside[0]}"
        last = positions is None or any(p % len(ids) == len(ids) - 1 for p in positions if ids)
        if not wrong and target_mode == "sequence" and of["targets"] and not last:
            wrong = f"is not read at its last position (positions={list(positions or ())}), where target_mode='sequence' reads its target"
        if wrong:
            bad[index] = f"Prompt {index} {wrong}: {str(prompt)[:60]!r}."
            if on_error == "raise":
                raise InputError(bad[index] + _skip_hint(prompts))
            of = {"targets": [], "foils": []}
        encoded.append(ids)
        answers.append(of)
    if len(bad) == len(prompts):
        raise InputError(f"Every prompt was left out. {bad[0]}")
    return encoded, answers, dict(sorted(bad.items()))


def _skip_hint(prompts: PromptBatch) -> str:
    return "" if len(prompts) == 1 else " With on_error='skip' it is left out."


def _summary(left_out: Mapping[int, str], n_prompts: int) -> list[str]:
    """What is said at the end of the prompts that were left out."""
    if not left_out:
        return []
    were = "was" if len(left_out) == 1 else "were"
    others = " lens.notes has the others." if len(left_out) > 1 else ""
    return [f"{len(left_out)} of {n_prompts} prompts {were} left out. {next(iter(left_out.values()))}{others}"]


def _halves(batch: batching.Batch, encoded: Sequence[Sequence[int]]) -> list[batching.Batch]:
    """The same prompts in two batches, after the device ran out of memory."""
    n = len(batch.prompts)
    torch.cuda.empty_cache()
    logger.warning("Out of device memory with %d prompts in a batch: going on with halves.", n)
    parts = []
    for prompts in (batch.prompts[: n // 2], batch.prompts[n // 2 :]):
        parts += batching.make_batches(encoded, max_tokens=batch.ids.numel(), mix_lengths=True, order=prompts)
    return parts


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=4)


def describe(model: MuranoModel) -> dict[str, Any]:
    """What an artifact says about the model it was read from."""
    versions = {name: _version(name) for name in ("murano-interp", "torch", "transformers", "tokenizers", "numpy")}
    versions |= {name: version for name in model.packages if (version := _version(name)) != "unknown"}
    return {
        "model_id": model.model_id,
        "revision": model.revision,
        "class": model.model_class,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.place,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "d_model": model.d_model,
        "vocab_size": model.vocab_size,
        "weights": model.weights,
        "versions": versions,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
