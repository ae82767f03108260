"""What a gateway says when it is ready: a line for programs, the models, and the smallest request to one of them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.config import AccessSection, ServerSection, TlsSection, parse_config
from gateway.process.announcement import ReadyModel, announcer, curl_command, named, ready_line, ready_words
from gateway.process.console import words
from tests.certificates import Authority

URL = "http://127.0.0.1:8000"
SYNTHETIC = {"models": [{"name": "m", "backends": [{"kind": "synthetic"}]}]}
ROW = TensorSpec("x", "FP32", (-1, 4))


def model(name: str = "m", *, inputs: tuple[TensorSpec, ...] = (ROW,), probed: bool = True, version: str = "1") -> ReadyModel:
    return ReadyModel(name, version, ModelSpec("", inputs, (TensorSpec("y", "FP32", (-1, 1)),), 8), probed)


@pytest.mark.parametrize(
    ("http", "grpc", "line"),
    [
        (8000, 8001, "gateway ready http=127.0.0.1:8000 grpc=127.0.0.1:8001"),
        (8000, None, "gateway ready http=127.0.0.1:8000"),
        (None, 8001, "gateway ready grpc=127.0.0.1:8001"),
    ],
)
def test_the_ready_line_names_the_listeners_that_there_are(http: int | None, grpc: int | None, line: str) -> None:
    assert ready_line(ServerSection(), http, grpc) == line


def test_a_full_disk_behind_standard_output_is_told_and_no_reason_to_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(words, "propagate", False)
    monkeypatch.setattr(words, "handlers", [caplog.handler])
    with open("/dev/full", "w") as full:
        announcer(parse_config(SYNTHETIC, source="test"), full, quiet=False)(8000, None, [model()])
        print("which a model may do", file=full, flush=True)
    (told,) = caplog.messages
    assert told.startswith("standard output: No space left on device: ")
    assert told.endswith("; gateway ready http=127.0.0.1:8000")


def test_the_smallest_request_is_one_row_of_ones() -> None:
    inputs = (
        ROW,
        TensorSpec("text", "BYTES", (-1, -1)),
        TensorSpec("flag", "BOOL", (-1, 1)),
        TensorSpec("left out", "FP32", (-1, 1), optional=True),
    )
    assert curl_command(URL, model(inputs=inputs), ServerSection()) == (
        "curl -sS http://127.0.0.1:8000/v2/models/m/infer -d '"
        '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}, '
        '{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["1"]}, '
        '{"name": "flag", "datatype": "BOOL", "shape": [1, 1], "data": [true]}]}'
        "'"
    )


def test_a_request_has_the_rows_that_a_model_insists_on_and_one_input_at_least() -> None:
    inputs = (TensorSpec("x", "FP32", (2, 1), optional=True), TensorSpec("left out", "FP32", (2, 1), optional=True))
    command = curl_command(URL, model(inputs=inputs), ServerSection())
    assert command is not None
    assert '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 1]}]}' in command


def test_a_decoupled_model_is_asked_for_its_parts_as_they_come() -> None:
    inputs = (TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("x", "FP32", (-1, 2)))
    decoupled = replace(model("a b", inputs=inputs).spec, decoupled=True)
    assert curl_command(URL, ReadyModel("a b", "1", decoupled, True), ServerSection()) == (
        "curl -sS -N http://127.0.0.1:8000/v2/models/a%20b/generate_stream -d " """'{"text": "1", "x": [1, 1]}'"""
    )
    half = replace(decoupled, outputs=(TensorSpec("y", "FP16", (-1, 1)),))
    assert curl_command(URL, ReadyModel("m", "1", half, True), ServerSection()) is None  # curl could not read it
    bare = replace(decoupled, inputs=(), max_rows=0)
    assert (curl_command(URL, ReadyModel("m", "1", bare, True), ServerSection()) or "").endswith("/generate_stream -d '{}'")


def test_many_elements_are_left_to_the_shell_to_write() -> None:
    command = curl_command(URL, model(inputs=(TensorSpec("x", "FP32", (-1, 100)),)), ServerSection())
    assert command is not None
    assert """"data": ['"$(printf 1,%.0s $(seq 99))"'1]}]}'""" in command
    sent = subprocess.run(["sh", "-c", command.replace("curl -sS", "echo")], capture_output=True, text=True, check=True).stdout
    assert json.loads(sent.partition(" -d ")[2])["inputs"][0]["data"] == [1] * 100  # also where sh is no bash


def test_a_request_that_the_server_would_refuse_or_nobody_would_send_is_not_shown() -> None:
    assert curl_command(URL, model(inputs=(TensorSpec("x", "FP32", (-1, 2 << 20)),)), ServerSection()) is None


def test_the_models_are_named_with_versions_that_are_not_1_and_what_is_not_loaded() -> None:
    words = ready_words(ServerSection(), None, [model("a"), model("b", version="2"), model("b", version="3")], [("c", "1")])
    assert words == "models: a, b (version 2, 3); not loaded: c"


def test_what_is_not_loaded_has_its_version_where_another_is_or_that_is_not_1(capsys: pytest.CaptureFixture[str]) -> None:
    versions = [("a", "1"), ("b", "1"), ("b", "2"), ("c", "1"), ("c", "2"), ("d", "1"), ("e", "7")]
    models = [{"name": name, "version": version, "backends": [{"kind": "synthetic"}]} for name, version in versions]
    config = parse_config({"models": models}, source="test")
    announcer(config, sys.stdout, quiet=False)(8000, None, [model("a"), model("b"), model("c", version="2")])
    told = "models: a, b, c (version 2); not loaded: b (version 2), c (version 1), d, e (version 7)"
    assert told in capsys.readouterr().out.splitlines()


def test_where_there_is_a_status_page_its_address_is_told() -> None:
    for host, told in (("127.0.0.1", "http://127.0.0.1:80/"), ("::1", "http://[::1]:80/"), ("0.0.0.0", None)):
        lines = ready_words(ServerSection(host=host), 80, [model("a")], []).splitlines()
        assert (f"what goes on, in a browser: {told}" in lines) == (told is not None)
        assert len([line for line in lines if "browser" in line]) == (told is not None)


def test_where_the_page_needs_a_key_that_no_browser_shows_what_can_show_one_is_named() -> None:
    def told(**server: Any) -> list[str]:
        lines = ready_words(ServerSection(**server), 80, [], []).splitlines()
        return [line for line in lines if line.startswith("what goes on")]

    page = "what goes on, in a browser: http://127.0.0.1:80/"
    assert told(access=AccessSection(keys="keys", open=("status",))) == [page]
    locked = AccessSection(keys="keys", open=("infer", "metrics"))
    assert told(access=locked) == ["what goes on: gateway top http://127.0.0.1:80 --api-key-file KEY_FILE"]
    assert told(access=locked, host="0.0.0.0") == []
    tls = TlsSection(certificate="c", key="k")
    assert told(access=locked, tls=tls) == ["what goes on: gateway top https://127.0.0.1:80 --ca CA --api-key-file KEY_FILE"]
    mutual = tls.model_copy(update={"client_ca": "c"})
    shown = "--ca CA --cert CERTIFICATE --key ITS_KEY --api-key-file KEY_FILE"
    assert told(access=locked, tls=mutual) == [f"what goes on: gateway top https://127.0.0.1:80 {shown}"]


def test_the_shortest_request_to_a_model_that_answered_when_it_was_probed_is_shown() -> None:
    longer = TensorSpec("a longer name", "FP32", (-1, 4))
    known, refuses = model("known", inputs=(longer,)), model("m", probed=False)
    *_, how, command = ready_words(ServerSection(host="0.0.0.0"), 80, [refuses, known], []).splitlines()
    assert how == "try it:"
    assert command.startswith("  curl -sS http://127.0.0.1:80/v2/models/known/infer -d ")
    *_, how, command = ready_words(ServerSection(host="::1"), 80, [refuses], []).splitlines()
    assert how == "try it, with content of your own:"
    assert "'http://[::1]:80/v2/models/m/infer'" in command


def test_a_command_by_tls_says_whom_it_trusts(tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).issue("server"))
    tls = TlsSection(certificate=certificate, key=key)
    *_, how, command = ready_words(ServerSection(tls=tls), 80, [model()], []).splitlines()
    assert how == "try it:"
    assert command.startswith(f"  curl -sS --cacert {certificate} https://127.0.0.1:80/v2/models/m/infer -d ")
    mutual = tls.model_copy(update={"client_ca": certificate, "certificate": "on/other/nodes.pem"})
    *_, how, command = ready_words(ServerSection(tls=mutual), 80, [model(probed=False)], []).splitlines()
    assert how == "try it, with content, a client's certificate of your own:"
    assert f"--cacert {Path('on/other/nodes.pem').absolute()} --cert CERTIFICATE --key ITS_KEY https://127.0.0.1:80/" in command


def test_a_list_of_names_is_short_however_many_there_are() -> None:
    assert named(f"m{i}" for i in range(22)).endswith("m19 and 2 more")
