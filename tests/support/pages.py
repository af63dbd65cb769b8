"""The code blocks of a page, and what the page says about them in comments that no reader sees.

``<!-- not run: reason -->`` before a block: it is compiled only. ``<!-- given: folder -->`` anywhere on a page: its code starts
with that name, see ``GIVEN`` in ``test_code_blocks``. ``<!-- needs: vllm -->`` anywhere: where that package is not installed, the page's
code is compiled only.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]) + sorted(
    (ROOT / "docs" / "guides").glob("*.md")
)

_BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (\S[^>]*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: as the fence names it.
        code: what is in it.
        line: where that begins.
        not_run: why it can't run, if it can't.
        printed: the ``text`` block right below, which shows what it prints.
    """

    language: str
    code: str
    line: int
    not_run: str = ""
    printed: str = ""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that have a language."""
    text = page.read_text(encoding="utf-8")
    absent = [name for name in re.findall(r"<!-- needs: (\w+) -->", text) if importlib.util.find_spec(name) is None]
    missing = f"{absent[0]} is not installed" if absent else ""
    matches = list(_BLOCK.finditer(text))
    found = []
    for match, below in itertools.zip_longest(matches, matches[1:]):
        reason = _NOT_RUN.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 2
        close = below is not None and below[2] == "text" and not text[match.end() : below.start()].strip()
        found.append(
            Block(match[2], match[3], line, reason[1] if reason else missing, below[3] if below and close else "")
        )
    return found


def given(page: Path) -> list[str]:
    """The names that the code of a page starts with."""
    return re.findall(r"<!-- given: (\w+) -->", page.read_text(encoding="utf-8"))


def label(page: Path) -> str:
    """A page as tests name it."""
    return page.relative_to(ROOT).as_posix()
