"""Targets and foils: how they are given, and which tokens they become."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from murano import InputError, MuranoModel, Prompt, shipped_prompts
from murano.answers import answer_notes
from murano.model.targets import answers_of
from murano.prompt_files import read_prompt_file
from murano.steps import LoadPrompts


@functools.lru_cache(1)
def bundled_tokenizer() -> Any:
    return MuranoModel().tokenizer


def answers(prompt: Prompt, tokenizer: Any, mode: str = "first") -> dict[str, list[Any]]:
    ids = prompt.token_ids or tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    return answers_of(prompt, ids, tokenizer, len(tokenizer), mode)


# How they are given


def test_forms() -> None:
    step = LoadPrompts(["a", "b", "c"], targets=["x", ["y", 5], None], foils=[7, "z", None])
    assert [p.targets for p in step.prompts] == [("x",), ("y", 5), ()]
    assert [p.foils for p in step.prompts] == [(7,), ("z",), ()]
    assert repr(step) == "LoadPrompts(['a', 'b', 'c'], targets=['x', ['y', 5], None], foils=[7, 'z', None])"
    assert LoadPrompts("a", targets="x").prompts[0].targets == ("x",)
    kept = LoadPrompts([Prompt(text="a", targets=("x",))])
    assert kept.prompts[0].targets == ("x",)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["x"], "There are 2 prompts and 1 targets: prompt 1 has none"),
        (["x", "y", "z"], r"There are 2 prompts and 3 targets: targets\[2\] has no prompt"),
        ("x", "must be a list with one entry for each of the 2 prompts"),
        (["x", 1.5], r"targets\[1\] is 1.5: it must be a string"),
        (["x", ""], r"targets\[1\] is ''"),
        (["x", "\ud800"], r"targets\[1\] is not UTF-8 text"),
        (["x", ["y", True]], r"targets\[1\] is \['y', True\]"),
    ],
)
def test_what_is_refused(targets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadPrompts(["a", "b"], targets=targets)


# Which tokens they become


@pytest.mark.parametrize(
    ("text", "target", "continued"),
    [
        ("The capital of France is", "Paris", " Paris"),
        ("The capital of France is", " Paris", " Paris"),
        ("one, two,", "three", " three"),
        ("7 + 5 =", "12", " 12"),
        ("He said", ",", ","),
        ("print(", "x", "x"),
        ('the opposite of "hot" is "', "cold", "cold"),
        ('He said "no"', "and", " and"),
        ("a line\n", "next", "next"),
        ("法国的首都是", "巴黎", "巴黎"),
        ("well-", "known", "known"),
        ("2+2=", "4", "4"),
        ("pi is 3.", "14", "14"),
        ("He said 3.", "Then", " Then"),
        ("I don’", "t", "t"),
        ("this—", "that", "that"),
        ("a = b **", "c", " c"),
    ],
)
def test_the_space_in_front(text: str, target: str, continued: str) -> None:
    tokenizer = bundled_tokenizer()
    found = answers(Prompt(text=text, targets=(target,)), tokenizer)["targets"][0]
    assert found.text == continued
    assert tokenizer.decode(list(found.ids)) == continued
    together = tokenizer(text + continued, add_special_tokens=False)["input_ids"]
    assert tuple(together[-len(found.ids) :]) == found.ids


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_other_tokenizers(sentencepiece: bool) -> None:
    tokenizer = tiny_tokenizer(sentencepiece=sentencepiece)
    found = answers(Prompt(text="The city", targets=("of",)), tokenizer)["targets"][0]
    together = tokenizer("The city of", add_special_tokens=False)["input_ids"]
    alone = tokenizer("The city", add_special_tokens=False)["input_ids"]
    assert list(found.ids) == together[len(alone) :]
    assert found.text == " of"


def test_chats_and_token_ids() -> None:
    tokenizer = bundled_tokenizer()
    ids = tuple(tokenizer("The capital of France is")["input_ids"])
    assert answers(Prompt(token_ids=ids, targets=("Paris", 7042)), tokenizer)["targets"][0].ids == (7042,)
    chat = Prompt(messages=({"role": "user", "content": "The capital of France?"},), targets=("Paris",))
    found = answers_of(chat, ids, tokenizer, len(tokenizer))["targets"][0]
    assert found.text == "Paris"  # the template ends with a line break
    assert tokenizer.decode(list(found.ids)) == "Paris"


def test_several_tokens() -> None:
    prompt = Prompt(text="The capital of Burkina Faso is", targets=("Ouagadougou",))
    tokenizer = bundled_tokenizer()
    found = answers(prompt, tokenizer)["targets"][0]
    assert len(found.ids) > 1
    assert "".join(found.pieces) == " Ouagadougou"
    with pytest.raises(
        InputError, match=r"target 'Ouagadougou' is \d+ tokens here, ' Ouagadougou' \(.* \+ .*\), where one is required"
    ):
        answers(prompt, tokenizer, "single")


def test_answers_that_are_read_alike_count_once() -> None:
    tokenizer = bundled_tokenizer()
    prompt = Prompt(
        text="The largest city in the USA is", targets=("New York City", "New York", "New York, NY", "Boston")
    )
    first = answers(prompt, tokenizer)["targets"]
    assert [a.read_as("first") for a in first] == [" New…", " Boston"]
    whole = answers(prompt, tokenizer, "sequence")["targets"]
    assert [a.text for a in whole] == [
        " New York",
        " Boston",
    ]  # the others begin with it: whoever writes them has written it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("Paris",), "foils": ("Paris",)}, "foil ' Paris' is the target itself"),
        ({"targets": ("Paris",), "foils": (" Paris",)}, "foil ' Paris' is the target itself"),
        ({"targets": ("Ouagadougou",), "foils": ("Ouaga",)}, "begins with the target's first token"),
        ({"targets": (10**9,)}, "token id 1000000000 is outside the vocabulary"),
        ({"targets": (-1,)}, "token id -1 is outside the vocabulary"),
    ],
)
def test_answers_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        answers(Prompt(text="The capital of France is", **options), bundled_tokenizer())


def test_an_answer_that_becomes_nothing() -> None:
    class Silent:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] if "a" in text or "\n" in text else []}

    with pytest.raises(InputError, match="target '~' becomes no token at all"):
        answers_of(Prompt(text="a", targets=("~",)), [1], Silent(), 10)


# Files


RECORDS = [
    {"prompt": "The capital of France is", "target": "Paris", "foil": "Rome", "kind": "city"},
    {"prompt": "2 + 2 =", "target": ["4", "four"], "kind": "sum", "n": 3},
]


def test_files_with_fields(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n", encoding="utf-8")
    whole = tmp_path / "p.json"
    whole.write_text(json.dumps(RECORDS), encoding="utf-8")
    for path in (lines, whole):
        first, second = LoadPrompts.from_file(path).prompts
        assert (first.text, first.targets, first.foils, first.metadata) == (
            *("The capital of France is", ("Paris",), ("Rome",)),
            {"kind": "city"},
        )
        assert (second.targets, second.foils, second.metadata) == (("4", "four"), (), {"kind": "sum", "n": 3})
    table = tmp_path / "p.csv"
    table.write_text('question,answer,kind\n"One, two,",three,count\nHe is,here,\n', encoding="utf-8-sig")
    prompts = read_prompt_file(table, fields={"prompt": "question", "target": "answer"})
    other = tmp_path / "semicolons.csv"
    other.write_text("prompt; target;foil\nHe is;here;\n", encoding="utf-8")
    (one,) = read_prompt_file(other)
    assert (one.text, one.targets, one.foils, one.metadata) == ("He is", ("here",), (), {})
    assert [(p.text, p.targets, p.metadata["kind"]) for p in prompts] == [
        ("One, two,", ("three",), "count"),
        ("He is", ("here",), ""),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"promt": "b", "kind": 1}',
            r"p.jsonl, line 2: there is no field 'prompt'.*Fields found: 'promt', 'kind'. Did you mean 'promt'",
        ),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }', "p.jsonl, line 2, column 12: no JSON"),
        ("p.json", '[{"prompt": "a"},\n{"text" "b"}]', "p.json, line 2, column 9: no JSON"),
        ("p.json", '{"prompt": "a"}', "must hold a list of records, not dict"),
        ("p.json", "[]", "There are no prompts in"),
        ("p.csv", "prompt,target\na,b,c\n", "p.csv, line 2: more values than there are columns"),
        ("p.csv", "q,a\nx,y\n", "p.csv, line 2: there is no field 'prompt'.*Fields found: 'q', 'a'"),
        ("p.csv", "prompt,prompt\na,b\n", "p.csv, line 1: there are two columns 'prompt'"),
        (
            "p.csv",
            "prompt,target\nx,y\n,z\n",
            r"p.csv, line 3: the field 'prompt' is empty. Fill it in, or take the record out.$",
        ),
        ("p.tsv", "prompt, target\nx\ty\n", "p.tsv, line 2: more values than there are columns"),
        ("p.csv", "prompt,target\n", "There are no prompts .* under a line with the names of the fields"),
        ("p.jsonl", '{"prompt": "a", "target": 1.5}', "p.jsonl, line 1: target"),
        ("p.jsonl", "[1.5]", "p.jsonl, line 1: a record is an object"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_prompt_file(tmp_path / name)


def test_the_facts() -> None:
    facts = shipped_prompts("facts")
    assert len(facts) >= 200
    assert len(set(facts.texts)) == len(facts)
    assert {p.metadata["category"] for p in facts} >= {"capitals", "opposites", "weekdays", "arithmetic", "grammar"}
    tokenizer = bundled_tokenizer()
    for prompt in facts:
        found = answers(prompt, tokenizer, "single")  # each answer is one token
        assert found["targets"]
        assert found["foils"]
    with pytest.raises(InputError, match="There is no data set 'fact'. Did you mean 'facts'"):
        LoadPrompts.from_dataset("fact")


def test_tabs_and_long_fields(tmp_path: Path) -> None:
    table = tmp_path / "p.tsv"
    table.write_text("prompt\ttarget\tnote\nOne, two,\tthree\t" + "x" * 200_000 + "\n")
    (one,) = read_prompt_file(table)
    assert (one.text, one.targets, len(one.metadata["note"])) == ("One, two,", ("three",), 200_000)
    assert csv.field_size_limit() == 131072


@pytest.mark.parametrize("name", ["p.xlsx", "p.parquet", "p.yaml", "p.md", "prompts"])
def test_other_types_of_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("prompt\nx\n")
    with pytest.raises(InputError) as caught:
        read_prompt_file(tmp_path / name)
    assert str(caught.value) == (
        f"Prompts are not read from {str(tmp_path / name)!r}, but from .txt, .jsonl, .json, .csv and .tsv: .txt has one prompt to a "
        "line, the others have a record for each, with a field 'prompt'."
    )


@pytest.mark.parametrize(("encoding", "where"), [("latin-1", " (line 2, byte 0xe9)"), ("utf-16", "")])
def test_another_encoding_is_named(tmp_path: Path, encoding: str, where: str) -> None:
    table = tmp_path / "p.csv"
    table.write_bytes("prompt\nUn café à Rome\n".encode(encoding))
    name = encoding.upper().replace("-1", "1") if encoding == "latin-1" else "UTF-16"
    with pytest.raises(InputError) as caught:
        read_prompt_file(table)
    assert str(caught.value) == (
        f"{str(table)!r} is not UTF-8{where}. If it is {name}: iconv -f {name} -t UTF-8 {table} > {table.with_name('p-utf8.csv')}"
    )


def test_the_id_of_a_special_token_is_told() -> None:
    tokenizer = tiny_tokenizer()
    special, word = tokenizer.eos_token_id, 40
    found = [answers(Prompt(text="2+2=", targets=(i,)), tokenizer) for i in (special, word, special)]
    assert answer_notes(found, "sequence") == [
        f"The target {special} at prompt 0 is a token id, and means the special token '</s>', as 1 more do: if the text is meant, "
        f"write it in quotes, '{special}'."
    ]
    assert answer_notes(found[1:2], "first") == []
