"""Following a generation: the logit lens at every token that a model writes.

It is the readout of :mod:`murano.lens` at other rows: one forward per step goes on from the model's own cache, the row that the next
token is predicted from is taken at every layer, the token is chosen from the model's own logits, and the rows wait until they fill a chunk.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from textwrap import shorten
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig

from murano.address import Address
from murano.artifacts.generation_lens import GenerationLensResult
from murano.artifacts.words import NO_TOKEN
from murano.engine_reader import read_generation, reader_of
from murano.errors import InputError, ReadoutError
from murano.lens import MAX_BATCH_TOKENS, MAX_CHUNK_BYTES, MAX_HELD_BYTES, LensInterrupted, describe, logit_lens
from murano.model import MuranoModel
from murano.model.ends import end_tokens
from murano.model.proof import rounding
from murano.model.sampling import Sampler, Sampling
from murano.model.stepping import Stepper
from murano.model.vllm import VLLMModel
from murano.prompts import PromptBatch, as_prompts
from murano.reader import Reader, Tables
from murano.readout.request import check_model, check_options, check_top_k, parse_layers
from murano.readout.stats import log_softmax

#: What a checkpoint may set for ``generate`` and nobody need be told of.
_NOT_ASKED = re.compile(
    r"max_length|max_new_tokens|do_sample|temperature|top_p"  # the arguments here decide
    r"|eos_token_id"  # done here too
    r"|(pad|bos|decoder_start)_token_id|renormalize_logits|num_return_sequences|output_\w+|return_dict_in_generate"  # changes no token
    r"|\w*(cache|compile|batching|assistant|lookbehind)\w*|prefill_chunk_size|low_memory"  # nor does how fast they come
    r"|prompt_lookup_num_tokens|max_matching_ngram_size|speculation_type|use_mtp"
    r"|transformers_version|_\w+"
)
#: What bears on draws alone, and values that stand for nothing and are no default of transformers.
_OF_DRAWS = frozenset({"top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
_NEUTRAL = {"min_new_tokens": 0, "guidance_scale": 1, "top_k": 0, "min_p": 0}


@torch.no_grad()
def follow_generation(
    model: MuranoModel,
    prompts: Any,
    *,
    max_new_tokens: int,
    layers: Any = "all",
    top_k: int = 5,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Any = None,
    include_prompt: bool = False,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    product: str = "auto",
) -> GenerationLensResult:
    """Let a model continue prompts, and read the residual stream of every layer at every token that it writes.

    Args:
        model: the model.
        prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects.
        max_new_tokens: how many tokens each prompt is continued by at most; fewer where the model ends its text, or its turn in a chat.
        layers: as in :func:`murano.logit_lens`.
        top_k: how many tokens to keep of each distribution.
        temperature: what the model's logits are divided by before a token is drawn; 0 always takes the most probable one. What is read
            of the layers is at temperature 1 all the same.
        top_p: only the most probable tokens that together have this probability may be drawn.
        seed: of the draws: the first prompt gets the tokens that ``torch.manual_seed(seed)`` and transformers' ``generate`` give, the next
            one those of the next seed, and so on. ``None`` takes one from torch's own generator; the result says which.
        stop: a text, or several, after which a prompt is not continued.
        include_prompt: read the prompts themselves too, as :func:`murano.logit_lens` does, into ``prompt_lens``.
        max_chunk_bytes: room for one chunk of logits.
        max_batch_tokens: tokens that a batch of prompts may grow to. Prompts of one length share a batch.
        product: which matrix product to use, as in :func:`murano.logit_lens`.

    Raises:
        InputError: an argument that this model can't take, or a prompt that leaves no room for the new tokens; before any forward.
        ReadoutError: the last layer's reading is not the model's own prediction.
    """
    check_model(model, "follow_generation")
    sampling = Sampling.of(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    asked = as_prompts(prompts)
    model.check_layers(parse_layers(layers))
    check_top_k(top_k)
    check_options(product=product, max_chunk_bytes=max_chunk_bytes, max_batch_tokens=max_batch_tokens)
    addresses = parse_layers(layers, model.n_layers)
    top_k = check_top_k(top_k, model.vocab_size)
    encoded = model._encode_all(asked)
    _check_room(model, asked, encoded, max_new_tokens)
    cache = model.cache
    notes = [*_settings_notes(model.generation_config, drawn=temperature > 0), *_cache_notes(model)]

    # The last layer is always read: it is what shows that the readout is the model's own.
    last = Address(model.n_layers - 1)
    read = addresses if last in addresses else (*addresses, last)
    kind = _EngineRun if isinstance(model, VLLMModel) else _Run
    run = kind(model, sampling, asked, encoded, read, top_k, max_chunk_bytes, product)
    total = len(encoded) * max_new_tokens
    with tqdm(total=total, unit="token", desc="generation", delay=2.0, leave=False) as progress:
        try:
            for group in run.groups(max_batch_tokens):
                run.write(group, progress)
        except KeyboardInterrupt:
            done = sum(reason is not None for reason in run.finished)
            raise LensInterrupted(
                f"The generation was stopped after {done} of {len(encoded)} prompts; nothing was kept."
            ) from None
    run.reader.flush()
    run.check(read.index(last))

    notes += [*run.tables.odd.values(), *_stop_notes(run, sampling)]
    prompt_lens = None
    if include_prompt:
        prompt_lens = logit_lens(
            model,
            asked,
            layers=layers,
            top_k=top_k,
            max_chunk_bytes=max_chunk_bytes,
            max_batch_tokens=max_batch_tokens,
            product=product,
        )
    for note in (*_cache_notes(model), *run.tables.odd.values()):
        warnings.warn(note, stacklevel=3)
    return GenerationLensResult(
        addresses=addresses,
        **run.fields(len(addresses)),
        words=model.words,
        settings={**asdict(sampling), "seed": run.sampler.seed},
        cache=cache.name,
        prompt_lens=prompt_lens,
        model=describe(model),
        readout=model.check_readout().to_dict(),
        prompts=asked,
        notes=tuple(notes),
    )


class _Run:
    """One generation: what was written so far, and the tables that its rows are read into."""

    def __init__(
        self,
        model: MuranoModel,
        sampling: Sampling,
        prompts: PromptBatch,
        encoded: list[list[int]],
        read: tuple[Address, ...],
        top_k: int,
        max_chunk_bytes: int,
        product: str,
    ) -> None:
        self.model, self.sampling, self.encoded = model, sampling, encoded
        self.width = sampling.max_new_tokens
        n_cells = len(encoded) * self.width
        self.written: list[list[int]] = [[] for _ in encoded]
        self.finished: list[str | None] = [None] * len(encoded)
        self.ends = [end_tokens(model, chat=bool(prompt.messages)) for prompt in prompts]
        self.sampler = Sampler(sampling, len(encoded), model.device)
        #: The token that was written in each cell, and what the model itself gave to it.
        self.tokens = torch.full((n_cells, 1), NO_TOKEN)
        self.own = torch.full((n_cells,), torch.nan)
        self.limit = 0.0
        self.tables = Tables.empty(len(read), n_cells, top_k, 1)
        self.read, self.max_chunk_bytes = read, max_chunk_bytes
        self.reader: Reader = reader_of(model)(model, read, self.tables, max_chunk_bytes, product, self.tokens)

    def groups(self, max_tokens: int) -> Iterator[list[int]]:
        """Prompts that are continued together."""
        return _groups(self.encoded, self.width, max_tokens)

    def write(self, group: Sequence[int], progress: Any) -> None:
        """Continue prompts of one length until each has ended."""
        stepper, reader, ending = Stepper(self.model.anatomy, self.model.cache), self.reader, self.model.ending
        in_batch = list(group)
        new = torch.tensor([self.encoded[prompt] for prompt in group])
        for step in range(self.width):
            rows = [row for row, prompt in enumerate(in_batch) if self.finished[prompt] is None]
            prompts = [in_batch[row] for row in rows]
            with self.model.in_pieces(new.shape[1]):
                logits, taken = stepper.step(
                    new.to(self.model.device), {*reader.sources, reader.last}, ending=ending, mid=reader.mid
                )
            logits = logits[rows]
            chosen = self.sampler.choose(logits, prompts)
            self._keep(prompts, step, chosen, logits)
            # A replayed forward can't run inside the one that is being read: the rows are read now that it has ended.
            reader.read_rows(
                {at: stream[rows] for at, stream in taken.items()}, torch.tensor(prompts) * self.width + step
            )
            progress.update(len(prompts))
            going_on = [row for row, prompt in enumerate(in_batch) if self.finished[prompt] is None]
            if not going_on:
                break
            if len(going_on) < len(in_batch) and stepper.keep(torch.tensor(going_on)):
                in_batch = [in_batch[row] for row in going_on]
            # A prompt that has ended, and that the cache could not let go, is fed on: it is not read, and no other sees it.
            new = torch.tensor([[self.written[prompt][-1]] for prompt in in_batch])

    def _keep(
        self, prompts: Sequence[int], step: int, chosen: Int[Tensor, " row"], logits: Float[Tensor, "row vocab"]
    ) -> None:
        cell = torch.tensor(prompts) * self.width + step
        self.tokens[cell, 0] = chosen.cpu()
        self.own[cell] = log_softmax(logits).gather(1, chosen.unsqueeze(1)).squeeze(1).cpu()
        self.limit = max(self.limit, rounding(logits))
        for prompt, token in zip(prompts, chosen.tolist(), strict=True):
            self.written[prompt].append(token)
            self.finished[prompt] = self._ended(prompt)

    def _ended(self, prompt: int) -> str | None:
        written = self.written[prompt]
        if written[-1] in self.ends[prompt]:
            return "end"
        if self.sampling.stop:
            text = self.model.tokenizer.decode(written)
            if any(stop in text for stop in self.sampling.stop):
                return "stop"
        return "length" if len(written) == self.width else None

    def check(self, last: int) -> None:
        """Hold what the last layer gives to every token that was written against the model's own.

        Raises:
            ReadoutError: they differ by more than products of another shape may.
        """
        gap = (self.tables.token_log_probs[last, :, 0] - self.own)[self.tokens[:, 0] >= 0].abs().nan_to_num(torch.inf)
        # A log-probability is a logit less the normaliser of all: each may be off, and rows are computed in another shape here.
        if bool((gap > 8 * self.limit).any()):
            cell = int((self.tokens[:, 0] >= 0).nonzero().flatten()[int(gap.argmax())])
            raise ReadoutError(
                f"The lens disagrees with the model: at L{self.model.n_layers - 1}.resid_post, step {cell % self.width} of prompt "
                f"{cell // self.width}, the log-probability of the token differs by {float(gap.max()):.3g}. "
                "Nothing that was read can be trusted. Was the model changed after it was loaded? Make a new MuranoModel from it."
            )

    def fields(self, layers: int) -> dict[str, Any]:
        """The artifact's fields, cut to the steps that were made."""
        n_prompts, steps = len(self.encoded), max(map(len, self.written))
        tables = self.tables

        def cut(tensor: Tensor) -> Tensor:
            grid: Tensor = tensor[:layers].unflatten(1, (n_prompts, self.width))
            return grid[:, :, :steps].contiguous()

        longest = max(map(len, self.encoded))
        padded = [[*[NO_TOKEN] * (longest - len(ids)), *ids] for ids in self.encoded]
        decode = self.model.tokenizer.decode
        return {
            "top_ids": cut(tables.top_ids),
            "top_probs": cut(tables.top_probs),
            "entropy": cut(tables.entropy),
            "log_normalizer": cut(tables.log_normalizer),
            "sampled_ids": cut(self.tokens.view(1, -1))[0],
            "sampled_log_probs": cut(tables.token_log_probs[..., 0]),
            "sampled_ranks": cut(tables.token_ranks[..., 0]),
            "own_log_probs": cut(self.own.view(1, -1))[0],
            "input_ids": torch.tensor(padded),
            "texts": tuple(decode(written, skip_special_tokens=True) for written in self.written),
            "finished": tuple(reason or "" for reason in self.finished),
        }


class _EngineRun(_Run):
    """The same inside vLLM, which batches and samples by itself."""

    def groups(self, max_tokens: int) -> Iterator[list[int]]:
        yield list(range(len(self.encoded)))

    def write(self, group: Sequence[int], progress: Any) -> None:
        assert isinstance(self.model, VLLMModel)
        sampling, seed = self.sampling, self.sampler.seed
        if sampling.temperature > 2:
            raise InputError(f"temperature={sampling.temperature}: vLLM takes 0 to 2. The eager backend takes any.")
        each = [{"stop_token_ids": sorted(self.ends[i]), **({} if seed is None else {"seed": seed + i})} for i in group]
        found = read_generation(
            self.model,
            [self.encoded[i] for i in group],
            self.read,
            max_new_tokens=self.width,
            top_k=self.tables.top_ids.shape[-1],
            max_chunk_bytes=self.max_chunk_bytes,
            max_held_bytes=MAX_HELD_BYTES,
            each=each,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        self.limit = self.model.facts["limit"]
        for i, tokens, own in zip(group, found.tokens, found.own_log_probs, strict=True):
            for token in tokens:
                if self.finished[i] is None:  # a text that ends it is only looked for here
                    self.written[i].append(token)
                    self.finished[i] = self._ended(i)
            cells = torch.arange(len(self.written[i])) + i * self.width
            self.tokens[cells, 0] = torch.tensor(self.written[i])
            self.own[cells] = torch.tensor(own[: len(cells)])
            for name in ("top_ids", "top_probs", "entropy", "log_normalizer", "token_log_probs", "token_ranks"):
                getattr(self.tables, name)[:, cells] = getattr(found.tables, name)[:, cells]
            progress.update(len(cells))
        self.tables.odd |= found.tables.odd


def _groups(encoded: Sequence[Sequence[int]], new: int, max_tokens: int) -> Iterator[list[int]]:
    """Prompts of one length, as many together as may grow to ``max_tokens``."""

    def length(prompt: int) -> int:
        return len(encoded[prompt])

    for tokens, same in groupby(sorted(range(len(encoded)), key=length), key=length):
        group, size = list(same), max(1, max_tokens // (tokens + new))
        yield from (group[i : i + size] for i in range(0, len(group), size))


def _check_room(model: MuranoModel, prompts: PromptBatch, encoded: Sequence[Sequence[int]], new: int) -> None:
    for index, ids in enumerate(encoded):
        left = None if model.context is None else model.context - len(ids)
        if left is not None and left < new:
            room = f"use max_new_tokens={left}, or a shorter prompt" if left > 0 else "use a shorter prompt"
            raise InputError(
                f"Prompt {index} has {len(ids)} tokens and the model's context is {model.context}: {left} are left, and "
                f"max_new_tokens={new}. Here {room}: {str(prompts[index])!r:.60}"
            )


def _cache_notes(model: MuranoModel) -> list[str]:
    if model.cache.name is not None:
        return []
    name = type(model.hf_model).__name__
    return [
        f"{name} can't go on from a cache ({model.cache.reason}). Every step runs all tokens again, which is slower."
    ]


def _settings_notes(config: Any, *, drawn: bool) -> list[str]:
    """What the checkpoint sets to another value than transformers, and is not done here."""
    if config is None:
        return []
    plain = GenerationConfig()
    # What is unset counts as these, of which transformers' later versions keep a list.
    usual = {**vars(plain), **getattr(plain, "_get_default_generation_params", dict)()}
    wanted = [
        f"{name}={shorten(repr(value), 60, placeholder=' …')}"
        for name in vars(plain)
        if not _NOT_ASKED.fullmatch(name) and (drawn or name not in _OF_DRAWS)
        if (value := getattr(config, name, None)) not in (None, [], {}, usual[name], _NEUTRAL.get(name))
    ]
    if not wanted:
        return []
    return [
        f"The checkpoint asks generate for {', '.join(wanted)}; the tokens here are the model's own choice without it."
    ]


def _stop_notes(run: _Run, sampling: Sampling) -> list[str]:
    never = [prompt for prompt, reason in enumerate(run.finished) if reason == "length"]
    if not sampling.stop or not never:
        return []
    many = f"prompts {', '.join(map(str, never))}" if len(never) > 1 else f"prompt {never[0]}"
    return [f"No stop text of {list(sampling.stop)} came in the {run.width} tokens of {many}."]
