"""Which model a document names: a folder is found as rows are, and anything else is a hub id."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path


def find_model_folder(key: str | None, folder: Path) -> Path | None:
    """The model's folder, or its ``.gguf`` file, that a document names; ``None`` for a hub id and the bundled model.

    It is looked for in the document's folder; then, for a document in a folder that a run wrote, where that run found it; then in
    the current directory.

    Args:
        key: as the document writes it.
        folder: the document's.
    """
    if key is None or not key.strip():
        return None
    return next((path for path in _places(key, Path(os.path.abspath(folder))) if _is_model(path)), None)


def _places(key: str, folder: Path) -> Iterator[Path]:
    name = Path(key).expanduser()
    yield folder / name
    for place in (folder, folder.parent):
        try:
            about = json.loads((place / "run.json").read_text(encoding="utf-8"))["document"]
            if about["model_key"] == key and about["model_folder"] is not None:
                yield Path(about["model_folder"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    yield Path(os.path.abspath(name))


def _is_model(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() or (path.suffix.lower() == ".gguf" and path.is_file())
    except (OSError, ValueError):  # a name that no file can have
        return False
