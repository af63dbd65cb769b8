"""Which token each answer of a document is read by, and whether that is how the answer would follow its prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from murano.documents.errors import DocumentError, Problem, shown, spell
from murano.documents.plan import Pass, Plan, listed
from murano.errors import InputError, ModelError
from murano.model import MuranoModel, batching
from murano.model.anatomy import text_config
from murano.model.loading import load_tokenizer
from murano.model.targets import Answer, answers_of
from murano.prompts import Prompt

#: As many tokens as no vocabulary has: where a config does not say, what is in the model's is found out when the weights are there.
ANY_VOCABULARY = 1 << 62
#: Of so many bad rows an error says what is wrong with each.
NAMED_ROWS = 5


def vocabulary(model: MuranoModel) -> int:
    """How many tokens the model knows, as far as that can be told without its weights."""
    if "anatomy" in vars(model):
        return model.vocab_size
    size = getattr(text_config(model.config), "vocab_size", None)
    return size if isinstance(size, int) else ANY_VOCABULARY


def encoded(plan: Plan, model: MuranoModel, name: str) -> list[list[list[int]]]:
    """The tokens of each row's prompt, pass by pass; no weights load.

    Args:
        plan: of a document.
        model: what is read.
        name: of the document, for the error.

    Raises:
        DocumentError: rows that the model can't read, or whose answers can't be told apart: the first ones of each pass, and how
            many there are.
    """
    found: list[list[list[int]]] = []
    problems: list[Problem] = []
    size = vocabulary(model)
    for one in plan.passes:
        path = ("steps", one.step, "rows", one.role)
        tokens: list[list[int]] = []
        bad: list[Problem] = []
        for index, record in enumerate(one.rows.records):
            try:
                tokens.append(_tokens(one, one.prompt(index, model.tokenizer), model, size))
            except InputError as error:
                what = f"row {index} of {one.rows} {str(error).rstrip('.')}"
                bad.append(Problem(spell((*path, index)), what, shown(record[one.spec.roles[one.role].field])))
        if len(bad) > NAMED_ROWS:
            what = f"{len(bad)} of {len(one.rows.records)} rows can't be read; here are the first {NAMED_ROWS}"
            problems.append(Problem(spell(path), what))
        problems += bad[:NAMED_ROWS]
        found.append(tokens)
    if problems:
        raise DocumentError(name, problems)
    return found


def _tokens(one: Pass, prompt: Prompt, model: MuranoModel, size: int) -> list[int]:
    """The tokens of a prompt; an error says what is wrong with it or its answers, to go on after the row's name."""
    try:
        ids = batching.encode(prompt, model.tokenizer)
    except InputError as error:
        raise InputError(f"can't be read: {error}") from None
    wrong = batching.check_ids(ids, rows=size, context=model.context)
    if wrong:
        raise InputError(wrong)
    for name, read in one.reads.items():
        if not -len(ids) <= read.pos < len(ids):
            raise InputError(f"has {len(ids)} tokens, so read {name!r} finds no position {read.pos}")
    try:
        answers_of(prompt, ids, model.tokenizer, size)
    except InputError as error:
        raise InputError(f"can't be scored: {error}") from None
    return ids


def check_tokenizer(model: MuranoModel, prompts: Iterable[Prompt]) -> None:
    """Refuse a tokenizer that was given to a model and reads prompts or answers otherwise than the model's own, the only one that a
    document names.

    Args:
        model: a model with a source.
        prompts: with their answers as texts.

    Raises:
        InputError: naming a text that it reads otherwise.
    """
    given, source = vars(model).get("tokenizer"), model._source
    if given is None or source is None:  # it will be the model's own, when something needs it
        return
    what = "A document reads a model with the tokenizer that lies beside it, "
    do = "Save both into one folder and name that: model.hf_model.save_pretrained(folder), tokenizer.save_pretrained(folder)."
    try:
        own = load_tokenizer(source)
    except ModelError:
        raise InputError(f"{what}and {str(model.source)!r} has none. {do}") from None
    for prompt in prompts:
        if batching.encode(prompt, given) != batching.encode(prompt, own):
            raise InputError(f"{what}and the one that was given reads {str(prompt)[:60]!r} as other tokens. {do}")
        for answer in (*prompt.targets, *prompt.foils):
            for text in (answer, f" {answer}") if isinstance(answer, str) else ():
                if _alone(text, given) != _alone(text, own):
                    raise InputError(f"{what}and the one that was given reads {text[:60]!r} as other tokens. {do}")


def _alone(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
            for read, text in zip(getattr(prompt, slot), listed(record[field]), strict=True):
                if isinstance(text, int):  # given as a token
                    continue
                follows = _continued(prompt, text, tokenizer)
                ids = follows.ids if read == text else _alone(text, tokenizer)
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
