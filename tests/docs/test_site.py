"""The site builds without a warning, and no link inside it is dead."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(out / "trees"),
        "docs",
        str(out / "html"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


@cache
def attributes(page: Path, name: str) -> frozenset[str]:
    text = page.read_text(encoding="utf-8")
    return frozenset(unescape(value) for value in re.findall(rf'\b{name}="([^"]*)"', text))


@pytest.mark.slow
def test_no_link_inside_the_site_is_dead(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name not in ("genindex.html", "search.html")]
    assert len(pages) > 20
    dead = []
    for page in pages:
        for link in attributes(page, "href") | attributes(page, "src"):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("#__"):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            found = target.exists() and (
                not parts.fragment or target.suffix != ".html" or unquote(parts.fragment) in attributes(target, "id")
            )
            if not found:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.slow
def test_every_public_name_has_an_entry(site: Path) -> None:
    import murano
    import murano.plotting
    import murano.steps

    entries = {identity for page in (site / "reference").glob("*.html") for identity in attributes(page, "id")}
    names = {identity.rpartition(".")[2] for identity in entries}
    modules = {"errors", "keys", "metrics"}
    for package in (murano, murano.steps, murano.plotting):
        assert set(package.__all__) - modules <= names, package.__name__


@pytest.mark.slow
def test_pictures_of_notebooks_and_shapes_are_in_the_site(site: Path) -> None:
    notebooks = list((ROOT / "notebooks").rglob("*.ipynb"))
    for notebook in notebooks:
        page = (site / "notebooks" / notebook.relative_to(ROOT / "notebooks")).with_suffix(".html")
        if '"image/png"' in notebook.read_text(encoding="utf-8"):
            assert "<img" in page.read_text(encoding="utf-8"), page
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "murano.html").read_text(encoding="utf-8"))
    assert "top_probs: Float[Tensor, 'layer prompt position k']" in unescape(text)
    assert "jaxtyping." not in text
