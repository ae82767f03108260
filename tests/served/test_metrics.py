"""What a served gateway tells at /metrics, beside what its clients saw."""

import gzip
import http.client
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from tests.served.gateway_process import Served, served

pytestmark = pytest.mark.slow

# Of each request, one after the other. One takes 35 ms and one more for each row: beside that, what a busy machine delays
# clients is small. Compared are the middle ones of each size, which two that are much delayed do not move.
ROWS = [1] * 20 + [85] * 6 + [265] * 6
SHARES = (10 / 32, 23 / 32, 29 / 32)


def written(tmp_path: Path, **sections: Any) -> Path:
    backend = {"kind": "synthetic", "fixed_ms": 35.0, "row_ms": 1.0, "faults": {"fail": 666}}
    model = {"name": "m", "max_rows": 300, "slo": {"p99_ms": 700}, "batching": {"probe_s": 0}, "backends": [backend]}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"models": [model], **sections}))
    return path


def get(gateway: Served, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(gateway.http, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def asked(library: Any, address: str, each_rows: Sequence[int]) -> list[int]:
    """Latencies of requests one after the other; behind them comes a failed one of each kind."""
    took_ns = []
    with library.InferenceServerClient(address) as client:

        def ask(value: float, rows: int = 1, columns: int = 16) -> None:
            tensor = library.InferInput("INPUT0", [rows, columns], "FP32")
            tensor.set_data_from_numpy(np.full((rows, columns), value, np.float32))
            client.infer("m", [tensor])

        for rows in each_rows:
            begun_ns = time.monotonic_ns()
            ask(1.0, rows)
            took_ns.append(time.monotonic_ns() - begun_ns)
        for refused in (lambda: ask(666.0), lambda: ask(1.0, columns=17)):
            with pytest.raises(InferenceServerException):
                refused()
    return took_ns


def test_counts_are_the_clients_and_quantiles_lie_in_the_same_bucket_or_the_next(tmp_path: Path) -> None:
    with served(written(tmp_path, metrics={"triton_names": True}), "--no-ray") as gateway:
        took_ns = {
            "rest": asked(tritonclient.http, gateway.http, ROWS),
            "grpc": asked(tritonclient.grpc, gateway.grpc, ROWS),
        }
        status, headers, body = get(gateway, "/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        found = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]

        def told(name: str, **labels: str) -> dict[str, float]:
            """By `le`, or by code."""
            chosen = [sample for sample in found if sample.name == name and labels.items() <= sample.labels.items()]
            return {sample.labels.get("le", sample.labels.get("code", "")): sample.value for sample in chosen}

        for protocol, seen_ns in took_ns.items():
            labels = {"model": "m", "protocol": protocol}
            codes = {"ok": len(ROWS), "backend_failed": 1, "invalid_argument": 1, "overloaded": 0, "deadline_exceeded": 0}
            assert told("gateway_requests_total", **labels) == codes
            buckets = told("gateway_request_duration_seconds_bucket", **labels)
            edges = [float(edge) for edge in buckets]
            for share, quantile_ns in zip(SHARES, np.quantile(seen_ns, SHARES, method="inverted_cdf"), strict=True):
                ours = next(index for index, count in enumerate(buckets.values()) if count >= share * len(ROWS))
                clients = next(index for index, edge in enumerate(edges) if quantile_ns / 1e9 <= edge)
                assert clients - 1 <= ours <= clients
        assert sum(told("gateway_slo_requests_total", result="met").values()) <= 2 * len(ROWS)
        assert f'nv_inference_request_success{{model="m",version="1"}} {2 * len(ROWS)}\n' in body.decode()

        status, headers, packed = get(gateway, "/metrics", Accept_Encoding="gzip", Accept="application/openmetrics-text")
        assert headers["Content-Encoding"] == "gzip"
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert "gateway_requests" in {family.name for family in openmetrics_families(gzip.decompress(packed).decode())}


def test_switched_off_there_are_no_metrics_and_all_else_is_as_ever(tmp_path: Path) -> None:
    path = written(tmp_path, metrics=False)
    path.write_text(re.sub("metrics: false", "metrics: off", path.read_text()))
    with served(path, "--no-ray") as gateway:
        asked(tritonclient.http, gateway.http, [1])
        assert get(gateway, "/metrics")[0] == 404
        assert b"/metrics" not in get(gateway, "/")[2]
        assert get(gateway, "/v2/models/m/stats")[0] == 200
