"""The section `tracing`, and what is said where it cannot be followed."""

import sys
from pathlib import Path

import pytest

from gateway.config import Tracing, parse_config
from gateway.configuring.check import check, looked_at
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document
from gateway.errors import ConfigError
from gateway.tracing.settings import settings
from gateway.tracing.tracer import open_tracer

MODELS = [{"name": "m", "backends": [{"kind": "synthetic"}]}]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (
            {"endpoint": "collector:4317"},
            "tracing.endpoint: 'collector:4317': expected a URL such as http://collector:4317; write http://collector:4317",
        ),
        ({"endpoint": "ftp://collector"}, "tracing.endpoint: 'ftp://collector': expected a URL such as http://collector:4317"),
        ({"endpoint": "http://collector:port"}, "tracing.endpoint: 'http://collector:port': expected a URL"),
        ({"endpoint": "http://"}, "tracing.endpoint: 'http://': expected a URL"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio: 1.5: expected"),
        ({"sample_ratio": -0.1}, "tracing.sample_ratio: -0.1: expected"),
        ({"protocol": "http/json"}, "tracing.protocol: 'http/json': expected"),
        ({"ratio": 0.1}, "tracing.ratio: "),
    ],
)
def test_a_mistake_is_named(section: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigFaults) as faults:
        parse_config({"tracing": section, "models": MODELS}, source="gateway.yaml")
    assert told in str(faults.value)


@pytest.mark.parametrize("endpoint", ["http://collector:4317", "https://[::1]:4318/v1/traces", "http://collector"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    config = parse_config({"tracing": {"endpoint": endpoint}, "models": MODELS}, source="gateway.yaml")
    assert config.tracing == Tracing(endpoint=endpoint)


def test_there_is_none_by_default() -> None:
    assert parse_config({"models": MODELS}, source="gateway.yaml").tracing is None


@pytest.mark.parametrize(
    ("variable", "value", "section"),
    [
        ("OTEL_TRACES_SAMPLER", "foo", {}),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "foo", {}),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", {}),
        ("OTEL_BSP_SCHEDULE_DELAY", "x", {}),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense", {"protocol": "http"}),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4318", {"protocol": "http"}),
    ],
)
def test_check_tells_of_variables_that_serve_refuses(
    variable: str, value: str, section: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as refused:
        open_tracer(Tracing.model_validate(section), {variable: value})
    assert f"{variable}: got '{value}', expected " in str(refused.value)
    monkeypatch.setenv(variable, value)
    (fault,) = looked_at(Document("gateway.yaml", {"tracing": section, "models": MODELS})).faults
    assert str(fault) == f"gateway.yaml: tracing: {refused.value}"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not looked_at(Document("gateway.yaml", {"tracing": section, "models": MODELS})).faults


def test_an_endpoint_of_the_environment_is_what_grpc_takes() -> None:
    found = settings(Tracing(protocol="grpc"), {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})
    assert found is not None
    assert settings(Tracing(endpoint="http://here:1", protocol="http"), {"OTEL_EXPORTER_OTLP_ENDPOINT": "nonsense"}) is not None


@pytest.fixture
def without_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra is not installed."""
    for protocol in ("grpc", "http"):
        for module in ("", ".trace_exporter"):
            monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}{module}", None)


@pytest.mark.usefixtures("without_exporters")
def test_an_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("models: [{name: m, backends: [{kind: synthetic}]}]\ntracing: {protocol: http}\n")
    (fault,) = check(path).faults
    assert "exporter by http is not installed" in str(fault)
    assert "pip install 'serving-gateway[otel]'" in str(fault)
    with pytest.raises(ConfigError, match=r"^tracing: the exporter by grpc cannot be imported .*serving-gateway\[otel\]"):
        open_tracer(Tracing(), {})
