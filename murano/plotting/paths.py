"""Where figures and pages are written to: what was given is checked before anything is drawn."""

from __future__ import annotations

import os
from typing import Any

from murano.errors import InputError


def check_path(path: Any, example: str) -> str:
    """A path as text.

    Args:
        path: what was given.
        example: what to write instead.

    Raises:
        InputError: it is no path.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str) and text:
            return text
    raise InputError(f"{path!r} is no path: write a string or a Path, such as {example!r}.")
