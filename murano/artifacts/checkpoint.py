"""A checkpoint of a long lens: the tables as far as they are filled, and how far that is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from murano.artifacts.codec import artifact, fingerprint
from murano.artifacts.folder import check_writable
from murano.artifacts.store import load_artifact, save_artifact
from murano.errors import ArtifactError, InputError

logger = logging.getLogger(__name__)


@artifact
@dataclass(frozen=True, eq=False, kw_only=True)
class SavedTables:
    """What a checkpoint holds.

    Args:
        request: the fingerprint of what was asked for; another request's tables are not taken.
        sections: how many sections of the prompt set are done.
        tables: every table by name.
        odd: notes on residuals that were odd, by address.
    """

    SCHEMA: ClassVar[str] = "lens_checkpoint"
    SCHEMA_VERSION: ClassVar[int] = 1

    request: str
    sections: int
    tables: Mapping[str, Tensor]
    odd: Mapping[str, str]


class Checkpoint:
    """Saves tables while they are filled, and fills them again from what was saved.

    Args:
        path: the file.
        request: all that the tables depend on, as plain values.
        tables: a dataclass of tensors, filled in place, with a dict ``odd`` of notes.
    """

    def __init__(self, path: Path, request: Any, tables: Any) -> None:
        self.path, self.request, self.tables = path, fingerprint(request), tables

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self.tables, f.name) for f in fields(self.tables)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def save(self, sections: int) -> None:
        """Keep what is done; the file is replaced whole, so that a kill leaves the earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        odd = {str(address): note for address, note in self.tables.odd.items()}
        save_artifact(self.path, SavedTables(request=self.request, sections=sections, tables=self._tensors(), odd=odd))

    def load(self) -> int:
        """Fill the tables and return how many sections are done: none without a file, or where the file is damaged.

        Raises:
            InputError: there is a folder, a file of something else, or of another lens.
            ArtifactError: nothing can be written there.
        """
        instead = "Choose another file, or delete this one to start over."
        if self.path.is_dir():
            raise InputError(f"checkpoint={str(self.path)!r} is a folder: give the name of a file in it.")
        if not self.path.exists():
            check_writable(self.path.parent)
            return 0
        try:
            saved = load_artifact(self.path, SavedTables)
        except ArtifactError as error:
            if not self._was_one():
                raise InputError(f"checkpoint={str(self.path)!r} is no checkpoint of a lens. {instead}") from None
            logger.warning("Starting over: %s", error)
            return 0
        if saved.request != self.request:
            raise InputError(
                f"checkpoint={str(self.path)!r} is of another lens: its prompts or arguments were not these. {instead}"
            )
        for name, tensor in self._tensors().items():
            tensor.copy_(saved.tables[name])
        self.tables.odd.update(saved.odd)
        return int(saved.sections)

    def _was_one(self) -> bool:
        """Whether a file that can't be read is what is left of a checkpoint: nothing, or a beginning that says what it was."""
        with open(self.path, "rb") as file:
            start = file.read(1 << 16)
        return not start or SavedTables.SCHEMA.encode() in start
