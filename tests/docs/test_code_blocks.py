"""Every code block of README and the pages runs: Python in one namespace per page, commands through the command line itself.

Everything runs in an empty folder, page by page, and ``MuranoModel(…)`` gives the same object for the same arguments wherever it
is called, so that the bundled model is loaded once. A ``text`` block right below shows lines that the code prints.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages import PAGES, ROOT, Block, blocks, given, label
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer

import murano
from murano import Pipeline, PipelineError
from murano.cli import main, parser
from murano.cli.command import join_negative
from murano.steps.base import step_name


def tiny_folder() -> str:
    """A folder with a tiny model, as a user may have one."""
    tiny_model("llama").save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    return "tiny"


#: What a page may start with: ``<!-- given: folder -->``.
GIVEN: dict[str, Callable[[], Any]] = {"folder": tiny_folder, "model": lambda: murano.MuranoModel()}


@pytest.fixture(scope="module", autouse=True)
def one_model() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(murano, "MuranoModel", functools.cache(murano.MuranoModel))
        yield


@pytest.mark.bundled
@pytest.mark.parametrize("page", PAGES, ids=label)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[Pipeline] = []
    run = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", lambda self, *args, **kwargs: ran.append(self) or run(self, *args, **kwargs))
    namespace: dict[str, Any] = {"__name__": "__main__", **{name: GIVEN[name]() for name in given(page)}}
    for block in blocks(page):
        if block.language == "python":
            # The lines before make the numbers in a traceback those of the page.
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            if not block.not_run:
                exec(code, namespace)
                out = [line.strip() for line in capsys.readouterr().out.splitlines()]
                for shown in map(str.strip, block.printed.splitlines()):
                    assert shown in ("…", *out), f"{label(page)}, line {block.line}: {shown!r} is not printed"
        elif block.language == "sh":
            for command in commands(block):
                check(command, run=not block.not_run)
    for pipeline in ran:
        check_left_out(pipeline)


def check_left_out(pipeline: Pipeline) -> None:
    """A chain from which one step is left out that a later one needs is refused, and the error names it."""
    steps = list(pipeline)
    for index, left_out in enumerate(steps):
        needed = {str(key) for step in steps[index + 1 :] for key in step.reads} & set(map(str, left_out.writes))
        if needed:
            with pytest.raises(PipelineError, match=step_name(left_out)):
                Pipeline(steps[:index] + steps[index + 1 :]).validate()


def commands(block: Block) -> list[list[str]]:
    """The words of each ``murano`` and ``make`` command; comments, and what goes into a file, left out."""
    lines = block.code.replace("\\\n", " ").splitlines()
    found = [shlex.split(re.sub(r" > \S+", "", line), comments=True) for line in lines]
    return [words for words in found if words and words[0] in ("murano", "make")]


def check(words: list[str], run: bool) -> None:
    """A target of make has to exist, a command has to parse; it runs unless it names a model that is not here."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
        return
    if "--help" in words or words[1] == "COMMAND":
        return
    args = parser().parse_args(join_negative(words[1:]))
    if run and getattr(args, "model", None) in (None, "bundled"):
        assert main(words[1:]) == 0, words


def test_what_cannot_run_says_why() -> None:
    skipped = {label(page): [b.not_run for b in blocks(page) if b.not_run] for page in PAGES}
    assert all(len(reason) > 3 for reasons in skipped.values() for reason in reasons)
    # Most of what is shown does run: a page of nothing but exceptions is no tested page.
    for page in PAGES:
        python = [b for b in blocks(page) if b.language == "python"]
        if len(python) > 1 and "not installed" not in python[0].not_run:
            assert any(not b.not_run for b in python), label(page)


def test_blocks_are_found_with_their_line_and_their_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n<!-- not run: needs a GPU -->\n```sh\nmurano doctor\n```\n"
    )
    first, shown, second = blocks(page)
    assert (first.language, first.code, first.line, first.not_run) == ("python", "print(1)\n", 4, "")
    assert first.printed == shown.code == "1\n"
    assert (second.language, second.not_run) == ("sh", "needs a GPU")
    assert commands(second) == [["murano", "doctor"]]
    page.write_text("<!-- needs: no_such_package -->\n```python\nx\n```\n<!-- needs: json -->\n")
    assert blocks(page)[0].not_run == "no_such_package is not installed"


def test_messages_that_the_symptoms_quote_are_in_the_code() -> None:
    page = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.+?)` \|", page.split("## What errors say")[1], re.MULTILINE)
    assert len(quoted) > 5
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "murano").rglob("*.py"))
    assert [message for message in quoted if message not in source] == []
