"""The page of tokens kept in headless Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from gac_extensions.tests.tokens.test_token_plan import curves, plan_of
from gac_extensions.tokens.page import tokens_page
from tests.reporting.browsers import DESK, PHONE, chromium, violations


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_accessibility_rules_hold(browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str) -> None:
    path = tmp_path / "tokens.html"
    path.write_text(tokens_page(plan_of(curves(8), 8 * 24), "ours"), encoding="utf-8")
    viewport: Any = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=True, has_touch=size == PHONE)
    page = context.new_page()
    page.goto(path.as_uri())
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    context.close()
