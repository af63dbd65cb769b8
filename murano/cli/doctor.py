"""``murano doctor``: what a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from murano import __version__
from murano.cli.command import BUNDLED, find_model, new_command

EXAMPLES = f"""\
  murano doctor
  murano doctor {BUNDLED}
  murano doctor gpt2"""

#: What Murano stands on, and the packages of its extras.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "nnterp", "nnsight", "numpy"),
    *("matplotlib", "gguf", "accelerate", "vllm"),
)


def add_to(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = new_command(commands, "doctor", run, "what a bug report needs", EXAMPLES)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"also load this model and prove its readout: a folder, a .gguf file, a hub id, or {BUNDLED!r}",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is installed, and prove a model's readout if one is named."""
    for name, text in _machine():
        print(f"{name:<16} {text}", flush=True)
    if args.model is not None:
        print(f"\n{find_model(args.model).check_readout()}")
    return 0


def _machine() -> Iterator[tuple[str, str]]:
    yield "murano", f"{__version__} in {Path(__file__).parent.parent}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", f"{platform.platform()}, {os.cpu_count()} CPUs{_memory()}"
    for package in PACKAGES:
        yield package, _version(package)
    try:
        import torch
        from huggingface_hub import constants

        from murano.model import bundled
    except (ImportError, OSError) as error:  # OSError: a library of torch that does not load
        yield "import", f"failed: {error}"
        return
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "devices", ", ".join([f"cpu ({torch.get_num_threads()} threads)", *devices])
    yield "cache", str(bundled.cache_folder())
    yield "hub cache", f"{constants.HF_HUB_CACHE}{' (offline)' if constants.HF_HUB_OFFLINE else ''}"
    file = bundled.bundled_file()
    yield "bundled model", str(file) if file is not None else f"not installed. Install it with: {bundled.INSTALL}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    if not hasattr(os, "sysconf"):  # Windows
        return ""
    return f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB of memory"
