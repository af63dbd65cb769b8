"""The tests of backend="vllm" are left out where vLLM is not installed; make test-vllm runs them in an environment of their own."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

#: Memory for keys and values: 1 400 tokens of the bundled model.
KV_BYTES = 64 << 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Any]]:
    """Starts a model in an engine; one lives at a time, and is shut down when another one starts."""
    from murano import MuranoModel

    running: dict[str, Any] = {}

    def start(source: Any = None, **options: Any) -> Any:
        wanted = f"{source} {options}"
        if wanted not in running:
            stop()
            running[wanted] = MuranoModel(source, backend="vllm", **{"kv_cache_memory_bytes": KV_BYTES, **options})
        return running[wanted]

    def stop() -> None:
        while running:
            running.popitem()[1].close()
            gc.collect()

    yield start
    stop()
