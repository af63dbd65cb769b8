"""The errors a user meets: one class per kind, each message says what was given and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MuranoError(Exception):
    """Base class of every error that Murano raises on purpose."""

    def __str__(self) -> str:
        # KeyError's own __str__ shows the repr of its argument, which would quote and escape a whole sentence.
        return str(self.args[0]) if self.args else ""


class InputError(MuranoError, ValueError):
    """Something that was given can't be used: a prompt, a layer, a position, an option."""


class MissingAddressError(InputError, KeyError):
    """A place in a model that was asked for has not been read."""


class MissingKeyError(MuranoError, KeyError):
    """A result that a step or a user asked for is not there."""


class PipelineError(MuranoError, ValueError):
    """A chain of steps can't run: an order, a producer or a type does not fit."""


class ModelError(MuranoError, ValueError):
    """A model can't be found, loaded or read."""


class UnsupportedModelError(ModelError):
    """A model loads, but its logits can't be proved to follow from one residual stream."""


class ReadoutError(MuranoError, RuntimeError):
    """The lens and the model's own logits disagree: nothing that was read may be trusted."""


class ArtifactError(MuranoError, ValueError):
    """A saved file or run is damaged, foreign, of another schema, or can't be written."""


class MissingExtraError(MuranoError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f'{feature} needs an optional dependency. Install it with: pip install "murano-interp[{extra}]"'
        )


def nearest(name: object, choices: Iterable[object]) -> str:
    """A hint for an unknown name: ``" Did you mean 'resid_post'?"``, or nothing when no choice is close."""
    known = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
