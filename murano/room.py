"""Main memory: room for what a lens keeps, looked for before any work is done, and giving back what was freed."""

from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from murano.errors import InputError

T = TypeVar("T")


def make_room(
    make: Callable[[], T],
    layers: int,
    lengths: Sequence[int],
    bytes_of_cell: int,
    kept: int = 0,
    keep: str | None = None,
) -> T:
    """What ``make`` makes, if there is memory for it.

    Args:
        make: allocates the tables.
        layers: how many layers are read.
        lengths: how many positions of each prompt are read; all prompts take as many cells as the longest.
        bytes_of_cell: what a cell takes besides what ``keep`` asks for.
        kept: what ``keep`` takes of each cell.
        keep: ``"residuals"`` or ``"logits"``.

    Raises:
        InputError: saying how much is needed, what takes it, and what to ask for instead.
    """
    cells = layers * len(lengths) * max(lengths, default=0)
    needed, free = cells * (bytes_of_cell + kept), available_memory()
    if free is None or needed <= free:
        try:
            return make()
        except (RuntimeError, MemoryError) as error:
            if "alloc" not in str(error) and not isinstance(error, MemoryError):
                raise
            free = None  # a limit of this process, of which the system's figure does not know
    have = f"{free / 1e9:.1f} GB are free" if free is not None else "this process may not have so much"
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    usual = int(statistics.median(lengths))
    mostly = f"keep={keep!r}" if kept > bytes_of_cell else "The result"
    less = []
    if keep == "logits":
        less.append("keep='residuals', and lens.decode(model) for the cells you need")
    elif kept > bytes_of_cell:
        less.append(f"without keep={keep!r} it is {cells * bytes_of_cell / 1e9:.1f} GB")
    if 2 * sum(lengths) < len(lengths) * lengths[longest]:
        less.append(
            f"every prompt takes as many cells as the longest, prompt {longest} with {lengths[longest]} positions (half of them "
            f"have at most {usual}): read long ones apart"
        )
    less.append("read fewer layers or positions, such as positions='last'")
    raise InputError(
        f"{mostly} needs {needed / 1e9:.1f} GB ({layers} layers × {len(lengths)} prompts × {lengths[longest]} positions × "
        f"{bytes_of_cell + kept} bytes), and {have}. Instead: {'; '.join(less)}."
    )


def available_memory() -> int | None:
    """Bytes of main memory that are free to use, where the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def give_back() -> None:
    """Give main memory that was freed back to the system.

    The GNU C library keeps freed blocks of less than 32 MiB for itself, and what a block of the model holds at thousands of positions, or a
    product's logits, is of just that size: holes of many sizes would come to a third of the whole, or more.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, which has no such function
        return None
    return trim
