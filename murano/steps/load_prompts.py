"""LoadPrompts: put prompts into a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murano import keys
from murano.prompt_files import read_prompt_file, shipped_prompts
from murano.prompts import PromptBatch, as_prompts
from murano.results import Results
from murano.steps.base import Step


class LoadPrompts(Step):
    """Writes ``keys.PROMPTS``.

    Args:
        prompts: a string, or a list of strings, chats (lists of messages), token-id lists or :class:`~murano.Prompt` objects.
        chat: render each by the tokenizer's chat template; a string is then one user message.
        targets: the answer of each prompt: a string that continues it, a token id, a list of several accepted ones, or ``None``.
        foils: what each target is compared with, in the same forms.

    Raises:
        InputError: there are no prompts, one is empty or of another kind, or there is another number of targets than of prompts;
            the index is named.

    >>> LoadPrompts(["The capital of France is"], targets=["Paris"], foils=["London"])()
    Results(prompts: PromptBatch)
    """

    writes = (keys.PROMPTS,)

    def __init__(self, prompts: Any, chat: bool = False, *, targets: Any = None, foils: Any = None) -> None:
        self.chat = chat
        self.prompts: PromptBatch = as_prompts(prompts, chat=chat, targets=targets, foils=foils)

    @classmethod
    def from_file(cls, path: str | Path, chat: bool = False, *, fields: Mapping[str, str] | None = None) -> LoadPrompts:
        """Prompts from a file: a line each of ``.txt``, or a record each of ``.jsonl``, ``.json``, ``.csv`` or ``.tsv``.

        Args:
            path: the file; a record has a field ``prompt`` and may have ``target`` and ``foil``; others are kept as metadata.
            chat: render each by the tokenizer's chat template.
            fields: what this file calls them: ``{"prompt": "question", "target": "answer"}``.

        Raises:
            InputError: the file can't be read, holds no prompt, or a record lacks a field; the line is named.
        """
        return cls(read_prompt_file(path, chat=chat, fields=fields))

    @classmethod
    def from_dataset(cls, name: str) -> LoadPrompts:
        """A data set that comes with the package: ``"facts"``, short factual prompts with targets, foils and a category.

        Raises:
            InputError: there is no such data set.
        """
        return cls(shipped_prompts(name))

    def run(self, results: Results) -> Mapping[str, Any]:
        return {keys.PROMPTS: self.prompts}

    def describe(self) -> str:
        first = str(self.prompts[0])
        return f"{len(self.prompts)} prompt{'s' if len(self.prompts) != 1 else ''}, the first {first[:60]!r}"

    def __repr__(self) -> str:
        shown: list[Any] = [p.text or [dict(m) for m in p.messages] or list(p.token_ids) for p in self.prompts]
        # Hundreds of prompts would bury everything else that is recorded of a run; they are saved as an artifact of their own.
        listed = f"[{', '.join(map(repr, shown[:3]))}, …]  # {len(shown)} prompts" if len(shown) > 8 else repr(shown)
        options = ""
        for name in ("targets", "foils"):
            answers = [a[0] if len(a := getattr(p, name)) == 1 else list(a) or None for p in self.prompts]
            if any(a is not None for a in answers) and len(shown) <= 8:
                options += f", {name}={answers!r}"
        return f"LoadPrompts({listed}{options})"
