"""MuranoModel: the one door to a language model."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.address import BIAS, WHOLE_MODEL, WRITTEN, Address, is_one
from murano.artifacts.model_name import model_name
from murano.artifacts.words import TokenWords
from murano.errors import InputError, ModelError, nearest
from murano.model import batching, residuals
from murano.model.anatomy import Anatomy, embedding_device, find_anatomy, text_config
from murano.model.captured import Captured
from murano.model.ends import end_tokens
from murano.model.loading import (
    Source,
    as_tokenizer,
    check_devices,
    find_source,
    load_config,
    load_tokenizer,
    load_weights,
    parse_dtype,
)
from murano.model.parts import Parts, find_parts
from murano.model.pieces import LONG, find_positionwise, in_pieces
from murano.model.product import Choice, choose
from murano.model.proof import ReadoutProof, prove
from murano.model.steering import Continuation, added, check_vectors
from murano.model.stepping import CacheProof, Stepper, prove_cache
from murano.model.tail import Replay, ShortPath, Tail
from murano.model.watch import at_rest, frozen
from murano.prompts import Prompt, as_prompts
from murano.readout.reduce import reduce_rows
from murano.readout.request import check_top_k

__all__ = ["Anatomy", "MuranoModel", "ReadoutProof"]

logger = logging.getLogger(__name__)

#: Families whose forward calls more blocks than their config counts: a layer can't be checked before weights load.
_CALLS_MORE_THAN_CONFIG = {"dory", "hrm_text", "inkling2_loop_text", "longcat_flash"}

#: Names by which configs call the longest prompt a model can take.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class MuranoModel:
    """A causal language model, read through its own final norm and unembedding.

    Finding the model and its config happens now; weights load when something first needs them, so that whatever can be refused
    without them is. Loading proves the readout (see :meth:`check_readout`) and refuses a model whose logits do not follow
    from one residual stream.

    Args:
        source: a model's folder, a ``.gguf`` file, a hub id (looked for in the hub's cache first; the network is not used
            when it is there), or a transformers model that is already loaded. Without it, the bundled model.
        backend: ``"eager"`` reads a transformers model in this process; ``"vllm"`` reads inside the workers of a vLLM engine, which
            takes all further arguments (see :class:`murano.model.vllm.VLLMModel`).
        dtype: of the weights, ``torch.float32`` or ``"float32"``; the checkpoint's own by default. Softmax and statistics
            are computed in float32 whatever the weights are.
        device_map: where the weights go, as transformers takes it: ``"cuda"``, ``"auto"``, …
        tokenizer: for a model that comes without one, or to use another: the object, or its folder or hub id.
        revision: a branch, tag or commit on the hub.
        trust_remote_code: let code that comes with the model run.

    Raises:
        ModelError: there is no such model, or it is no causal language model.

    >>> model = MuranoModel()
    >>> model.model_id, model.n_layers, model.n_heads, model.d_model, model.vocab_size
    ('SmolLM2-135M-Instruct', 30, 9, 576, 49152)
    """

    backend = "eager"
    #: Packages that what is read depends on, beside those that every artifact names.
    packages: tuple[str, ...] = ()

    def __new__(cls, source: Any = None, *, backend: str = "eager", **options: Any) -> MuranoModel:
        if backend == "vllm" and cls is MuranoModel:
            from murano.model.vllm import VLLMModel

            return super().__new__(VLLMModel)
        return super().__new__(cls)

    def __init__(
        self,
        source: str | Path | nn.Module | None = None,
        *,
        backend: str = "eager",
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        **engine_args: Any,
    ) -> None:
        if backend != "eager":
            raise InputError(
                f"backend={backend!r} is unknown.{nearest(backend, ('eager', 'vllm'))} Use 'eager' or 'vllm'."
            )
        for name in engine_args:
            if name == "device":
                raise InputError(f"MuranoModel takes no 'device': write device_map={str(engine_args[name])!r}.")
            options = ("backend", "dtype", "device_map", "tokenizer", "revision", "trust_remote_code")
            raise InputError(
                f"MuranoModel takes no {name!r}.{nearest(name, options)} It takes: {', '.join(options)}. If it is an argument of "
                'vLLM\'s engine: MuranoModel(…, backend="vllm").'
            )
        self.source = source
        self.dtype_asked = parse_dtype(dtype)
        check_devices(device_map)
        self.device_map = device_map
        if tokenizer is not None:
            tokenizer = as_tokenizer(tokenizer, trust_remote_code)
        self._source: Source | None = None
        self._held: nn.Module | None = None
        self._products: dict[tuple[Any, ...], Choice] = {}
        # nnterp and nnsight wrap a module; what is read is the module itself.
        module = source if isinstance(source, nn.Module) else getattr(source, "_model", None)
        if isinstance(module, nn.Module):
            self._hold(module, tokenizer if tokenizer is not None else getattr(source, "tokenizer", None))
        elif source is None or isinstance(source, (str, Path)):
            self._source = find_source(source, revision, trust_remote_code)
            self.config = load_config(self._source)
            self.model_id = _called(self._source.model_id)
        else:
            raise ModelError(
                f"A model is a folder, a file, a hub id or a transformers model, not a {type(source).__name__}."
            )
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def _hold(self, module: nn.Module, tokenizer: Any) -> None:
        self._held = module
        self.config = getattr(module, "config", None)
        name = getattr(module, "name_or_path", "") or getattr(self.config, "_name_or_path", "")
        self.model_id = _called(str(name)) or type(module).__name__
        if tokenizer is None:
            raise InputError(
                "A model that is already loaded needs its tokenizer: MuranoModel(model, tokenizer=tokenizer)."
            )

    # What is known without weights

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        assert self._source is not None
        return load_tokenizer(self._source)

    @property
    def revision(self) -> str | None:
        """The commit on the hub that was loaded, where there is one."""
        return (self._source.revision if self._source is not None else None) or getattr(
            self.config, "_commit_hash", None
        )

    @property
    def n_heads(self) -> int | None:
        """Attention heads of a block; ``None`` for a family without attention."""
        heads = _first(text_config(self.config), ("num_attention_heads", "n_head", "n_heads", "num_heads"))
        heads = heads[0] if isinstance(heads, (list, tuple)) and heads else heads
        return heads if isinstance(heads, int) else None

    @property
    def context(self) -> int | None:
        """How many tokens a prompt may have, where the config says so."""
        value = _first(text_config(self.config), _CONTEXT_NAMES)
        return value if isinstance(value, int) and value > 0 else None

    @property
    def config_layers(self) -> int | None:
        """How many layers a lens has, as far as that is known before weights load; ``None`` where it is not."""
        if "anatomy" in self.__dict__:
            return self.n_layers
        config = text_config(self.config)
        if getattr(config, "model_type", "") in _CALLS_MORE_THAN_CONFIG:
            return None
        count = _first(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
        return count if isinstance(count, int) else None

    def check_layers(self, addresses: Iterable[Address]) -> None:
        """Refuse a layer outside the model, before weights load wherever the config says how many there are.

        Raises:
            InputError: naming the layer and the valid ones.
        """
        n_layers = self.config_layers
        if n_layers is not None:
            for address in addresses:
                address.resolve(n_layers)

    # What needs weights

    @functools.cached_property
    def hf_model(self) -> nn.Module:
        """The transformers module itself; loading it also proves the readout."""
        if self._held is not None:
            return self._held
        assert self._source is not None
        return load_weights(self._source, self.config, self.dtype_asked, self.device_map)

    def require_weights(self, what: str) -> None:
        """Refuse ``what`` where the weights are not in this process: on a backend other than the eager one.

        Raises:
            InputError: naming it, and the call to use instead.
        """

    @functools.cached_property
    def anatomy(self) -> Anatomy:
        """The blocks, the final norm and the unembedding, found by watching one small forward."""
        return find_anatomy(self.hf_model)

    @functools.cached_property
    def _proved(self) -> tuple[Tail, ReadoutProof]:
        tail, proof = prove(self.anatomy)
        logger.info("%s", proof)
        return tail, proof

    @functools.cached_property
    def ending(self) -> residuals.Ending:
        """How the last position's logits come out of the model's own forward alone."""
        return residuals.find_ending(self.anatomy)

    @functools.cached_property
    def mid(self) -> dict[int, Any]:
        """Where ``resid_mid`` can be read, by layer; empty for a family whose attention and MLP run side by side."""
        return residuals.find_mid(self.anatomy)

    @functools.cached_property
    def _positionwise(self) -> list[nn.Module]:
        """The modules that read each position by itself, the MLPs of most families: of a long prompt they can take a piece at a time."""
        return find_positionwise(self.anatomy)

    def in_pieces(self, positions: int) -> contextlib.AbstractContextManager[None]:
        """While it is open, a forward of so many positions holds no MLP's activations of all of them, where they are many."""
        if positions <= LONG:
            return contextlib.nullcontext()
        return in_pieces(self._positionwise, self.anatomy.modules if self.device.type == "cpu" else ())

    @functools.cached_property
    def cache(self) -> CacheProof:
        """The cache that a generation can go on from, held against a forward without one."""
        return prove_cache(self.anatomy)

    @functools.cached_property
    def parts(self) -> Parts:
        """What each block writes into the stream, proved to add up; empty, with the reason, where that can't be told."""
        return find_parts(self.anatomy)

    @property
    def tail(self) -> Tail:
        """From the residual stream after the last block to logits: proved to be the model's own way."""
        return self._proved[0]

    def check_readout(self) -> ReadoutProof:
        """How residuals become logits in this model, and how that was shown to be the model's own way.

        Raises:
            UnsupportedModelError: it can't be shown, so this model can't be read.
        """
        return self._proved[1]

    def product(self, rows: int, name: str = "auto", width: int | None = None) -> Choice:
        """The matrix product for reading many rows: the fastest that is as accurate as torch's, timed once.

        Args:
            rows: how many rows a chunk has.
            name: ``"auto"``, ``"torch"``, ``"tiles"``, ``"onednn"`` or ``"numpy"``.
            width: how many tokens, where a tile of the vocabulary is read at a time; all without it.
        """
        weight, bias = self.tail.weight, self.tail.bias
        if weight is None:
            weight, name = torch.empty(0, 0), "torch"
        # A product keeps the weight that it was made for.
        parameters = [p for p in (weight, bias) if p is not None]
        now = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters)
        self._products = {key: choice for key, choice in self._products.items() if key[0] == now}
        key = (now, rows, width, name)
        if key not in self._products:
            self._products[key] = choose(weight, bias, rows, width or len(weight), name)
        return self._products[key]

    @property
    def n_layers(self) -> int:
        """How many layers a lens has: block calls in one forward."""
        return len(self.anatomy.blocks)

    @property
    def d_model(self) -> int:
        """The width of the residual stream."""
        return self.anatomy.d_model

    @property
    def vocab_size(self) -> int:
        """How many tokens the model gives a logit to."""
        return self.anatomy.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next((p.dtype for p in self.hf_model.parameters() if p.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return embedding_device(self.hf_model)

    @property
    def weights(self) -> str:
        """What tells these weights from others of the same shapes: a digest of some numbers of every parameter."""
        digest = hashlib.sha256()
        for name, parameter in self.hf_model.named_parameters():
            flat = parameter.detach().as_strided((parameter.numel(),), (1,)) if parameter.is_contiguous() else None
            if flat is None or not parameter.numel() or parameter.device.type == "meta":
                continue
            some = flat[:: max(1, flat.numel() // 8)][:8]
            digest.update(f"{name} {tuple(parameter.shape)} {some.float().cpu().tolist()}".encode())
        return digest.hexdigest()[:16]

    @property
    def place(self) -> str:
        """Where the weights are, in words."""
        return str(self.device)

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.anatomy.stream_dtype

    @property
    def embedding_rows(self) -> int:
        """How many token ids the model can embed."""
        return self.anatomy.embedding_rows

    @property
    def model_class(self) -> str:
        """The class of the model's code."""
        return type(self.hf_model).__name__

    @property
    def generation_config(self) -> Any:
        """What the checkpoint says about writing with it; ``None`` where it says nothing."""
        return getattr(self.hf_model, "generation_config", None)

    # Tokens

    def encode(self, prompt: str | Prompt) -> list[int]:
        """The tokens that the model sees for a prompt: one BOS where the tokenizer wants one, none twice."""
        return batching.encode(as_prompts(prompt)[0], self.tokenizer)

    @functools.cached_property
    def words(self) -> TokenWords:
        """The text of every token id, made when it is first asked for."""
        return TokenWords(decode=lambda token_id: batching.token_text(self.tokenizer, token_id))

    # Reading

    @torch.no_grad()
    def capture(self, prompts: Any, addresses: Any) -> Captured:
        """Residuals of prompts at some addresses, from one forward: ``captured["L3.resid_post"]`` is ``[prompt, position, d_model]``.

        Prompts of different lengths are aligned at their ends, so that ``[:, -1]`` is every prompt's last token; the rows before a
        shorter prompt's first token are NaN.

        Args:
            prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects.
            addresses: one or several of ``"embeddings"``, ``"L3.resid_pre"``, ``"L3.resid_mid"``, ``"L3.resid_post"``, ``"ln_final"``,
                and ``"lm_head"`` and ``"logits"``, which are as wide as the vocabulary.

        Raises:
            InputError: an address that does not exist in this model, or prompts that it can't take.
        """
        asked = [addresses] if is_one(addresses) else list(addresses)
        wanted = [Address.parse(a).resolve(self.n_layers) for a in asked]
        off = [a for a in wanted if a.component in (*WRITTEN, BIAS)]
        if off:
            raise InputError(
                f"'{off[0]}' is not on the residual stream. Use resid_pre, resid_mid or resid_post of a layer, "
                f"or {', '.join(WHOLE_MODEL[:-1])} or {WHOLE_MODEL[-1]}."
            )
        residuals.check_places(
            self.anatomy, wanted, self.mid if any(a.component == "resid_mid" for a in wanted) else {}
        )
        encoded = self._encode_all(prompts)
        longest = max(map(len, encoded))
        logits_at = Address(None, "logits")
        found: dict[Address, Tensor] = {}
        for batch in batching.make_batches(encoded, max_tokens=1 << 62, mix_lengths=self.check_readout().pads):

            def keep(address: Address, rows: Tensor, batch: batching.Batch = batch) -> None:
                if address not in found:
                    found[address] = rows.new_full((len(encoded), longest, rows.shape[-1]), float("nan"))
                for row, (prompt, length) in enumerate(zip(batch.prompts, batch.lengths, strict=True)):
                    found[address][prompt, longest - length :] = rows[row, :length]

            logits = residuals.forward(
                self.anatomy,
                batch.ids.to(self.device),
                [a for a in wanted if a != logits_at],
                keep,
                ending="full" if logits_at in wanted else None,
                mid=self.mid if any(a.component == "resid_mid" for a in wanted) else None,
            )
            if logits_at in wanted and logits is not None:
                keep(logits_at, logits)
        return Captured({address: found[address] for address in wanted}, self.n_layers)

    def _encode_all(self, prompts: Any) -> list[list[int]]:
        encoded = []
        for index, prompt in enumerate(as_prompts(prompts)):
            ids = batching.encode(prompt, self.tokenizer)
            wrong = batching.check_ids(ids, rows=self.embedding_rows, context=self.context)
            if wrong:
                raise InputError(f"Prompt {index} {wrong}: {str(prompt)!r:.60}")
            encoded.append(ids)
        return encoded

    def decode(
        self, residuals: Float[Tensor, "*row d_model"], *, raw: bool = False, detach: bool = True
    ) -> Float[Tensor, "*row vocab"]:
        """Logits of residuals, by the model's own modules.

        Args:
            residuals: rows of the residual stream, as they leave a block.
            raw: what the bare unembedding gives, before the family's multipliers and soft-caps.
            detach: without a graph; ``False`` keeps the graph to ``residuals``.

        Raises:
            InputError: rows of another width, or ``raw`` for a family that has no bare unembedding.
        """
        self._check_residuals(residuals)
        tail = self.tail
        if raw and isinstance(tail, Replay):
            raise InputError(
                f"{type(self.hf_model).__name__} has no bare unembedding to read (raw=True): {self.check_readout().reason}. "
                "Without raw, decode replays the model's own forward."
            )
        with at_rest(self.hf_model, grad=not detach and torch.is_grad_enabled()), frozen(self.hf_model):
            # Three axes keep their shape, so that equal shapes give the model's own numbers to the bit.
            rows = residuals if residuals.ndim == 3 else residuals.reshape(1, -1, self.d_model)
            rows = rows if rows.dtype in (self.dtype, self.stream_dtype) else rows.to(self.stream_dtype)
            if isinstance(tail, Replay) and residuals.ndim != 3:
                rows = rows.transpose(0, 1)
            logits = tail.raw(rows) if raw and isinstance(tail, ShortPath) else tail(rows)
        return logits.reshape(*residuals.shape[:-1], logits.shape[-1])

    def decode_top_k(
        self, residuals: Float[Tensor, "*row d_model"], top_k: int = 5
    ) -> tuple[Int[Tensor, "*row k"], Float[Tensor, "*row k"]]:
        """The most probable tokens of residuals and their probabilities: :meth:`decode` without its vocabulary.

        Args:
            residuals: rows of the residual stream, as they leave a block.
            top_k: how many tokens.

        Raises:
            InputError: rows of another width, or more tokens than there are.
        """
        top_k = check_top_k(top_k, self.vocab_size)
        logits = self.decode(residuals)
        found = reduce_rows(logits.reshape(-1, logits.shape[-1]), top_k)
        return found.top_ids.view(*logits.shape[:-1], top_k), found.top_probs.view(*logits.shape[:-1], top_k)

    def _check_residuals(self, residuals: Any) -> None:
        if not isinstance(residuals, Tensor) or residuals.ndim == 0 or residuals.shape[-1] != self.d_model:
            shape = tuple(residuals.shape) if isinstance(residuals, Tensor) else type(residuals).__name__
            raise InputError(f"Residuals must be a tensor whose last axis is d_model = {self.d_model}, not {shape}.")

    # Steering

    @contextlib.contextmanager
    def steered(self, add: Mapping[Any, Float[Tensor, " d_model"]]) -> Iterator[None]:
        """Add vectors to the stream at every position of whatever runs inside the ``with``, the lens included.

        Args:
            add: a vector for each place, ``{"L10.resid_post": vector}``.

        Raises:
            InputError: another place than ``resid_post`` of a layer, or a vector that does not fit.
        """
        vectors = check_vectors(add, self.n_layers, self.d_model)
        _ = self._proved, self.ending  # of the model as it is
        with added(self.anatomy, vectors):
            yield

    def generate(
        self, prompts: Any, *, max_new_tokens: int = 16, add: Mapping[Any, Float[Tensor, " d_model"]] | None = None
    ) -> Continuation:
        """Continue prompts, always by the most probable token.

        Args:
            prompts: a string, or a list of strings, chats, token-id lists or :class:`~murano.Prompt` objects.
            max_new_tokens: how many tokens at most; fewer where the model ends its text.
            add: vectors added to the stream at every position meanwhile, as in :meth:`steered`.

        Raises:
            InputError: prompts or vectors that this model can't take.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: it must be a whole number from 1 upwards.")
        _ = self.n_layers  # loads: what the context is may only be known then
        batch = as_prompts(prompts)
        encoded = self._encode_all(batch)
        longest = max(map(len, encoded))
        if self.context is not None and longest + max_new_tokens > self.context:
            raise InputError(
                f"A prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into the context of {self.context}."
            )
        ends = [end_tokens(self, chat=bool(prompt.messages)) for prompt in batch]
        _ = self.cache  # of the model as it is
        with self.steered(add) if add else contextlib.nullcontext():
            ids = self._write(encoded, max_new_tokens, ends)
        return Continuation(ids, [self.tokenizer.decode(i, skip_special_tokens=True) for i in ids])

    @torch.no_grad()
    def _write(
        self, encoded: Sequence[Sequence[int]], max_new_tokens: int, ends: Sequence[Collection[int]]
    ) -> list[list[int]]:
        written: list[list[int]] = []
        for prompt, over in zip(encoded, ends, strict=True):
            stepper, new = Stepper(self.anatomy, self.cache), list(prompt)
            ids: list[int] = []
            while len(ids) < max_new_tokens and not (ids and ids[-1] in over):
                logits, _ = stepper.step(torch.tensor([new], device=self.device), ending=self.ending)
                new = [int(logits[0].argmax())]
                ids += new
            written.append(ids)
        return written

    # Going deeper, with nnterp

    @functools.cached_property
    def nnterp(self) -> Any:
        """The same module as nnterp's ``StandardizedTransformer``, with the discovered names handed to it.

        Raises:
            UnsupportedModelError: nnterp can't wrap this model.
        """
        from murano.model.deeper import standardized

        return standardized(self.anatomy, self.tokenizer)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Nnsight's tracing context on the same module: ``with model.trace("The capital of France is"): …``."""
        return self.nnterp.trace(*args, **kwargs)

    @property
    def layers(self) -> Any:
        """The blocks under nnterp's name, for use inside :meth:`trace`."""
        return self.nnterp.layers

    @property
    def ln_final(self) -> Any:
        """The final norm under nnterp's name, for use inside :meth:`trace`."""
        return self.nnterp.ln_final

    @property
    def lm_head(self) -> Any:
        """The unembedding under nnterp's name, for use inside :meth:`trace`."""
        return self.nnterp.lm_head

    def identity(self) -> str:
        """What says whether this is the model of an earlier run: where it lies and which files, or the weights themselves."""
        where = self.model_id if self._source is None else self._source.model_id
        about = [where, str(self.revision), str(self.dtype_asked)]
        if self._held is not None:
            about += [
                f"{name} {tuple(p.shape)} {float(p.detach().double().sum())}"
                for name, p in self._held.named_parameters()
            ]
        elif self._source is not None and Path(self._source.location).is_dir():
            files = sorted(p for p in Path(self._source.location).iterdir() if p.is_file())
            about += [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
        return "\n".join(about)

    def __repr__(self) -> str:
        shown = "" if self.source is None else repr(str(self.source) if isinstance(self.source, Path) else self.source)
        if self._held is not None:
            shown = type(self._held).__name__
        options = [shown] if shown else []
        if self.dtype_asked is not None:
            options.append(f"dtype={self.dtype_asked}")
        if self.device_map is not None:
            options.append(f"device_map={self.device_map!r}")
        return f"MuranoModel({', '.join(options)})"


def _called(name: str) -> str:
    """What a model is called: a folder by its own name, wherever it lies."""
    return model_name(os.path.abspath(name) if name and os.path.isdir(name) else name)


def _first(config: Any, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
