"""Headless Chromium, and the accessibility rules that a page in it breaks."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import axe_playwright_python
from playwright.sync_api import Browser, Page, sync_playwright

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PHONE, TABLET, DESK = (390, 844), (1024, 768), (1400, 900)


@contextmanager
def chromium() -> Iterator[Browser]:
    program = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    assert program, f"these tests need one of {', '.join(CHROMIUM)}: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program)
        yield opened
        opened.close()


def violations(page: Page) -> list[tuple[str, list[str]]]:
    page.evaluate(AXE)
    rules = page.evaluate("axe.run(document)")["violations"]
    return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in rules]
