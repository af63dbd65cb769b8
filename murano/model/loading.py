"""Where a model comes from: a folder, the hub's cache, the hub, a GGUF file, the bundled model, or an object already held."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from murano.errors import InputError, MissingExtraError, ModelError, nearest
from murano.model.bundled import bundled_folder

logger = logging.getLogger(__name__)

#: Seconds in which the hub must say whether it has a model.
HUB_TIMEOUT = 5.0

_GIVE_TOKENIZER = " Give one: MuranoModel(…, tokenizer='folder or hub id')."


@dataclass(frozen=True)
class Source:
    """A model that was found but not yet loaded.

    Args:
        model_id: what the user calls it: a folder as it was written, a hub id, or a file's name without its ending.
        location: a folder or a hub id, as transformers takes it.
        revision: the commit on the hub, where there is one.
        gguf_file: the file inside ``location`` to dequantise, for a GGUF model.
        local: whether everything is on this machine, so that no network is needed.
        trust_remote_code: whether code that comes with the model may run.
    """

    model_id: str
    location: str
    revision: str | None = None
    gguf_file: str | None = None
    local: bool = True
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that transformers' ``from_pretrained`` needs to find it."""
        options: dict[str, Any] = {"local_files_only": self.local, "trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def find_source(source: str | Path | None, revision: str | None, trust_remote_code: bool) -> Source:
    """Find a model without loading it.

    Args:
        source: a folder, a ``.gguf`` file, a hub id, or ``None`` for the bundled model.
        revision: a branch, tag or commit on the hub.
        trust_remote_code: let code that comes with the model run.

    Raises:
        ModelError: there is no such model.
    """
    if source is None:
        folder, name = bundled_folder()
        return Source(name, str(folder))
    text = str(source)
    if not text.strip():
        raise ModelError(
            f"{text!r} names no model. Give a folder, a .gguf file or a hub id, or leave it out for the bundled model."
        )
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{text!r} is a file, but not a .gguf file. Give a model's folder, a .gguf file or a hub id."
            )
        return Source(path.stem, str(path.parent), gguf_file=path.name, trust_remote_code=trust_remote_code)
    if path.is_dir():
        if not (path / "config.json").is_file():
            held = sorted(p.name for p in path.iterdir())[:6]
            ggufs = [name for name in held if name.endswith(".gguf")]
            hint = f" Give the file itself: {str(path / ggufs[0])!r}." if ggufs else ""
            raise ModelError(
                f"{text!r} is no model folder: it has no config.json. It holds: {', '.join(held) or 'nothing'}.{hint}"
            )
        return Source(text, str(path), trust_remote_code=trust_remote_code)
    if _is_path(source):
        raise ModelError(f"There is no model folder {text!r}.{_neighbour(path)}")
    return _on_hub(text, revision, trust_remote_code)


def _is_path(name: str | Path) -> bool:
    """Whether a name can only be one of a file, not a hub id."""
    text = str(name)
    return isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text


def _neighbour(path: Path) -> str:
    return nearest(path, path.parent.iterdir()) if path.parent.is_dir() else ""


def _on_hub(model_id: str, revision: str | None, trust_remote_code: bool) -> Source:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    found = Source(model_id, model_id, revision, local=False, trust_remote_code=trust_remote_code)
    try:
        cached = try_to_load_from_cache(model_id, "config.json", revision=revision)
    except HFValidationError:
        raise ModelError(f"{model_id!r} is neither a folder nor a hub id such as 'gpt2' or 'Qwen/Qwen3-8B'.") from None
    if isinstance(cached, str):
        snapshot = Path(cached).parent
        if _weights_complete(snapshot):
            return replace(found, revision=revision or snapshot.name, local=True)
    else:
        _ask_hub(found)
    return found


def _ask_hub(source: Source) -> None:
    """Ask the hub once whether it has a model: transformers would try for half a minute, and log each attempt.

    Raises:
        ModelError: it has none, or can't be reached.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(source.location, "config.json", revision=source.revision), timeout=HUB_TIMEOUT)
    except hub.GatedRepoError:
        reason = "it is gated, so accept its terms on its page and log in with 'hf auth login'."
    except hub.RepositoryNotFoundError:
        reason = "the hub has no model of that name, or a private one."
    except hub.RevisionNotFoundError:
        reason = f"it has no revision {source.revision!r} there."
    except hub.EntryNotFoundError:
        reason = "it has no config.json there."
    except hub.HfHubHTTPError:
        return  # the hub is busy: transformers waits and tries again
    except Exception as error:  # the hub and what it stands on each raise kinds of their own
        reason = _first_line(error)
    else:
        return
    raise _not_fetched(source, reason)


def _not_fetched(source: Source, reason: str) -> ModelError:
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    cached = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return ModelError(
        f"{source.model_id!r} is no folder here, is not in the hub's cache, and can't be fetched from the hub: "
        f"{reason.rstrip('.')}. Check the name and the connection, or give the folder of a downloaded model."
        f"{nearest(source.model_id, cached)}"
    )


def _weights_complete(folder: Path) -> bool:
    """Whether all weight files of a cached snapshot are there; a half-downloaded model must go to the hub."""
    for index in folder.glob("*.index.json"):
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        if all((folder / name).exists() for name in files):
            return True
    return any((folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin"))


def parse_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype that a name means; ``None`` for the checkpoint's own.

    Raises:
        InputError: it is no dtype.
    """
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if dtype == "auto" else dtype
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
    found = getattr(torch, short.get(str(dtype), str(dtype)), None)
    if not isinstance(found, torch.dtype):
        raise InputError(
            f"{dtype!r} is no dtype. Use torch.float32, torch.bfloat16 or torch.float16, or 'float32' and so on."
        )
    return found


def check_devices(device_map: Any) -> None:
    """Refuse a device that is not there, before anything loads.

    Raises:
        InputError: naming it.
    """
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if place is None or place in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
            continue
        try:
            device = torch.device(place)
        except (RuntimeError, TypeError):
            raise InputError(
                f"device_map={device_map!r}: {place!r} is no device. Use 'auto', 'cpu', 'cuda' or 'cuda:1'."
            ) from None
        n_devices = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= n_devices:
            raise InputError(
                f"device_map={device_map!r}: torch finds {n_devices or 'no'} CUDA devices on this machine. "
                "Without device_map the weights go to the CPU."
            )


def load_config(source: Source) -> Any:
    """The model's config.

    Raises:
        ModelError: it can't be read, or it is not the config of a causal LM.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _from_hub(AutoConfig.from_pretrained, source, "config")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        kind = getattr(config, "model_type", None)
        raise ModelError(
            f"{source.model_id!r} is a {kind!r} model, which is no causal language model: there is no next token to predict. "
            f"transformers knows {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} families that are, gpt2 and llama among them."
        )
    return config


def load_tokenizer(source: Source) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: it has none, or it can't be read.
    """
    from transformers import AutoTokenizer

    tokenizer = _from_hub(AutoTokenizer.from_pretrained, source, "tokenizer")
    # Where there is no file, some families come out with nothing but their special tokens, and read every text as nothing.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ModelError(f"{source.model_id!r} has no tokenizer: there are no tokenizer files.{_GIVE_TOKENIZER}")
    return tokenizer


def as_tokenizer(tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """The tokenizer that a user gives: the object, or the one of a folder or hub id.

    Args:
        tokenizer: what was given.
        trust_remote_code: let code that comes with it run.

    Raises:
        ModelError: there is no tokenizer of that name.
        InputError: it is neither a tokenizer nor a name.
    """
    if isinstance(tokenizer, (str, Path)):
        path = Path(tokenizer).expanduser()
        if path.is_dir():
            return load_tokenizer(Source(str(tokenizer), str(path), trust_remote_code=trust_remote_code))
        if _is_path(tokenizer):
            raise ModelError(f"There is no tokenizer's folder {str(tokenizer)!r}.{_neighbour(path)}")
        return load_tokenizer(Source(str(tokenizer), str(tokenizer), local=False, trust_remote_code=trust_remote_code))
    if isinstance(tokenizer, type) or not callable(tokenizer):
        raise InputError(
            f"tokenizer={tokenizer!r:.80} is no tokenizer. Give a folder, a hub id or AutoTokenizer.from_pretrained(…)."
        )
    return tokenizer


def load_weights(source: Source, config: Any, dtype: torch.dtype | None, device_map: Any) -> nn.Module:
    """The model itself, ready to be read: in evaluation mode, frozen.

    Args:
        source: where it lies.
        config: its config.
        dtype: of the weights; ``None`` for the checkpoint's own.
        device_map: as transformers takes it.

    Raises:
        ModelError: the weights can't be read, or do not fill the whole model.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype if dtype is not None else torch.float32 if source.gguf_file else "auto"}
    # Without the second one transformers stops at the first other shape with an error that names no tensor.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    if source.gguf_file is None:
        options["config"] = config
    if device_map is not None:
        options["device_map"] = device_map
    with quiet_bars() if source.local else contextlib.nullcontext():
        model, info = _from_hub(AutoModelForCausalLM.from_pretrained, source, "weights", **options)
    _check_complete(model, info, source)
    frozen: nn.Module = model.eval().requires_grad_(False)
    return frozen


def _check_complete(model: nn.Module, info: Mapping[str, Any], source: Source) -> None:
    """Refuse a model that the checkpoint does not fill: transformers makes up the rest with random numbers.

    Tied tensors are not missing, and tensors too many do no harm. Missing buffers are no random numbers but the constants that the
    model's code starts from: they are told.

    Raises:
        ModelError: naming the tensors.
    """
    name, parameters = type(model).__name__, {key for key, _ in model.named_parameters(remove_duplicate=False)}
    # What is no parameter of the model that came out is counted too: a quantised tensor goes by other names.
    buffers = {key for key, _ in model.named_buffers()} - parameters
    missing = sorted(set(info["missing_keys"]) - buffers)
    others = sorted(info["mismatched_keys"])
    if not missing and not others:
        constants = sorted(info["missing_keys"])
        if constants:
            logger.warning(
                "The weights of %r lack %s, which keep the values that %s starts from.",
                *(source.model_id, _some(list(map(repr, constants)), "buffer"), name),
            )
        return
    found = []
    if missing:
        found.append(f"lack {_some(list(map(repr, missing)), 'tensor')}")
    if others:
        shapes = [f"{key!r} ({list(there)}, not {list(wanted)})" for key, there, wanted in others]
        found.append(f"have another shape of {_some(shapes, 'tensor')}")
    saved_as = (getattr(getattr(model, "config", None), "architectures", None) or [name])[0]
    hint = (
        "Is its config.json that of these weights?"
        if saved_as == name or source.gguf_file is not None
        else f"It was saved as {saved_as}: give the causal language model itself."
    )
    raise ModelError(
        f"The weights of {source.model_id!r} {' and '.join(found)} of {name}: these would be random numbers. {hint}"
    )


def _some(names: list[str], what: str) -> str:
    """``"3 tensors ('a', 'b', 'c')"``; of many, the first three."""
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Without transformers' progress bars: for weights that are on this machine, which mostly takes a second."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as bars

    shown, hub_silent = bars.is_progress_bar_enabled(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an environment variable has the last word on the hub's bars
        bars.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if shown:
                bars.enable_progress_bar()  # the hub's as well
            if hub_silent:
                disable_progress_bars()


def _from_hub(load: Any, source: Source, what: str, **options: Any) -> Any:
    """Call a ``from_pretrained`` and turn what goes wrong into one error that says what to do."""
    try:
        return load(source.location, **source.options, **options)
    except ImportError as error:
        if source.gguf_file is not None:
            raise MissingExtraError("Reading a .gguf file", "gguf") from error
        raise ModelError(f"The {what} of {source.model_id!r} can't be loaded: {_first_line(error)}") from error
    except KeyboardInterrupt:
        raise
    except Exception as error:  # transformers, tokenizers, safetensors and the hub each raise kinds of their own
        if source.local or _reached(error):
            hint = ""
            if what == "tokenizer":
                hint = _GIVE_TOKENIZER
            raise ModelError(
                f"The {what} of {source.model_id!r} can't be loaded: {_first_line(error)}{hint}"
            ) from error
        raise _not_fetched(source, _first_line(error)) from error


def _reached(error: BaseException) -> bool:
    """Whether the hub answered with files, so that what went wrong lies in them."""
    return not isinstance(error, (OSError, RuntimeError)) and type(error).__module__.split(".")[0] not in (
        "httpx",
        "huggingface_hub",
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
