"""The site of `make docs`: strictly built, on a phone and on a desk, and asking nobody for anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loadtest.browser import browser
from tests.served.documents import ROOT

pytest.importorskip("mkdocs", reason="needs the extra `docs`")

pytestmark = pytest.mark.slow

PAGES = ("index", "recipes", "batching", "troubleshooting", "api", "configs/gateway.yaml")

BEYOND = """[...document.querySelectorAll('article *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
 && !e.closest('.md-typeset__scrollwrap, pre')).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_built_and_every_link_leads_somewhere(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= {path.relative_to(site) for path in site.rglob("*.html")}
    assert "Serves your models" in (site / "index.html").read_text()  # which is README


@pytest.mark.debian("chromium-driver")
def test_a_page_fits_a_phone_and_a_desk_and_asks_nobody(site: Path) -> None:
    with browser() as chromium:
        chromium.requested()
        for page in PAGES:
            for width in (400, 1280):
                chromium.open(site / f"{page}.html", width=width)
                assert chromium.script("document.documentElement.scrollWidth") <= width, page
                assert chromium.script(BEYOND) == [], page
        assert not {url for url in chromium.requested() if not url.startswith(("file:", "data:"))}
