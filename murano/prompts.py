"""Prompts: what the model is to read, before any tokenizer has seen it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murano.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt.

    Args:
        text: what the model reads; empty when ``messages`` or ``token_ids`` say it.
        messages: a chat, ``[{"role": "user", "content": "…"}]``, rendered by the tokenizer's chat template, which writes
            the special tokens itself: none are added a second time.
        token_ids: the exact tokens, nothing added.
        metadata: anything else that belongs to the prompt, kept with it.
    """

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.messages:
            return str(self.messages[-1].get("content", ""))
        return f"{list(self.token_ids)}"


class PromptBatch(Sequence[Prompt]):
    """The prompts of a run, in the user's order.

    Args:
        prompts: the prompts.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = tuple(prompts)

    def __getitem__(self, index: Any, /) -> Any:
        return PromptBatch(self._prompts[index]) if isinstance(index, slice) else self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __eq__(self, other: object) -> bool:
        return self._prompts == other._prompts if isinstance(other, PromptBatch) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def texts(self) -> list[str]:
        """Each prompt as text."""
        return [str(prompt) for prompt in self._prompts]

    def __repr__(self) -> str:
        shown = ", ".join(f"{str(prompt)[:40]!r}" for prompt in self._prompts[:3])
        return f"PromptBatch([{shown}{', …' if len(self) > 3 else ''}], n={len(self)})"


def as_prompts(source: Any, *, chat: bool = False) -> PromptBatch:
    """Prompts from what a user is likely to hold.

    Args:
        source: a string (taken as one prompt), a list of strings, of chats (lists of messages), of token-id lists or of
            :class:`Prompt` objects, or a :class:`PromptBatch`.
        chat: render each item by the tokenizer's chat template; a string is then one user message.

    Raises:
        InputError: there are no prompts, one is empty, or one is none of the above; the index is named.
    """
    if isinstance(source, PromptBatch):
        return source
    if isinstance(source, (str, Path)) and is_prompt_file(source):
        raise InputError(
            f"{str(source)!r} is a file, and would be read as a prompt. Did you mean LoadPrompts.from_file({str(source)!r})?"
        )
    if isinstance(source, Mapping):  # iterating over it would give its keys
        hint = "[messages]" if "role" in source else "list(prompts.values())"
        raise InputError(f"Prompts must be a list of strings, not a {type(source).__name__}: give {hint}.")
    if isinstance(source, (str, Prompt)) or (chat and _is_chat(source)):
        source = [source]
    elif not isinstance(source, Sequence):
        try:
            source = list(source)
        except TypeError:
            raise InputError(
                f"Prompts must be a list of strings, not {type(source).__name__}: {source!r:.80}"
            ) from None
    if len(source) == 0:
        raise InputError('There are no prompts. Give at least one: LoadPrompts(["The capital of France is"]).')
    return PromptBatch([_as_prompt(item, index, chat) for index, item in enumerate(source)])


def read_prompt_file(path: str | Path) -> PromptBatch:
    """Prompts from a text file, one to a line; empty lines are left out.

    Raises:
        InputError: the file can't be read or has no prompt in it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"Can't read prompts from {str(path)!r}: it isn't a text file in UTF-8.") from None
    except OSError as error:
        raise InputError(f"Can't read prompts from {str(path)!r}: {error.strerror or error}.") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"There are no prompts in {str(path)!r}: it should hold one prompt to a line.")
    return as_prompts(prompts)


def is_prompt_file(text: str | Path) -> bool:
    """Whether a text is the name of a file that may well hold prompts."""
    return str(text).endswith((".txt", ".jsonl", ".csv", ".json")) and os.path.isfile(text)


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) > 0 and all(isinstance(m, Mapping) and "role" in m for m in item)


def _as_prompt(item: Any, index: int, chat: bool) -> Prompt:
    if isinstance(item, Prompt):
        if not (item.text.strip() or item.messages or item.token_ids):
            raise InputError(f"Prompt {index} {'holds only whitespace' if item.text else 'is empty'}.")
        return item
    if isinstance(item, str):
        if not item.strip():
            raise InputError(f"Prompt {index} {'holds only whitespace' if item else 'is empty'}: {item!r:.80}.")
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"Prompt {index} is not UTF-8 text: {item!r:.80} ({error.reason}).") from None
        return Prompt(messages=({"role": "user", "content": item},)) if chat else Prompt(text=item)
    if _is_chat(item):
        return Prompt(messages=tuple(dict(message) for message in item))
    if isinstance(item, (bytes, bytearray)):  # a sequence of ints, but no token ids
        raise InputError(f"Prompt {index} is a {type(item).__name__}: {item!r:.80}. Decode it first: prompt.decode().")
    if hasattr(item, "tolist"):  # a tensor or an array of ids
        item = item.tolist()
    if (
        isinstance(item, Sequence)
        and len(item) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
    ):
        return Prompt(token_ids=tuple(item))
    if isinstance(item, Sequence) and len(item) == 0:
        raise InputError(f"Prompt {index} is empty: {item!r}.")
    raise InputError(
        f"Prompt {index} is a {type(item).__name__}: {item!r:.80}. "
        "A prompt is a string, a chat (a list of messages with 'role' and 'content') or a list of token ids."
    )
