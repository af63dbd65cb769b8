"""A browser without a window, for the tests of what a browser shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

#: What may drive the tests; the Makefile looks for the same.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WANTED = (
    "There is no Chromium to test the page with. Install it (Debian: sudo apt install chromium), "
    "or leave these tests out: MURANO_NO_BROWSER=1"
)


def find_browser() -> str | None:
    """The first browser on the path."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Chromium; a machine without it fails, unless it was told that it has none: tests left out in silence test nothing."""
    if os.environ.get("MURANO_NO_BROWSER") == "1":
        pytest.skip("MURANO_NO_BROWSER=1")
    path = find_browser()
    if path is None:
        pytest.fail(WANTED, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
