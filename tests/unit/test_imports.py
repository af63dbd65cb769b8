"""What may import what, as docs/architecture.md says it: its table is read here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "murano"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rules() -> dict[str, set[str]]:
    """What each room never imports."""
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", section("What may import what"), re.MULTILINE)
    found = {}
    for rooms, forbidden in rows:
        for room in re.findall(r"`(\w+)`", rooms):
            others = {path.stem for path in PACKAGE.iterdir()} - {room}
            found[room] = others if forbidden == "anything else" else set(re.findall(r"`(\w+)`", forbidden))
    return found


def imported(path: Path) -> Iterator[str]:
    """The modules of Murano that a file imports anywhere, but for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_checkers = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(path: Path, room: str) -> list[str]:
    forbidden = rules().get(room, set())
    targets = (name.split(".") for name in imported(path) if name.startswith("murano."))
    return [f"{path.name} imports {'.'.join(parts)}" for parts in targets if parts[1] in forbidden]


def test_no_room_imports_what_it_may_not() -> None:
    assert len(rules()) >= 15
    found = []
    for path in PACKAGE.rglob("*.py"):
        found += breaches(path, path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    assert found == []


def test_a_breach_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from murano.steps import Plot\n    import murano.model.tail\n")
    assert breaches(file, "artifacts") == ["bad.py imports murano.steps.Plot", "bad.py imports murano.model.tail"]


def test_only_the_base_of_steps_is_known_to_the_pipeline() -> None:
    for name in ("pipeline", "resume"):
        steps = {t for t in imported(PACKAGE / f"{name}.py") if t.startswith("murano.steps")}
        assert all(t.startswith("murano.steps.base.") for t in steps), steps


def test_every_room_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)(?:\.py|/)`", section("Rooms")))
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    missing = rooms - named - {"__init__", "__pycache__"}
    assert missing == set(), f"docs/architecture.md, Rooms: say what is in {sorted(missing)}"
