"""What is said on standard error while a command runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def notices(*, verbose: bool, quiet: bool) -> Iterator[None]:
    """Let Murano's own warnings and notices through, a line each, and those of other libraries only when asked for.

    Args:
        verbose: everything that anybody logs.
        quiet: errors only, and no progress bars; there are none either where standard error is no terminal.
    """
    level = "info" if verbose else "error"
    settings = {"TRANSFORMERS_VERBOSITY": level, "HF_HUB_VERBOSITY": level}
    if quiet or not sys.stderr.isatty():  # a progress bar in a log file is a line of noise for each step
        settings |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with _environment(settings), _logging(verbose, quiet), warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
            if not quiet:
                warnings.filterwarnings("default", module=r"murano\b")
            warnings.showwarning = _note
        yield


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Variables that libraries read when they are imported, which comes later; what the user has set stays."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _logging(verbose: bool, quiet: bool) -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("murano: %(message)s"))
    # The bundled model's own logger tells why the first run takes long: that much is always said.
    ours, once = logging.getLogger("murano"), logging.getLogger("murano.model.bundled")
    before = ours.level, once.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING)
    once.setLevel(logging.NOTSET if verbose or quiet else logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before[0])
        once.setLevel(before[1])


def _note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"murano: note: {message}", file=sys.stderr)
