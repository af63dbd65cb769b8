"""Prompts: whatever a user holds becomes the same thing, and what is no prompt is named by its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murano.errors import InputError
from murano.prompt_files import read_prompt_file
from murano.prompts import Prompt, PromptBatch, as_prompts
from murano.steps import LoadPrompts

CHAT = [{"role": "user", "content": "The city"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("The city", [Prompt(text="The city")]),
        (["The city", " Paris\n"], [Prompt(text="The city"), Prompt(text=" Paris\n")]),
        (("a", "b"), [Prompt(text="a"), Prompt(text="b")]),
        ((text for text in ["a", "b"]), [Prompt(text="a"), Prompt(text="b")]),
        ({"a": 1, "b": 2}.keys(), [Prompt(text="a"), Prompt(text="b")]),
        (Prompt(text="a"), [Prompt(text="a")]),
        ([[1, 2], (3,)], [Prompt(token_ids=(1, 2)), Prompt(token_ids=(3,))]),
        ([torch.tensor([1, 2])], [Prompt(token_ids=(1, 2))]),
        (torch.tensor([[1, 2], [3, 4]]), [Prompt(token_ids=(1, 2)), Prompt(token_ids=(3, 4))]),
        (np.array([[1, 2]]), [Prompt(token_ids=(1, 2))]),
        ([CHAT], [Prompt(messages=tuple(CHAT))]),
        (["a", CHAT, [5]], [Prompt(text="a"), Prompt(messages=tuple(CHAT)), Prompt(token_ids=(5,))]),
    ],
)
def test_what_is_taken(source: Any, expected: list[Prompt]) -> None:
    assert list(as_prompts(source)) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "There are no prompts. Give at least one"),
        ((), "There are no prompts"),
        ([""], "Prompt 0 is empty: ''"),
        ("", "Prompt 0 is empty"),
        (["a", "  \n"], r"Prompt 1 holds only whitespace: '  \\n'"),
        ([Prompt(text=" ")], "Prompt 0 holds only whitespace"),
        (["a", []], "Prompt 1 is empty"),
        ([Prompt()], "Prompt 0 is empty"),
        ([Prompt(text=[[1, 2]])], r"^Prompt 0 has text=\[\[1, 2\]\], which is no string. Token ids go into token_ids"),  # type: ignore[arg-type]
        (["a", None], "Prompt 1 is a NoneType: None"),
        ([3], r"Prompt 0 is a single number, 3. The token ids of one prompt need two brackets: \[\[3, …\]\]"),
        (torch.tensor([3, 4]), "Prompt 0 is a single number, 3."),
        (b"bytes", r"A prompt is a string, not bytes: b'bytes'. Decode it first: prompt.decode\(\)."),
        ([[1, "a"]], "Prompt 0 is a list"),
        ([[True, False]], "Prompt 0 is a list"),
        ([[1.5]], "Prompt 0 is a list"),
        ([b"bytes"], "Prompt 0 is a bytes"),
        (None, "Prompts must be a list of strings, not NoneType"),
        (7, "Prompts must be a list of strings, not int"),
    ],
)
def test_what_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_prompts(source)
    with pytest.raises(InputError, match=message):
        LoadPrompts(source)


def test_a_dict_is_no_list_of_prompts() -> None:
    with pytest.raises(InputError, match=r"not a dict: give list\(prompts.values\(\)\)."):
        LoadPrompts({"a": "The city"})
    with pytest.raises(InputError, match=r"not a dict: give \[messages\]."):
        LoadPrompts(CHAT[0])
    assert LoadPrompts({"a": "The city"}.values())()["prompts"].texts == ["The city"]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", "prompts.csv", "prompts.tsv", "prompts.json"])
def test_the_name_of_a_file_is_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert LoadPrompts(name)()["prompts"].texts == [name]  # there is no such file
    (tmp_path / name).write_text("The city\n")
    for source in (name, Path(name)):
        with pytest.raises(InputError, match=rf"Did you mean LoadPrompts.from_file\('{name}'\)\?"):
            LoadPrompts(source)
    assert as_prompts([name, "The city"]).texts == [name, "The city"]  # who writes a list means it


def test_chat() -> None:
    assert list(as_prompts("The city", chat=True)) == [Prompt(messages=tuple(CHAT))]
    assert list(as_prompts(CHAT, chat=True)) == [Prompt(messages=tuple(CHAT))]
    assert list(as_prompts([CHAT, "x"], chat=True))[1].messages == ({"role": "user", "content": "x"},)
    assert as_prompts([CHAT]).texts == ["The city"]


def test_a_batch_is_a_sequence() -> None:
    batch = as_prompts(["a", "b", "c", "d"])
    assert (len(batch), batch[0].text, batch[-1].text) == (4, "a", "d")
    assert batch[1:3] == as_prompts(["b", "c"])
    assert isinstance(batch[1:3], PromptBatch)
    assert as_prompts(batch) is batch
    assert batch != as_prompts(["a"])
    assert repr(batch) == "PromptBatch(['a', 'b', 'c', …], n=4)"
    assert as_prompts(Prompt(token_ids=(1, 2))).texts == ["[1, 2]"]


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("The city\n\n  Paris é \n", encoding="utf-8")
    assert read_prompt_file(path).texts == ["The city", "  Paris é "]
    assert LoadPrompts.from_file(path)()["prompts"].texts == ["The city", "  Paris é "]
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(InputError, match="There are no prompts in .*one prompt to a line"):
        read_prompt_file(path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(InputError, match="is not a text file: prompts are read from"):
        read_prompt_file(path)
    with pytest.raises(InputError, match="Can't read prompts from '[^']*missing.txt': No such file or directory.$"):
        read_prompt_file(tmp_path / "missing.txt")
    with pytest.raises(InputError, match="Can't read prompts from"):
        read_prompt_file(tmp_path)


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(InputError, match="Prompt 1 is not UTF-8 text"):
        as_prompts(["a", "\ud800"])


def test_one_answer_of_a_prompt_needs_no_list() -> None:
    """A string taken apart would be its letters."""
    assert Prompt(text="a", targets="Paris", foils=7) == Prompt(text="a", targets=("Paris",), foils=(7,))
    assert Prompt(text="a", targets=["b", 3], foils=None).targets == ("b", 3)
    for wrong in ((75,), [["b"]], 1.5, "", True):
        with pytest.raises(
            InputError, match="Prompt targets is .*it must be a string that continues the prompt, a token id"
        ):
            Prompt(text="a", targets=[wrong])
