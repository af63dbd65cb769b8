"""The tokens after which a model has said what it had to say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from murano.model.anatomy import text_config

if TYPE_CHECKING:
    from murano.model import MuranoModel

#: Stands for what an assistant says.
_ANSWER = "The answer."


def end_tokens(model: MuranoModel, *, chat: bool) -> frozenset[int]:
    """What ends a text, as transformers' ``generate`` finds it: the generation config, else the config; in a chat also the end of a turn.

    Args:
        model: the model.
        chat: whether it answers in a chat.
    """
    configs = (model.generation_config, text_config(model.config), model.config)
    given: Any = next((ids for config in configs if (ids := getattr(config, "eos_token_id", None)) is not None), [])
    ends = {int(i) for i in (given if isinstance(given, (list, tuple)) else [given])}
    turn = end_of_turn(model.tokenizer) if chat else None
    return frozenset(ends if turn is None else {*ends, turn})


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template puts behind what an assistant says; ``None`` where it puts none."""
    said = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        after = tokenizer.apply_chat_template(said, tokenize=False).rpartition(_ANSWER)[2]
    except Exception:  # templates raise whatever they like
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids and ids[0] in special_ids(tokenizer) else None


def special_ids(tokenizer: Any) -> set[int]:
    """The tokens that are no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
