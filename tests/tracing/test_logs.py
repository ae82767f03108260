"""What the log tells of failed requests, with the ids by which a client and a trace know them."""

import json
import logging
from typing import Any

import pytest

import gateway
from gateway.process.console import _JsonLine
from tests.tracing.test_request_ids import INFER, body, client

__all__ = ["client"]  # a fixture


def said(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    """The lines of `--log-format json` about requests."""
    return [json.loads(_JsonLine().format(record)) for record in records if hasattr(record, "fields")]


def test_a_failed_request_is_one_line_that_has_its_id(client: gateway.TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asked = [("POST", INFER, body(666.0)), ("POST", INFER, {"inputs": []}), ("POST", "/v2/models/nobody/infer", body())]
    for number, (method, path, sent) in enumerate(asked):
        client.request(method, path, json=sent | {"id": f"v2-{number}"}, headers={"X-Request-Id": f"x-{number}"})
    lines = said(caplog.records)
    made = client.post(INFER, json={"inputs": []}).headers["x-request-id"]
    assert said(caplog.records)[-1]["request_id"] == made
    assert [(line["request_id"], line["code"], line["level"]) for line in lines] == [
        ("x-0", "backend_failed", "ERROR"),
        ("x-1", "invalid_argument", "INFO"),
        ("x-2", "not_found", "INFO"),
    ]
    assert lines[0] | {"model": "echo", "version": "1", "backend": "echo:1/synthetic", "id": "v2-0", "left_out": 0} == lines[0]
    assert lines[1] | {"model": "echo", "protocol": "rest"} == lines[1]
    assert "model" in lines[2]  # empty: there is none of this name


def test_of_many_that_fail_alike_a_few_are_told_and_how_many_were_left_out(
    client: gateway.TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(30):
        client.post("/v2/models/echo/generate", json={"nothing": 1})
    assert 0 < len(said(caplog.records)) <= 11
