"""LoadPrompts: put prompts into a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murano import keys
from murano.prompts import PromptBatch, as_prompts, read_prompt_file
from murano.results import Results
from murano.steps.base import Step


class LoadPrompts(Step):
    """Writes ``keys.PROMPTS``.

    Args:
        prompts: a string, or a list of strings, chats (lists of messages), token-id lists or :class:`~murano.Prompt` objects.
        chat: render each by the tokenizer's chat template; a string is then one user message.

    Raises:
        InputError: there are no prompts, or one is empty or of another kind; the index is named.

    >>> LoadPrompts(["The capital of France is"])()
    Results(prompts: PromptBatch)
    """

    writes = (keys.PROMPTS,)

    def __init__(self, prompts: Any, chat: bool = False) -> None:
        self.chat = chat
        self.prompts: PromptBatch = as_prompts(prompts, chat=chat)

    @classmethod
    def from_file(cls, path: str | Path, chat: bool = False) -> LoadPrompts:
        """Prompts from a text file, one to a line.

        Raises:
            InputError: the file can't be read or holds no prompt.
        """
        return cls(read_prompt_file(path).texts, chat=chat)

    def run(self, results: Results) -> Mapping[str, Any]:
        return {keys.PROMPTS: self.prompts}

    def describe(self) -> str:
        first = str(self.prompts[0])
        return f"{len(self.prompts)} prompt{'s' if len(self.prompts) != 1 else ''}, the first {first[:60]!r}"

    def __repr__(self) -> str:
        shown: list[Any] = [p.text or [dict(m) for m in p.messages] or list(p.token_ids) for p in self.prompts]
        # Hundreds of prompts would bury everything else that is recorded of a run; they are saved as an artifact of their own.
        listed = f"[{', '.join(map(repr, shown[:3]))}, …]  # {len(shown)} prompts" if len(shown) > 8 else repr(shown)
        return f"LoadPrompts({listed})"
