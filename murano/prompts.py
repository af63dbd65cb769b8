"""Prompts: what the model is to read, before any tokenizer has seen it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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
        targets: the accepted answers, each a string that continues the prompt or a token id; often one.
        foils: the answers that the targets are compared with.
        metadata: anything else that belongs to the prompt, kept with it.
    """

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    targets: tuple[str | int, ...] = ()
    foils: tuple[str | int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One answer is written without a list; taken apart, a string would be its letters.
        for what in ("targets", "foils"):
            object.__setattr__(self, what, as_answers(getattr(self, what), f"Prompt {what}"))

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


def as_prompts(
    source: Any, *, chat: bool = False, targets: Any = None, foils: Any = None, bad: dict[int, str] | None = None
) -> PromptBatch:
    """Prompts from what a user is likely to hold.

    Args:
        source: a string (taken as one prompt), a list of strings, of chats (lists of messages), of token-id lists or of
            :class:`Prompt` objects, or a :class:`PromptBatch`.
        chat: render each item by the tokenizer's chat template; a string is then one user message.
        targets: the answer of each prompt: a string that continues it, a token id, a list of several accepted ones, or ``None``.
        foils: what each target is compared with, in the same forms.
        bad: where to note, by index, what is wrong with an item that is no prompt; an empty prompt then stands in its place.

    Raises:
        InputError: there are no prompts, one is empty, one is none of the above, or there is another number of targets than
            of prompts; the index is named.
    """
    return _with_answers(_with_answers(_as_batch(source, chat, bad), "targets", targets), "foils", foils)


def _as_batch(source: Any, chat: bool, bad: dict[int, str] | None) -> PromptBatch:
    if isinstance(source, PromptBatch):
        return source
    if isinstance(source, (str, Path)) and is_prompt_file(source):
        raise InputError(
            f"{str(source)!r} is a file, and would be read as a prompt. Did you mean LoadPrompts.from_file({str(source)!r})?"
        )
    if isinstance(source, Mapping):  # iterating over it would give its keys
        hint = "[messages]" if "role" in source else "list(prompts.values())"
        raise InputError(f"Prompts must be a list of strings, not a {type(source).__name__}: give {hint}.")
    if isinstance(source, (bytes, bytearray)):
        raise InputError(
            f"A prompt is a string, not {type(source).__name__}: {source!r:.80}. Decode it first: prompt.decode()."
        )
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
    prompts = []
    for index, item in enumerate(source):
        try:
            prompts.append(_as_prompt(item, index, chat))
        except InputError as error:
            if bad is None:
                raise
            bad[index] = str(error)
            prompts.append(Prompt())
    return PromptBatch(prompts)


def as_answers(value: Any, what: str) -> tuple[str | int, ...]:
    """Targets or foils of one prompt, in any of the forms they are given in.

    Args:
        value: a string, a token id, a list of these, or ``None`` for none.
        what: ``"targets[3]"``, say, for the error.

    Raises:
        InputError: it is none of these.
    """
    if value is None:
        return ()
    if hasattr(value, "tolist"):
        value = value.tolist()
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    answers = tuple(value) if several else (value,)
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, (str, int)) or answer == "":
            raise InputError(
                f"{what} is {value!r:.80}: it must be a string that continues the prompt, a token id, or a list of these."
            )
        if isinstance(answer, str) and not _is_text(answer):
            raise InputError(f"{what} is not UTF-8 text: {answer!r:.80}.")
    return answers


def _with_answers(batch: PromptBatch, what: str, given: Any) -> PromptBatch:
    if given is None:
        return batch
    if isinstance(given, (str, int)) and len(batch) == 1:
        given = [given]
    unordered = isinstance(given, (Mapping, Set, bytes, bytearray))  # whose items are no answers, or in no order
    if isinstance(given, (str, int)) or unordered or not hasattr(given, "__len__"):
        raise InputError(f"{what}={given!r:.80} must be a list with one entry for each of the {len(batch)} prompts.")
    if len(given) != len(batch):
        first = min(len(given), len(batch))
        missing = f"prompt {first} has none" if len(given) < len(batch) else f"{what}[{first}] has no prompt"
        raise InputError(f"There are {len(batch)} prompts and {len(given)} {what}: {missing}.")
    answers = [as_answers(value, f"{what}[{index}]") for index, value in enumerate(given)]
    pairs = zip(batch, answers, strict=True)
    return PromptBatch([replace(p, targets=a) if what == "targets" else replace(p, foils=a) for p, a in pairs])


def is_prompt_file(text: str | Path) -> bool:
    """Whether a text is the name of a file that may well hold prompts."""
    return str(text).endswith((".txt", ".jsonl", ".csv", ".tsv", ".json")) and os.path.isfile(text)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_chat(item: Any) -> bool:
    return isinstance(item, Sequence) and len(item) > 0 and all(isinstance(m, Mapping) and "role" in m for m in item)


def _blank(text: str, index: int) -> InputError:
    if not text:
        return InputError(f"Prompt {index} is empty: ''.")
    return InputError(
        f"Prompt {index} holds only whitespace: {text!r:.80}. If that is meant, give its token ids: [[id, …]]."
    )


def _as_prompt(item: Any, index: int, chat: bool) -> Prompt:
    if isinstance(item, Prompt):
        if not isinstance(item.text, str):
            raise InputError(
                f"Prompt {index} has text={item.text!r:.80}, which is no string. Token ids go into token_ids, a chat into messages."
            )
        if not (item.text.strip() or item.messages or item.token_ids):
            raise _blank(item.text, index)
        return item
    if isinstance(item, str):
        if not item.strip():
            raise _blank(item, index)
        if not _is_text(item):
            raise InputError(f"Prompt {index} is not UTF-8 text: {item!r:.80}.")
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
    if isinstance(item, int) and not isinstance(item, bool):
        raise InputError(
            f"Prompt {index} is a single number, {item}. The token ids of one prompt need two brackets: [[{item}, …]]."
        )
    raise InputError(
        f"Prompt {index} is a {type(item).__name__}: {item!r:.80}. "
        "A prompt is a string, a chat (a list of messages with 'role' and 'content') or a list of token ids."
    )
