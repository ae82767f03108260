"""The pages as a person meets them: a real Chromium, on a phone and on a desk, by day and by night."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.reports import forms, run_page
from loadtest.results import LoadSpec, SloSpec
from tests.loadtest.browser import Browser, browser
from tests.loadtest.examples import EXAMPLES
from tests.loadtest.made_results import run_result

pytestmark = [pytest.mark.slow, pytest.mark.debian("chromium-driver")]

WIDE = "[...document.querySelectorAll('body *')].filter(e => {test}).map(e => e.outerHTML.slice(0, 80))"
BEYOND = WIDE.format(test="e.getBoundingClientRect().right > innerWidth + 1")
SCROLLS = WIDE.format(
    test="e.scrollWidth > e.clientWidth + 1 && !['visible', 'hidden'].includes(getComputedStyle(e).overflowX)"
)


def a_run() -> str:
    spec = LoadSpec(target="http://a-host-with-a-rather-long-name:8000", model="m", rate_rps=100, slo=SloSpec.parse("p99<50ms"))
    return run_page.render(run_result(spec, succeeded=3000, service_ms=20, errors={"http 503": 30}, verdict="pass"))


PAGES: dict[str, Callable[[], str]] = {
    "run": a_run,
    **{name: lambda made=made: forms.render(made(), "html") for name, made in EXAMPLES.items()},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone_and_asks_for_nothing(chromium: Browser, tmp_path: Path, name: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name]())
    chromium.requested()  # forget the page before
    for width in (400, 1280):
        chromium.open(page, width=width)
        chromium.script("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert chromium.script("document.documentElement.scrollWidth") <= width
        assert chromium.script(BEYOND) == []
        assert chromium.script(SCROLLS) == []
    assert chromium.requested() == {page.as_uri()}
    assert chromium.log("browser") == []


def test_a_page_is_dark_where_the_reader_wants_it(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES["proven"]())
    brightness = "getComputedStyle(document.querySelector('{}')).{}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    for dark in (False, True):
        chromium.open(page, width=1280, dark=dark)
        paper = chromium.script(brightness.format(".card", "backgroundColor"))
        for place, attribute in (("body", "color"), (".facts dd", "color"), ("svg text", "fill"), (".badge", "color")):
            ink = chromium.script(brightness.format(place, attribute))
            assert (ink > paper) == dark, place
            assert abs(ink - paper) > 250, place


OVERLAPS = """[...document.querySelectorAll('figure svg')].flatMap(chart => {
    const texts = [...chart.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    return texts.flatMap(([one, a], index) => texts.slice(index + 1).filter(([, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5
    ).map(([other]) => `${one} / ${other}`));
})"""


@pytest.mark.parametrize("name", ["twelve", "nobody", "run"])
def test_no_text_of_a_chart_lies_over_another(chromium: Browser, tmp_path: Path, name: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name]())
    chromium.open(page, width=1280)
    chromium.script("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert chromium.script(OVERLAPS) == []


def test_marks_are_drawn_within_their_charts(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES["twelve"]())
    chromium.open(page, width=400)
    chromium.script("document.querySelectorAll('details').forEach(details => details.open = true)")
    outside = """[...document.querySelectorAll('figure svg *')].filter(e => {
        const mark = e.getBoundingClientRect(), chart = e.closest('figure').getBoundingClientRect();
        return mark.width && (mark.left < chart.left || mark.right > chart.right || mark.bottom > chart.bottom);
    }).map(e => e.outerHTML.slice(0, 80))"""
    assert chromium.script(outside) == []
