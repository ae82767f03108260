"""`GET /v2/status`, the page at `/`, and who gets which."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ServerSection, parse_config
from gateway.edges.status_page import page, prefers_html
from gateway.engine.metrics import Metrics
from gateway.engine.status import Counts
from gateway.errors import ConfigError
from tests.rest_routes.serving import Served, serving
from tests.rest_routes.test_routes import ask as get
from tests.status.watching import HOSTILE, HOSTILE_BACKEND, MODELS, ask, body, eject, fresh, model_of, status

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("status"), MODELS) as running:
        yield running


@pytest.mark.slow
def test_the_status_counts_what_was_asked_and_says_who_serves_it(served: Served) -> None:
    before = model_of(fresh(served), "quick")
    assert [ask(served, body()) for _ in range(3)] == [200] * 3
    assert ask(served, {"inputs": []}) == 400
    told = fresh(served)
    model = model_of(told, "quick")
    assert model["requests"]["ok"] - before["requests"].get("ok", 0) == 3
    assert model["requests"]["invalid_argument"] - before["requests"].get("invalid_argument", 0) == 1
    latency = model["latency"]
    assert sum(latency["counts"]) == model["requests"]["ok"]
    assert model["slo_requests"] == {"met": model["requests"]["ok"], "missed": 0}
    assert len(latency["counts"]) == len(latency["bounds_ms"]) + 1
    assert 5000.0 in latency["bounds_ms"]
    cheap, dear = model["backends"]
    assert (cheap["name"], cheap["state"], cheap["sessions"], cheap["usd_per_hour"]) == ("cheap", "live", 2, 0.1)
    assert model["usd_per_hour"] == cheap["usd_per_hour"] + dear["usd_per_hour"] == 2.5
    assert sum(cheap["batch_sizes"]["counts"]) == cheap["batches"] > 0
    assert (told["ready"], told["processes"]) == (True, 1)
    assert model_of(told, "absent")["state"] == "UNAVAILABLE"
    assert model_of(told, "absent")["backends"][0]["state"] == "not loaded"
    assert model_of(told, HOSTILE)["backends"][0]["name"] == HOSTILE_BACKEND


@pytest.mark.slow
def test_a_backend_that_is_ejected_says_so(served: Served) -> None:
    eject(served)
    cheap, dear = model_of(fresh(served), "quick")["backends"]
    assert (cheap["state"], dear["state"]) == ("ejected", "live")
    assert "probes" in cheap["detail"]


def test_the_status_of_one_moment_serves_all_who_look(served: Served) -> None:
    answers = {get(served, "GET", "/v2/status").body for _ in range(20)}
    assert len(answers) <= 3


def test_counts_of_protocols_are_added_up() -> None:
    metrics = Metrics()
    for protocol, milliseconds in (("rest", (1, 2, 200)), ("grpc", (2, 20_000))):
        endpoint = metrics.endpoint("m", "1", protocol)
        for each in milliseconds:
            endpoint.done(0, 0, 0, each * 1_000_000)
    counts = Counts(metrics)
    for key, state in asyncio.run(metrics.counted()).items():
        counts.add(key, state)
    latency = counts.models["m", "1"].latency_s
    assert counts.models["m", "1"].requests == {"ok": 5}
    found = {bound: count for bound, count in zip((*latency.bounds, None), latency.counts, strict=True) if count}
    assert found == {0.001: 1, 0.0025: 2, 0.25: 1, None: 1}


def test_without_metrics_the_status_says_that_nothing_is_counted(tmp_path: Path) -> None:
    with serving(tmp_path, "metrics: off\nmodels: [{name: m, backends: [{kind: synthetic}]}]") as running:
        told = status(running)
        assert told["counted"] is False
        assert (told["models"][0]["state"], told["models"][0]["latency"]) == ("READY", {"bounds_ms": [], "counts": []})


# the page


def test_a_browser_gets_the_page_and_everyone_else_the_index(served: Served) -> None:
    answer = get(served, "GET", "/", Accept=CHROMIUM)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.body == page().body
    assert answer.headers["vary"] == "Accept"
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        answer = get(served, "GET", "/", **headers)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["links"]["status"] == "/v2/status"
        assert answer.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (CHROMIUM, True),
        ("text/html", True),
        ("TEXT/HTML;Q=0.5, application/json;q=0.4", True),
        ("text/*, application/json;q=0.9", True),
        ("", False),
        ("*/*", False),
        ("application/json, text/plain, */*", False),
        ("text/html;q=0", False),
        ("text/html;q=0.5, application/json", False),
        ("text/html, application/json", False),
        ("text/html;q=high", False),
        (";;;q=,,=", False),
    ],
)
def test_html_is_for_who_likes_it_better_than_json(accept: str, html: bool) -> None:
    assert prefers_html(accept.encode()) == html


def test_the_page_may_ask_nobody_but_the_gateway_and_no_text_becomes_markup() -> None:
    policy = page().headers.decode().split("\r\n")[0].removeprefix("Content-Security-Policy: ")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in policy
    assert page().body.count(b"<script") == page().body.count(b"<style") == 1
    text = page().body.decode()
    assert not [
        word for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", " style=") if word in text
    ]
    assert text.replace("http://www.w3.org/2000/svg", "").count("://") == 0


@pytest.mark.parametrize(
    ("host", "setting", "there"),
    [
        ("127.0.0.1", "auto", True),
        ("127.9.9.9", "auto", True),
        ("::1", "auto", True),
        ("localhost", "auto", True),
        ("0.0.0.0", "auto", False),
        ("::", "auto", False),
        ("10.0.0.7", "auto", False),
        ("gateway.internal", "auto", False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_the_page_is_there_on_loopback_or_where_it_is_switched_on(host: str, setting: bool | str, there: bool) -> None:
    assert ServerSection.model_validate({"host": host, "status_page": setting}).shows_page == there


def test_another_word_for_the_setting_is_told() -> None:
    with pytest.raises(ConfigError, match=r"server\.status_page: 'loopback': expected true or false or 'auto'"):
        parse_config(
            {"server": {"status_page": "loopback"}, "models": [{"name": "m", "backends": [{"kind": "synthetic"}]}]}, source="x"
        )


def test_without_the_page_a_browser_gets_the_index(tmp_path: Any) -> None:
    with serving(tmp_path, "server: {status_page: false}\n" + "models: [{name: m, backends: [{kind: synthetic}]}]") as running:
        answer = get(running, "GET", "/", Accept=CHROMIUM)
        assert json.loads(answer.body)["name"] == "serving-gateway"
        assert get(running, "GET", "/v2/status").status == 200
