"""What a model is called in artifacts and figures: a path says where it lies, and its last part what it is."""

from __future__ import annotations

import re

#: Where the hub's cache keeps a model: a folder that is named by a commit says nothing.
_IN_CACHE = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\][^/\\]+")


def model_name(name: str) -> str:
    """The last part of a path; a hub id, or any other name, as it is.

    >>> model_name("/data/runs/tuned/"), model_name("Qwen/Qwen3-8B")
    ('tuned', 'Qwen/Qwen3-8B')
    >>> model_name("/cache/models--Qwen--Qwen3-8B/snapshots/b968826d")
    'Qwen/Qwen3-8B'
    """
    if match := _IN_CACHE.search(name):
        return match[1].replace("--", "/")
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    parts = [part for part in re.split(r"[/\\]", name) if part]
    return parts[-1] if is_path and parts else name
