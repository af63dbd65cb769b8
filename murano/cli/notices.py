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
        quiet: errors only, and no progress bars.
    """
    # All of these are read when the libraries are imported, which comes later.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if verbose else "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "info" if verbose else "error")
    if quiet:
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with _logging(verbose, quiet), warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
            if not quiet:
                warnings.filterwarnings("default", module=r"murano\b")
            warnings.showwarning = _note
        yield


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
