"""Which token each answer of a document is read by, and whether that is how the answer would follow its prompt."""

from __future__ import annotations

from typing import Any

from murano.documents.plan import Pass
from murano.errors import InputError
from murano.model import batching
from murano.model.targets import Answer, answers_of
from murano.prompts import Prompt

#: As many tokens as no vocabulary has: whether an answer is in the model's is found out when the weights are there.
ANY_VOCABULARY = 1 << 62


def encoded(one: Pass, tokenizer: Any) -> list[list[int]]:
    """The tokens of each row's prompt.

    Raises:
        InputError: a prompt that has no such position; the row is named.
    """
    found = [batching.encode(prompt, tokenizer) for prompt in one.prompts(tokenizer)]
    for index, ids in enumerate(found):
        for name, read in one.reads.items():
            if not -len(ids) <= read.pos < len(ids):
                raise InputError(
                    f"Row {index} of {one.rows} has {len(ids)} tokens, so read {name!r} finds no position {read.pos}."
                )
    return found


def notes(one: Pass, tokenizer: Any) -> list[str]:
    """What a reader of the numbers must know about the tokens that they are of.

    Args:
        one: a pass.
        tokenizer: the model's.
    """
    found: list[str] = []
    prompts = one.prompts(tokenizer)
    for slot, field in (("targets", one.target), ("foils", one.foil)):
        if field is None:
            continue
        odd: list[str] = []
        long: list[str] = []
        for prompt, record in zip(prompts, one.rows.records, strict=True):
            values = record[field] if isinstance(record[field], list) else [record[field]]
            for read, text in zip(getattr(prompt, slot), values, strict=True):
                if isinstance(text, int):  # given as a token
                    continue
                follows = _continued(prompt, text, tokenizer)
                ids = follows.ids if read == text else tokenizer(text, add_special_tokens=False)["input_ids"]
                first = batching.token_text(tokenizer, ids[0])
                if len(ids) > 1:
                    long.append(f"{str(follows.text if read == text else text)!r} by {first!r}")
                if follows.ids[0] != ids[0]:
                    odd.append(f"{text!r} is read by {first!r}, and follows its prompt as {follows}")
        if long:
            found.append(
                f"{len(long)} of the answers in {field!r} are several tokens, and read by the first one: {long[0]}."
            )
        if odd:
            found.append(
                f"{len(odd)} of the answers in {field!r} are read by a token that is not how they follow their prompt: {odd[0]}. "
                f'To read that, write them so, or say "answers": "continued" in roles.{one.role}.'
            )
    return found


def _continued(prompt: Prompt, text: str, tokenizer: Any) -> Answer:
    """An answer as it follows its prompt."""
    bare = Prompt(text=prompt.text, messages=prompt.messages, token_ids=prompt.token_ids, targets=(text,))
    (found,) = answers_of(bare, batching.encode(prompt, tokenizer), tokenizer, ANY_VOCABULARY)["targets"]
    return found
