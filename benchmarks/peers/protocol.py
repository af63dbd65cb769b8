"""How a runner talks: a request a line on standard input, an answer a line on standard output, both JSON.

The first request is ``{"model": folder, "ids": token ids of the prompts, "positions": "all" or "last"}``; after it the
model is loaded and warm. Every further line is one run, answered with its seconds and memory in bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Prompts that share a forward, as a user of a library without batches of its own would do.
BATCH = 8


def status(name: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def available() -> int:
    """Bytes that this machine still has."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def settle() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def touch_weights() -> None:
    """Read every parameter: weights that are mapped from a file are in memory only once something has read them."""
    import torch

    for item in gc.get_objects():
        if issubclass(type(item), torch.nn.Parameter):
            item.detach().sum()


def batches(ids: list[list[int]]) -> list[list[list[int]]]:
    """Eight prompts at a time."""
    return [ids[i : i + BATCH] for i in range(0, len(ids), BATCH)]


def serve(
    load: Callable[[str], Any], make: Callable[[Any, list[list[int]], str], Callable[[], Any]], *packages: str
) -> None:
    """Answer requests until there are none.

    Args:
        load: from a folder, the model in float32 on the CPU.
        make: from model, ids and positions, what is measured.
        packages: whose versions are told.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    request = json.loads(sys.stdin.readline())
    tiny = [ids[:4] for ids in request["ids"][:1]]
    model = load(request["model"])
    touch_weights()
    settle()
    loaded = status("VmRSS")
    make(model, tiny, request["positions"])()
    run = make(model, request["ids"], request["positions"])
    settle()
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", *packages)}
    print(json.dumps({"loaded": loaded, "versions": versions}), file=answers, flush=True)
    for _ in sys.stdin:
        settle()
        ready = status("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
            how = "VmHWM, reset before the run"
        except OSError:
            how = "ru_maxrss (of the whole process)"
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        peak = status("VmHWM") if how.startswith("VmHWM") else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        del result
        print(
            json.dumps({"seconds": seconds, "ready": ready, "peak": peak - ready, "how": how}), file=answers, flush=True
        )
