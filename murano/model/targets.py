"""Targets and foils as tokens: how each would continue its prompt."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from murano.errors import InputError
from murano.model import batching
from murano.prompts import Prompt

#: How a target of several tokens is read.
MODES = ("first", "single", "sequence")


@dataclass(frozen=True)
class Answer:
    """A target or foil of one prompt.

    Args:
        text: as it continues the prompt, its leading space included.
        ids: its tokens.
        pieces: each token as text.
        special: whether it was given as the id of a special token.
    """

    text: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    special: bool = False

    def read_as(self, mode: str) -> str:
        """What is read of it: all, or its first token with a mark that more follows."""
        return self.text if len(self.ids) == 1 or mode == "sequence" else f"{self.pieces[0]}…"

    def __str__(self) -> str:
        return repr(self.text) if len(self.ids) == 1 else f"{self.text!r} ({' + '.join(map(repr, self.pieces))})"


def answers_of(
    prompt: Prompt, ids: Sequence[int], tokenizer: Any, vocab_size: int, mode: str = "first"
) -> dict[str, list[Answer]]:
    """The tokens of a prompt's targets and foils.

    Args:
        prompt: the prompt.
        ids: its tokens.
        tokenizer: the model's tokenizer.
        vocab_size: how many ids the model gives a logit to.
        mode: ``"first"`` reads the first token of an answer of several, ``"single"`` refuses it, ``"sequence"`` reads all.

    Raises:
        InputError: an answer becomes no token, is split where one token was asked for, is not in the vocabulary, or a foil
            begins as a target does.
    """
    found: dict[str, list[Answer]] = {"targets": [], "foils": []}
    for kind in found:
        for given in getattr(prompt, kind):
            answer = _answer(given, prompt, ids, tokenizer)
            outside = [i for i in answer.ids if not 0 <= i < vocab_size]
            what = f"{kind[:-1]} {given!r}"
            if outside:
                raise InputError(f"{what}: token id {outside[0]} is outside the vocabulary, 0 to {vocab_size - 1}.")
            if not answer.ids:
                raise InputError(f"{what} becomes no token at all.")
            if mode == "single" and len(answer.ids) > 1:
                raise InputError(
                    f"{what} is {len(answer.ids)} tokens here, {answer}, where one is required. Give another word, the id of one "
                    "token, or target_mode='first' or 'sequence'."
                )
            # What begins with another accepted answer, as far as it is read, adds nothing to it.
            if not any(_begins(answer, other, mode) for other in found[kind]):
                found[kind] = [other for other in found[kind] if not _begins(other, answer, mode)]
                found[kind].append(answer)
    read = slice(None) if mode == "sequence" else slice(1)
    for foil in found["foils"]:
        for target in found["targets"]:
            if foil.ids[read] == target.ids[read]:
                same = (
                    "is the target itself"
                    if foil.ids == target.ids
                    else f"begins with the target's first token {target.pieces[0]!r}"
                )
                raise InputError(f"foil {foil} {same} ({target}): the difference would be 0 everywhere.")
    return found


def _begins(answer: Answer, other: Answer, mode: str) -> bool:
    """Whether an answer begins with another one, as far as they are read."""
    if mode != "sequence":
        return answer.ids[0] == other.ids[0]
    return answer.ids[: len(other.ids)] == other.ids


def _answer(given: str | int, prompt: Prompt, ids: Sequence[int], tokenizer: Any) -> Answer:
    if isinstance(given, int):
        text = batching.token_text(tokenizer, given) if given >= 0 else f"⟨{given}⟩"
        return Answer(text, (given,), (text,), given in getattr(tokenizer, "all_special_ids", ()))
    before = batching.prompt_text(prompt, tokenizer) if not prompt.token_ids else _decoded(ids, tokenizer)
    text = (" " if _needs_space(before, given) else "") + given
    tokens = continuation(before, text, tokenizer)
    return Answer(text, tuple(tokens), tuple(batching.token_text(tokenizer, i) for i in tokens))


def continuation(before: str, text: str, tokenizer: Any) -> list[int]:
    """The tokens of ``text`` as they follow ``before``; where the two would melt into one token, those of ``text`` alone."""
    for start in (before, "a" if text[:1].isspace() else "\n"):
        prefix = _tokens(start, tokenizer)
        whole = _tokens(start + text, tokenizer)
        if whole[: len(prefix)] == prefix:
            return whole[len(prefix) :]
    return _tokens(text, tokenizer)


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _needs_space(before: str, text: str) -> bool:
    """Whether a writer would put a space between the two: between words, but not after an opening bracket, a quote or a line's end,
    not before punctuation, not inside a number, and not in scripts that are written without spaces; after a sign of arithmetic if
    there is one before it.
    """
    if not before or before[-1].isspace() or text[:1].isspace() or not text[:1].isalnum():
        return False
    last, earlier = before[-1], before[-2:-1]
    if _unspaced(last) or _unspaced(text[0]):
        return False
    if last.isalnum() or last in ")]}”»%…?!;:":
        return True
    if last in ".,":  # 3.14 and 1,000 are numbers
        return not (earlier.isdigit() and text[0].isdigit())
    if last in "\"'`":  # it closes what another one opened
        return before.count(last) % 2 == 0
    if last in "([{<“‘«’/\\_@#$€£¿¡—–":
        return False
    signs = before[len(before.rstrip("+-*/=<>~^&|%")) :]
    return before[: len(before) - len(signs)][-1:].isspace()


def _unspaced(character: str) -> bool:
    name = unicodedata.name(character, "")
    return name.startswith(
        ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
    )
