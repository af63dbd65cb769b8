"""Going deeper with nnterp: the same module under its standard names, for ``with model.trace(…)``."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

from murano.errors import UnsupportedModelError
from murano.model.anatomy import Anatomy


def standardized(anatomy: Anatomy, tokenizer: Any) -> Any:
    """Nnterp's ``StandardizedTransformer`` around the very module that Murano reads.

    The names that were discovered are handed to it, so that ``layers``, ``ln_final`` and ``lm_head`` exist where nnterp alone would not
    find them.

    Args:
        anatomy: the model and the names of its parts.
        tokenizer: its tokenizer.

    Raises:
        UnsupportedModelError: nnterp can't wrap this model; Murano itself reads it all the same.
    """
    rename = {_path(anatomy.blocks[-1].name.rpartition(".")[0]): "layers"}
    if anatomy.final_norm is not None:
        rename[_path(anatomy.final_norm)] = "ln_final"
    if anatomy.head is not None:
        rename[_path(anatomy.head)] = "lm_head"
    # nnterp reports through loguru and standard output at import and load: not what a notebook asked for.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            from nnterp import StandardizedTransformer

            logging.getLogger("nnterp").setLevel(logging.ERROR)
            return StandardizedTransformer(anatomy.model, tokenizer=tokenizer, check_renaming=False, rename=rename)
        except Exception as error:  # nnsight and nnterp raise kinds of their own
            raise UnsupportedModelError(
                f"nnterp can't wrap {type(anatomy.model).__name__} ({type(error).__name__}: {error}), so trace() and nnterp's names are "
                "not available. The lens, capture() and decode() do not need it."
            ) from error


def _path(name: str) -> str:
    return f".{name}" if "." in name else name
