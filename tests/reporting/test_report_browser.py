"""The page in headless Chromium: no error, no request, usable by keyboard and touch, on a phone and in the dark."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from gac.allocation.frontier import Frontier
from gac.plan.plan import Plan
from gac_extensions.report.measured import MeasuredText
from gac_extensions.report.render import report_page
from gac_extensions.report.sources import Sources
from tests.reporting.browsers import DESK, PHONE, TABLET, chromium, violations
from tests.reporting.report_plans import by_rule, decided, renamed, whole_range

EVERY_SHADE = """() => [0, 1, 2, 3, 4, 5, 6, 7].forEach((shade) => {
  const cell = document.querySelector("#heat td").cloneNode(true);
  cell.firstChild.className = `s${shade}`;
  document.querySelector("#heat tbody tr").append(cell);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """``opened(sources, size, scheme)``: the page in a window; afterwards nothing was said and nothing asked for."""
    heard: list[str] = []
    contexts = []

    def _open(sources: Sources, size: tuple[int, int] = DESK, scheme: str = "light") -> Page:
        path = tmp_path / "report.html"
        path.write_text(report_page(sources), encoding="utf-8")
        assert path.stat().st_size < 2_000_000
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, has_touch=size == PHONE)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: heard.append(dialog.message))
        page.on("request", lambda request: heard.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    yield _open
    for context in contexts:
        context.close()
    assert heard == []


@pytest.fixture
def sources() -> Sources:
    return Sources(decided(), "ours", {"theirs": by_rule()}, whole_range())


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light"), (DESK, "dark")])
def test_accessibility_rules_hold(
    opened: Callable[..., Page], sources: Sources, size: tuple[int, int], scheme: str
) -> None:
    page = opened(sources, size, scheme)
    page.locator("#heat button").first.focus()
    page.evaluate(EVERY_SHADE)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]


WIDER = """() => [...document.querySelectorAll("html, .scroll, pre, figure")]
  .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.ariaLabel || box.tagName)"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg text:not(.mark text)")]
  .map((text) => text.getBoundingClientRect()).map((box) => Math.min(box.width, box.height)))"""


@pytest.mark.parametrize("size", [PHONE, TABLET, DESK])
def test_nothing_scrolls_sideways_and_axes_can_be_read(opened: Callable[..., Page], size: tuple[int, int]) -> None:
    plans = Path("notebooks/plans")
    others = {name: Plan.load(plans / f"{name}.json") for name in ("svd-llm", "palu")}
    plan, points = Plan.load(plans / "gac.json"), Frontier.load(plans / "frontier.json")
    page = opened(Sources(plan, "gac", others, points, measured=(MeasuredText("wiki", 10.0, 12.0),)), size)
    assert page.evaluate(WIDER) == []
    assert violations(page) == []
    assert page.evaluate(SMALLEST) >= 11  # pixels, of letters and of numbers on the axes


def test_the_tab_key_goes_through_the_page_in_order(opened: Callable[..., Page], sources: Sources) -> None:
    page = opened(sources)
    stops = []
    for _ in range(11):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()"))
    sections = ["Map", "Stayed dense", "Frontier", "Sites", "Proof", "Origin", "Reproduce"]
    assert stops[:8] == ["Skip to the plan", *sections]
    assert stops[8] == "layer 0, site0: low_rank\N{NO-BREAK SPACE}4, 67% kept"
    assert stops[9:11] == ["The chosen cell", "Plans"]


def test_arrow_keys_hover_and_tap_show_a_cell(opened: Callable[..., Page], sources: Sources) -> None:
    page = opened(Sources(renamed(decided(), "q_proj")))
    heading = page.locator("#told h3")
    page.locator("#heat button").first.focus()
    assert heading.inner_text().startswith("layer 0, q_proj: ")
    for _ in range(2):  # the last cell stays the last one
        page.keyboard.press("ArrowDown")
        assert heading.inner_text().startswith("layer 1, q_proj: ")
    assert page.locator('#heat button[tabindex="0"]').count() == 1
    desk = opened(sources)
    desk.locator("#heat button").nth(1).hover()
    assert desk.locator("#told h3").inner_text().startswith("layer 1, site1: ")
    phone = opened(sources, PHONE)
    phone.locator("#heat button").nth(1).tap()
    assert "Why not smaller" in phone.locator("#told").inner_text()


def test_the_table_sorts_filters_and_prints_every_row(opened: Callable[..., Page], sources: Sources) -> None:
    page = opened(sources)
    column = 1 + page.locator("#all thead th").all_inner_texts().index("Loss")
    losses = page.locator(f"#all tbody td:nth-child({column})")
    heading = page.get_by_role("button", name="Loss", exact=True)
    heading.click()
    assert losses.all_inner_texts() == ["0.750", "1"]
    heading.click()
    assert losses.all_inner_texts() == ["1", "0.750"]
    assert page.locator("#all th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.get_by_label("Find").fill("low_rank 0.750")
    assert page.locator("#shown").inner_text() == "1 of 2 sites"
    assert page.locator("#all tbody tr:visible").count() == 1
    page.get_by_label("Find").fill("")
    assert page.locator("#shown").inner_text() == "2 sites"
    page.emulate_media(media="print")
    assert not page.locator("#told").is_visible()
    assert page.locator(".tall").evaluate("box => getComputedStyle(box).maxHeight") == "none"


def test_markup_in_names_does_nothing(opened: Callable[..., Page]) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b onmouseover=alert(3)>&amp;\"'"
    plan = renamed(decided(), hostile)
    page = opened(Sources(plan, hostile, {hostile: plan}))
    page.locator("#heat button").first.focus()
    assert page.locator("h1").inner_text() == hostile
    assert page.locator("img, b").count() == 0
    assert hostile in page.locator("#told").inner_text()
