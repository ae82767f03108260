"""The status page as a person meets it: a real Chromium before a real gateway, with traffic, without, and when it is gone."""

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.commands.rates import between
from gateway.edges.status_page import page
from gateway.protocols.smallest import smallest_generate, smallest_request
from tests.loadtest.browser import Browser, browser
from tests.loadtest.test_pages_in_a_browser import BEYOND, SCROLLS
from tests.rest_routes.serving import Served, serving
from tests.status.watching import HOSTILE, HOSTILE_BACKEND, MODELS, ask, body, eject, status

pytestmark = [pytest.mark.slow, pytest.mark.debian("chromium-driver")]

WITHIN_S = 20.0
CARD = "document.querySelectorAll('details.model')[{}]"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("page"), MODELS) as running:
        yield running


@pytest.fixture
def shown(chromium: Browser, served: Served) -> Browser:
    """The page of figures, with a first status in it."""
    open_page(chromium, served)
    return chromium


def open_page(chromium: Browser, served: Served, fragment: str = "", *, width: int = 1280, dark: bool = False) -> None:
    chromium.open("about:blank", width=width, dark=dark)  # or another fragment of the same page were no new one
    chromium.open(f"http://{served.url}/{fragment}", width=width, dark=dark)
    until(chromium, "document.getElementById('state').innerText", lambda text: text == "Serving")


def until(chromium: Browser, script: str, fits: Callable[[Any], bool], *, doing: Callable[[], object] = lambda: None) -> Any:
    """What a script gives, once it fits. doing: what goes on meanwhile."""
    end_s = time.monotonic() + WITHIN_S
    while not fits(found := chromium.script(script)):
        assert time.monotonic() < end_s, f"{script}: {found!r}"
        doing()
        time.sleep(0.05)
    return found


def facts(chromium: Browser) -> dict[str, str]:
    found: dict[str, str] = chromium.script(
        "Object.fromEntries([...document.querySelectorAll('#totals div')]"
        ".map(e => [e.firstChild.innerText, e.lastChild.innerText]))"
    )
    return found


def rows(card: int, table: int) -> str:
    """A script for the rows of a table of a model's card, as lists of cells."""
    return (
        f"[...{CARD.format(card)}.querySelectorAll('table')[{table}].querySelectorAll('tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.innerText.trim()))"
    )


def test_the_page_shows_what_was_counted(shown: Browser, served: Served) -> None:
    before = status(served)["models"][0]["requests"].get("ok", 0)
    sent = [0]

    def one() -> None:
        assert ask(served, body()) == 200
        sent[0] += 1

    def told(found: list[list[str]]) -> bool:
        _, rate, _, _, p99, _, in_time, _, _, cost = found[0]
        return rate not in ("–", "0") and p99.endswith("ms") and in_time.endswith("%") and cost.startswith("$")

    found = until(shown, rows(0, 0), told, doing=one)
    assert found[0][5] == "5.0 s"
    assert found[0][7] == "1.0"
    backends = until(shown, rows(0, 1), lambda found: "%" in found[0][2])
    assert [backend[0] for backend in backends] == ["cheap", "dear"]
    assert backends[0][1] == "live"
    assert backends[0][8] == "$0.10"
    for chart in (0, 1):
        line = f"{CARD.format(0)}.querySelectorAll('figure')[{chart}].querySelector('path.line').getAttribute('d')"
        until(shown, line, lambda d: len(d) > 20, doing=one)
    until(shown, f"{CARD.format(0)}.querySelectorAll('rect.bar').length", lambda bars: bars >= 1)
    assert facts(shown)["cost per hour"] == "$2.50"
    assert facts(shown)["models within their SLO"] == "1 of 1"
    until(shown, f"{CARD.format(0)}.innerText", lambda text: f"Since the start: {before + sent[0]} requests" in text)


def test_a_model_that_nobody_asked_says_so_and_shows_no_figures(shown: Browser) -> None:
    text = until(shown, f"{CARD.format(2)}.innerText", lambda text: "python" in text)
    assert "No requests yet. Send one" in text
    assert "p99" not in text
    assert shown.script(rows(2, 1))[0][:3] == ["python", "live", "–"]
    assert "not loaded" in shown.script(f"{CARD.format(3)}.innerText")


def test_an_ejected_backend_is_told_where_models_are_listed(shown: Browser, served: Served) -> None:
    eject(served)
    until(shown, "document.getElementById('overview').innerText", lambda text: "cheap ejected" in text)
    until(shown, rows(0, 1), lambda found: found[0][1].startswith("ejected: for"))


def test_no_name_becomes_markup(shown: Browser, served: Served) -> None:
    name = shown.script(f"{CARD.format(1)}.querySelector('h3').innerText")
    assert name == HOSTILE
    assert shown.script(rows(1, 1))[0][0] == HOSTILE_BACKEND
    shown.script(f"{CARD.format(1)}.querySelector('p:last-child a').click()")
    until(shown, "document.querySelector('fieldset legend') && document.querySelector('fieldset legend').innerText", bool)
    assert shown.script("document.querySelector('fieldset legend').innerText") == HOSTILE
    shown.script("document.getElementById('go').click()")
    until(shown, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK in "))
    assert json.loads(shown.script("document.getElementById('answer-body').innerText"))["model_name"] == HOSTILE
    assert shown.script("document.images.length") == shown.script("document.scripts.length") - 1 == 0
    assert "pwned" not in shown.script("document.title")
    assert shown.log("browser") == []


SPECS = {
    "quick": ModelSpec("", (TensorSpec("INPUT0", "FP32", (-1, 4)), TensorSpec("MASK", "BOOL", (-1, 2), optional=True)), (), 8),
    HOSTILE: ModelSpec("", (TensorSpec(HOSTILE, "BYTES", (-1, 1)),), (), 4),
}


@pytest.mark.parametrize("name", SPECS, ids=["plain", "hostile"])
def test_the_form_is_filled_with_the_smallest_request(chromium: Browser, served: Served, name: str) -> None:
    open_page(chromium, served, "#send")
    until(chromium, "document.getElementById('model').options.length", lambda count: count == 3)
    chromium.script(
        f"(select => {{ select.value = JSON.stringify([{json.dumps(name)}, '1']); select.dispatchEvent(new Event('change')) }})"
        "(document.getElementById('model'))"
    )
    until(
        chromium,
        "[...document.querySelectorAll('legend')].map(e => e.innerText)",
        lambda found: found == list(SPECS[name].input_by_name),
    )
    chromium.script("document.getElementById('by-hand').click()")
    assert json.loads(chromium.script("document.getElementById('body').value")) == smallest_request(SPECS[name])


def test_a_request_by_hand_shows_status_time_headers_and_answer(chromium: Browser, served: Served) -> None:
    open_page(chromium, served, "#send/quick/1")
    until(chromium, "document.getElementById('input-0-data') && document.getElementById('input-0-data').value", bool)
    chromium.script("document.getElementById('input-0-data').value = '[1, 2, 3, 4'")
    chromium.script("document.getElementById('go').click()")
    said = until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("400 Bad Request in "))
    assert said.endswith(" ms, as this browser saw it · /v2/models/quick/versions/1/infer")
    chromium.script("document.getElementById('input-0-data').value = '[1, 2, 3, 4]'")
    chromium.script("document.getElementById('go').click()")
    until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK in "))
    assert json.loads(chromium.script("document.getElementById('answer-body').innerText"))["outputs"][0]["data"] == [10.0] * 4
    headers = chromium.script("document.querySelector('#answer table:last-child').innerText")
    assert "content-type" in headers
    assert "application/json" in headers
    chromium.script("document.getElementById('input-0-shape').value = 'two'")
    chromium.script("document.getElementById('go').click()")
    assert chromium.script("document.getElementById('outcome').innerText").startswith(
        "INPUT0: shape: got two, expected numbers"
    )


SHAPE = """(words => {
  const shape = document.getElementById('input-0-shape');
  shape.value = words;
  shape.dispatchEvent(new Event('input'));
  document.getElementById('go').click();
  return document.getElementById('outcome').innerText;
})"""


def test_a_request_that_is_too_large_to_fill_in_says_so_and_can_be_written(chromium: Browser, served: Served) -> None:
    open_page(chromium, served, "#send/quick/1")
    until(chromium, "document.getElementById('input-0-data') && document.getElementById('input-0-data').value", bool)
    assert chromium.script(f"{SHAPE}('1769472, 4')") == (
        "INPUT0: 7,077,888 elements, and this page fills in at most 4,194,304: write a smaller shape, or the data"
    )
    assert "4,194,304" in chromium.script("document.getElementById('input-0-data').placeholder")
    chromium.script("document.getElementById('by-hand').click()")
    assert json.loads(chromium.script("document.getElementById('body').value"))["inputs"] == [
        {"name": "INPUT0", "datatype": "FP32", "shape": [1769472, 4], "data": []}
    ]
    chromium.script("document.getElementById('by-hand').click()")
    chromium.script("document.getElementById('input-0-data').value = '[1, 2, 3, 4]'")
    chromium.script("document.getElementById('go').click()")  # what somebody wrote is sent: the gateway judges it
    until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("400 Bad Request in "))


@pytest.mark.parametrize("words", ["1, 4,", ",4", "1 4", "1, 4.5", "-1, 4", "[1, 4"])
def test_a_shape_that_is_no_list_of_sizes_is_refused(chromium: Browser, served: Served, words: str) -> None:
    open_page(chromium, served, "#send/quick/1")
    until(chromium, "document.getElementById('input-0-data') && document.getElementById('input-0-data').value", bool)
    assert chromium.script(f"{SHAPE}({json.dumps(words)})") == (
        f"INPUT0: shape: got {words}, expected numbers from 0 with commas between, such as 1, 16"
    )


def test_a_request_can_be_sent_by_keyboard_alone(chromium: Browser, served: Served) -> None:
    open_page(chromium, served)
    press = "Input.dispatchKeyEvent"
    for _ in range(3):  # skip link, status, send a request
        for kind in ("keyDown", "keyUp"):
            chromium.devtools(press, {"type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9})
    assert chromium.script("document.activeElement.id") == "to-send"
    for key, code, number, text in (("Enter", "Enter", 13, "\r"),):
        chromium.devtools(press, {"type": "keyDown", "key": key, "code": code, "windowsVirtualKeyCode": number, "text": text})
        chromium.devtools(press, {"type": "keyUp", "key": key, "code": code, "windowsVirtualKeyCode": number})
    until(chromium, "document.getElementById('input-0-data') && !document.getElementById('page-send').hidden", bool)
    chromium.script("document.getElementById('go').focus()")
    chromium.devtools(press, {"type": "keyDown", "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"})
    until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK in "))


def test_an_answer_in_parts_is_shown_part_by_part(chromium: Browser, served: Served) -> None:
    open_page(chromium, served, "#send/counts/1")
    until(chromium, "document.getElementById('input-1-data') && document.getElementById('input-1-data').value", bool)
    chromium.script("document.getElementById('by-hand').click()")
    spec = ModelSpec("", (TensorSpec("text", "BYTES", (1,)), TensorSpec("n", "INT32", (1,))), (), 0)
    assert json.loads(chromium.script("document.getElementById('body').value")) == smallest_generate(spec)
    chromium.script("""document.getElementById('body').value = '{"text": "part", "n": 5, "gap_s": 0.3}'""")
    chromium.script("document.getElementById('go').click()")
    until(chromium, "document.querySelectorAll('ol.parts li').length", lambda parts: 0 < parts < 5)  # while others are to come
    said = until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK: 5 parts in "))
    assert ", the first after " in said
    chromium.script("""document.getElementById('body').value = '{"text": "part", "n": 5, "fails_at": 2}'""")
    chromium.script("document.getElementById('go').click()")
    until(chromium, "document.getElementById('outcome').innerText", lambda text: "; the last one is an error · " in text)


HALF = """
models:
  - {name: counts, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}]}
  - name: half
    inputs: [{name: IN, datatype: FP16, shape: [-1, 2]}]
    outputs: [{name: OUT, datatype: FP16, shape: [-1, 2]}]
    backends: [{kind: synthetic}]
"""
BUTTONS = "['go', 'stop'].filter(id => !document.getElementById(id).disabled).join()"


def test_what_can_be_pressed_is_of_the_model_that_is_shown_and_of_what_is_under_way(chromium: Browser, tmp_path: Path) -> None:
    outcome = "document.getElementById('outcome').innerText"
    with serving(tmp_path, HALF) as running:
        open_page(chromium, running, "#send/counts/1")
        until(chromium, FORM, lambda form: form["names"] == ["text", "n"] and not form["hidden"])
        assert chromium.script(BUTTONS) == "go"
        chromium.script("document.getElementById('by-hand').click()")
        chromium.script("""document.getElementById('body').value = '{"text": "part", "n": 30, "gap_s": 1}'""")
        chromium.script("document.getElementById('go').click()")
        assert chromium.script(BUTTONS) == "stop"
        for model, names in (("half", ["IN"]), ("counts", ["text", "n"]), ("half", ["IN"])):
            chromium.script(f"(location.hash = '#send/{model}/1', 0)")
            until(chromium, FORM, lambda form, names=names: form["names"] == names and not form["hidden"])
            assert chromium.script(BUTTONS) == "stop", model
        chromium.script("document.getElementById('stop').click()")
        said = until(chromium, outcome, lambda text: text.startswith("Cancelled after "))
        assert said.endswith(" · /v2/models/counts/versions/1/generate_stream")
        assert chromium.script(BUTTONS) == "", "FP16 has no JSON form"
        chromium.script("(location.hash = '#send/counts/1', 0)")
        until(chromium, BUTTONS, lambda found: found == "go")


CHANGING = """
server: {{model_control: true}}
models:
  - {{name: a, backends: [{{kind: synthetic}}]}}
  - name: b
    inputs: [{{name: {0}, datatype: {1}, shape: [-1, 3]}}]
    outputs: [{{name: OUT, datatype: {1}, shape: [-1, 3]}}]
    backends: [{{kind: synthetic}}]
  - {{name: c, backends: [{{kind: synthetic}}]}}
"""
FORM = """({
  names: [...document.querySelectorAll('legend')].map(e => e.innerText), hidden: document.getElementById('form').hidden,
  list: [...document.getElementById('model').options].map(e => e.innerText).join(),
  model: document.getElementById('model').value,
})"""


def change(running: Served, verb: str, model: str) -> None:
    with urllib.request.urlopen(f"http://{running.url}/v2/repository/models/{model}/{verb}", b"", timeout=20):
        pass


def test_the_list_shows_the_model_that_is_asked_whatever_comes_and_goes(chromium: Browser, tmp_path: Path) -> None:
    data = "document.getElementById('input-0-data')"
    with serving(tmp_path, CHANGING.format("IN", "FP32")) as running:
        open_page(chromium, running, "#send/b/1")
        until(chromium, FORM, lambda form: form["names"] == ["IN"] and not form["hidden"])
        change(running, "unload", "c")
        assert until(chromium, FORM, lambda form: form["list"] == "a,b")["model"] == '["b","1"]'
        change(running, "unload", "b")
        until(chromium, FORM, lambda form: form["hidden"] and not form["model"])
        change(running, "load", "b")
        until(chromium, FORM, lambda form: not form["hidden"] and form["model"] == '["b","1"]')
        chromium.script(f"{data}.value = '[7, 8, 9]'")
        port = running.port
    until(chromium, "document.getElementById('state').innerText", lambda text: "does not answer since" in text)
    with serving(tmp_path, CHANGING.format("IN", "FP32"), port=port):  # as before
        until(chromium, FORM, lambda form: form["list"] == "a,b,c" and form["model"] == '["b","1"]')
        chromium.script("document.getElementById('go').click()")
        until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK"))
        assert chromium.script(f"{data}.value") == "[7, 8, 9]"
    until(chromium, "document.getElementById('state').innerText", lambda text: "does not answer since" in text)
    with serving(tmp_path, CHANGING.format("NEW", "INT64"), port=port):
        until(chromium, FORM, lambda form: form["names"] == ["NEW"] and not form["hidden"])


RELOADED = """
class Model:
    inputs = (("{0}", "{1}", (-1, 2)),)
    outputs = (("OUT", "{1}", (-1, 2)),)

    def predict(self, inputs):
        return {{"OUT": inputs["{0}"]}}
"""


def test_the_form_follows_a_model_that_is_loaded_again(chromium: Browser, tmp_path: Path) -> None:
    file, data = tmp_path / "model.py", "document.getElementById('input-0-data')"
    backend = f"{{kind: python, model: '{file}:Model', isolation: process}}"
    file.write_text(RELOADED.format("IN", "FP32"))
    models = f"server: {{model_control: true}}\nmodels: [{{name: m, max_rows: 4, backends: [{backend}]}}]"
    with serving(tmp_path, models) as running:
        open_page(chromium, running, "#send/m/1")
        until(chromium, FORM, lambda form: form["names"] == ["IN"] and not form["hidden"])
        chromium.script(f"{data}.value = '[7, 8]'")
        chromium.script("(performance.clearResourceTimings(), 0)")
        change(running, "load", "m")  # as it was: what was written stays
        asks = "performance.getEntriesByType('resource').filter(entry => entry.name.endsWith('/config')).length"
        until(chromium, asks, bool)
        file.write_text(RELOADED.format("NEW", "INT64"))
        assert chromium.script(f"{data}.value") == "[7, 8]"
        change(running, "load", "m")
        until(chromium, FORM, lambda form: form["names"] == ["NEW"] and not form["hidden"])
        chromium.script("document.getElementById('go').click()")
        until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK"))


def test_a_form_whose_inputs_could_not_be_had_is_asked_for_again(chromium: Browser, served: Served) -> None:
    open_page(chromium, served)
    chromium.script("(window.asked = window.fetch, window.fetch = path => asked(path === '/v2/status' ? path : '/nowhere'), 0)")
    chromium.script("(location.hash = '#send/quick/1', 0)")
    until(chromium, "document.getElementById('model-note').innerText", lambda text: "could not be had" in text)
    chromium.script("(window.fetch = asked, 0)")
    until(chromium, FORM, lambda form: not form["hidden"] and "INPUT0" in form["names"])
    assert chromium.script("document.getElementById('model-note').innerText") == ""


def test_page_and_terminal_reckon_alike(shown: Browser, served: Served) -> None:
    then = status(served)
    assert ask(served, body()) == 200
    until(shown, rows(0, 0), lambda found: found[0][1] not in ("–", "0"), doing=lambda: ask(served, body()))
    now = status(served)
    while now["time_s"] == then["time_s"]:
        now = status(served)
    figures = between(then["models"][0], now["models"][0], now["time_s"] - then["time_s"])
    assert figures.p99_ms is not None
    text = page().body.decode()
    reckoning = text[text.index("const sum =") : text.index("class Statuses")]
    arguments = f"{json.dumps(then['models'][0])}, {json.dumps(now['models'][0])}, {figures.span_s}"
    ours = shown.script(f"(() => {{ {reckoning}; return between({arguments}) }})()")
    for key in ("answered", "ok", "p50_ms", "p99_ms", "in_time", "rows_per_batch", "padding", "usd_per_million"):
        assert ours[key] == pytest.approx(getattr(figures, key)), key
    for mine, other in zip(ours["backends"], figures.backends, strict=True):
        assert mine["name"] == other.name
        assert (mine["share"], mine["batch_ms"]) == (pytest.approx(other.share), pytest.approx(other.batch_ms))


@pytest.mark.parametrize("fragment", ["", "#send/quick/1"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_a_phone_and_asks_nobody_else(chromium: Browser, served: Served, width: int, fragment: str) -> None:
    assert ask(served, body()) == 200
    chromium.requested(), chromium.log("browser")  # forget the page before
    open_page(chromium, served, fragment, width=width)
    chromium.script("document.querySelectorAll('details').forEach(details => details.open = true)")
    if fragment:
        until(chromium, "document.getElementById('input-0-data') && document.getElementById('input-0-data').value", bool)
        chromium.script("document.getElementById('go').click()")
        until(chromium, "document.getElementById('outcome').innerText", lambda text: text.startswith("200 OK in "))
    assert chromium.script("document.documentElement.scrollWidth") <= width
    assert chromium.script(BEYOND.replace("body *", "main *")) == []
    assert chromium.script(SCROLLS.replace("body *", "main *")) == []
    own = (f"http://{served.url}/", "data:,", "about:blank")
    assert {url for url in chromium.requested() if not url.startswith(own)} == set()
    assert chromium.log("browser") == []


def test_it_is_dark_where_the_reader_wants_it(chromium: Browser, served: Served) -> None:
    brightness = "getComputedStyle(document.querySelector('{}')).{}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    for dark in (False, True):
        open_page(chromium, served, dark=dark)
        paper = chromium.script(brightness.format(".card", "backgroundColor"))
        for place, attribute in (("body", "color"), (".facts dd", "color"), ("svg text", "fill"), ("td", "color")):
            ink = chromium.script(brightness.format(place, attribute))
            assert (ink > paper) == dark, place
            assert abs(ink - paper) > 250, place


def test_all_that_is_on_it_has_a_name_for_who_hears_it(shown: Browser) -> None:
    found = shown.devtools("Accessibility.getFullAXTree", {})["nodes"]
    named: dict[str, list[str]] = {}
    for node in found:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert {"banner", "main", "navigation", "contentinfo", "status", "table", "columnheader", "rowheader"} <= named.keys()
    for role in ("link", "button", "image", "table", "columnheader", "heading", "navigation", "region"):
        assert all(named.get(role, [])), f"{role}: {named.get(role)}"
    assert shown.script("document.querySelectorAll('[aria-live], [role=status]').length") == 3  # only what tells of changes


class Slow(BaseHTTPRequestHandler):
    """Answers with the page, and with statuses while `open` is set."""

    open = threading.Event()
    told = b""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/":
            body = page().body
            self.send_header("Content-Type", "text/html")
        else:
            self.open.wait(WITHIN_S)
            body = json.dumps({**json.loads(self.told), "time_s": time.time()}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def test_figures_that_grow_old_and_a_model_without_sessions_are_told(chromium: Browser, served: Served) -> None:
    Slow.told = json.dumps(status(served)).encode()
    Slow.open.set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            chromium.open(f"http://127.0.0.1:{server.server_port}/", width=1280)
            state = "document.getElementById('state').innerText"
            until(chromium, state, lambda text: text == "Serving")
            Slow.open.clear()
            until(chromium, state, lambda text: text.startswith("Slow: no new figures since "))
            Slow.open.set()
            until(chromium, state, lambda text: text == "Serving")
            ill = status(served) | {"ready": False}
            for backend in ill["models"][0]["backends"]:
                backend["state"] = "down"
            Slow.told = json.dumps(ill).encode()
            until(chromium, state, lambda text: text == "Not ready: quick has no live session")
        finally:
            chromium.open("about:blank", width=1280)
            server.shutdown()
            thread.join()


def test_a_gateway_that_goes_and_comes_again_is_told(chromium: Browser, tmp_path: Path) -> None:
    changes = "window.said = []; new MutationObserver(() => said.push(state.innerText)).observe(state, {childList: true})"
    with serving(tmp_path, MODELS) as running:
        open_page(chromium, running)
        port = running.port
        assert ask(running, body()) == 200
        until(chromium, f"{CARD.format(0)}.innerText", lambda text: "Since the start: 1 request" in text)
        chromium.script(f"(() => {{ {changes} }})()")
    told = until(chromium, "document.getElementById('state').innerText", lambda text: "does not answer since" in text)
    assert "Figures are from" in told
    assert chromium.script("document.getElementById('models').classList.contains('old')")
    assert "5.0 s" in chromium.script(f"{CARD.format(0)}.innerText")  # the last figures stay
    polls = "performance.getEntriesByType('resource').length"
    seen = chromium.script(polls)
    until(chromium, polls, lambda now: now > seen)
    assert chromium.script("said.length") == 1, "it is told once, not each second"
    with serving(tmp_path, MODELS, port=port):
        until(chromium, "document.getElementById('state').innerText", lambda text: text == "Serving")
        until(chromium, f"{CARD.format(0)}.innerText", lambda text: "No requests yet." in text)
