"""One Chromium for the tests of a file, and the results that pages are made from."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "pure"))
from browser import Browser, where


@pytest.fixture(scope="module")
def browser():
    program = where()
    if program is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("no browser: `make browser` installs Chromium, or NARROWCAST_BROWSER names another")
    made = Browser(program)
    yield made
    made.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a result's page; what went wrong on it by the end of the test fails the test."""

    def open_page(result, **window):
        file = tmp_path / "page.html"
        file.write_text(result if isinstance(result, str) else result.to_html(), encoding="utf-8")
        browser.open(file, **window)
        return browser

    yield open_page
    assert browser.errors == []
