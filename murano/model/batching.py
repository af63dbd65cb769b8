"""Prompts to tokens, and tokens to batches.

Prompts of different lengths run right-padded and unmasked: in a causal model what comes after a token can't change it, so
that no mask, no position ids and no pad token can be wrong. That this holds for the model at hand is part of its proof;
where it does not, only prompts of one length share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from murano.errors import InputError
from murano.prompts import Prompt


@dataclass(frozen=True)
class Batch:
    """Prompts that share one forward.

    Args:
        prompts: their indices in the user's order.
        ids: their tokens, right-padded by repeating the last one.
        lengths: how many tokens each has.
    """

    prompts: tuple[int, ...]
    ids: Int[Tensor, "prompt position"]
    lengths: tuple[int, ...]


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The tokens that the model sees: one BOS where the tokenizer wants one, none twice, no end-of-text at the end.

    Args:
        prompt: text, chat or token ids.
        tokenizer: the model's tokenizer.

    Raises:
        InputError: a chat for a tokenizer without a chat template, or a prompt that becomes no token at all.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    if not (prompt.text or prompt.messages):
        raise InputError("it is empty")
    text = prompt_text(prompt, tokenizer)
    special = not prompt.messages  # the template wrote the special tokens already
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(text, add_special_tokens=True)["input_ids"]) if special else bare
    if special and ids != bare:
        ids = _without_suffix(ids, bare)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:  # written in the text and added once more
        ids = ids[1:]
    if not ids:
        raise InputError(f"{str(prompt)!r:.80} becomes no token at all.")
    return ids


def prompt_text(prompt: Prompt, tokenizer: Any) -> str:
    """The text that is tokenised: a chat as its template renders it."""
    return _render(prompt, tokenizer) if prompt.messages else prompt.text


def _without_suffix(ids: list[int], bare: list[int]) -> list[int]:
    """Drop what the tokenizer added after the text: a prompt is to be continued, not closed."""
    for cut in range(len(ids) - len(bare) + 1):
        if ids[cut : cut + len(bare)] == bare:
            return ids[: cut + len(bare)]
    return ids


def _render(prompt: Prompt, tokenizer: Any) -> str:
    messages = [dict(message) for message in prompt.messages]
    answered = messages[-1].get("role") == "assistant"
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered, continue_final_message=answered
        )
    except Exception as error:  # templates raise whatever they like
        if getattr(tokenizer, "chat_template", None):
            raise InputError(f"The chat template refuses {messages!r:.120}: {error}") from error
        raise InputError(
            "This tokenizer has no chat template, so a chat can't be rendered: give plain text, or set tokenizer.chat_template."
        ) from None
    return text


def token_text(tokenizer: Any, token_id: int) -> str:
    """One token as text: its leading space kept, the bytes of a split character as ``<0xE2>``, an unknown id as ``⟨id⟩``."""
    if token_id >= len(tokenizer):
        return f"⟨{token_id}⟩"
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if piece is None:
        return f"⟨{token_id}⟩"
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if piece.startswith("▁"):  # SentencePiece: decoding one piece alone drops its space
        spaces = len(piece) - len(piece.lstrip("▁"))
        return " " * spaces + text.lstrip(" ") if text.strip() else " " * spaces
    if "\ufffd" in text and "\ufffd" not in piece:
        raw = _piece_bytes(piece)
        return "".join(f"<0x{byte:02X}>" for byte in raw) if raw is not None else piece
    return text


def _piece_bytes(piece: str) -> bytes | None:
    """The bytes behind a byte-level piece; ``None`` for a piece of another kind."""
    if piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:-1], 16)])
    table = _byte_alphabet()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest for 256 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def check_ids(ids: Sequence[int], *, rows: int, context: int | None) -> str | None:
    """What is wrong with a prompt's tokens for this model, or ``None``.

    Args:
        ids: the tokens.
        rows: how many ids the model can embed.
        context: how many tokens it can take, where that is known.
    """
    outside = [i for i in ids if not 0 <= i < rows]
    if outside:
        return (
            f"has token id {outside[0]}, but the model embeds ids 0 to {rows - 1} only: "
            "this tokenizer does not belong to this model"
        )
    if context is not None and len(ids) > context:
        return f"has {len(ids)} tokens, but the model's context is {context}"
    return None


def make_batches(
    encoded: Sequence[Sequence[int]], *, max_tokens: int, mix_lengths: bool, order: Sequence[int] | None = None
) -> list[Batch]:
    """Sort prompts by length and cut them into batches of at most ``max_tokens`` tokens, padding counted.

    Args:
        encoded: the tokens of each prompt.
        max_tokens: the size of a batch; a longer prompt makes a batch of its own.
        mix_lengths: whether prompts of different lengths may share a batch.
        order: which prompts, where not all.

    Raises:
        InputError: ``max_tokens`` is no number of tokens.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise InputError(f"max_batch_tokens={max_tokens!r}: it must be a whole number from 1 upwards.")
    todo = sorted(range(len(encoded)) if order is None else order, key=lambda i: -len(encoded[i]))
    groups: list[list[int]] = []
    for index in todo:
        length = len(encoded[index])
        group = groups[-1] if groups else None
        if group:
            longest = len(encoded[group[0]])
            if (len(group) + 1) * longest <= max_tokens and (mix_lengths or longest == length):
                group.append(index)
                continue
        groups.append([index])
    return [_batch(group, encoded) for group in groups]


def _batch(group: list[int], encoded: Sequence[Sequence[int]]) -> Batch:
    longest = max(len(encoded[i]) for i in group)
    rows = [[*encoded[i], *[encoded[i][-1]] * (longest - len(encoded[i]))] for i in group]
    return Batch(tuple(group), torch.tensor(rows), tuple(len(encoded[i]) for i in group))
