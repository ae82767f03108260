"""A load under way does not keep a gateway from ending."""

import json
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.served.gateway_process import served
from tests.waiting import until

pytestmark = pytest.mark.slow

CONFIG = """
server: {model_control: true, drain_timeout_s: 30}
models: [{name: m, load_at_start: false, backends: [{kind: synthetic, load_ms: 60000}]}]
"""


def load_over_rest(address: str) -> tuple[object, str]:
    try:
        urllib.request.urlopen(f"http://{address}/v2/repository/models/m/load", data=b"", timeout=60).close()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, str(json.load(refused)["error"])
    return 200, ""


def load_over_grpc(address: str) -> tuple[object, str]:
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="m"), timeout=60)
    return refused.value.code(), str(refused.value.details())


def index(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/v2/repository/index", data=b"", timeout=10) as response:
        return bytes(response.read())


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_sigterm_breaks_a_load_off_and_tells_whoever_waits_for_it(tmp_path: Path, protocol: str) -> None:
    (tmp_path / "x.yaml").write_text(CONFIG)
    with served(tmp_path / "x.yaml", "--no-ray") as gateway, ThreadPoolExecutor() as pool:
        loading = pool.submit(load_over_rest, gateway.http) if protocol == "rest" else pool.submit(load_over_grpc, gateway.grpc)
        until(lambda: b"LOADING" in index(gateway.http))
        gateway.process.send_signal(signal.SIGTERM)
        code = {"rest": 503, "grpc": grpc.StatusCode.UNAVAILABLE}[protocol]
        assert loading.result(20) == (code, "the server is shutting down")
        assert gateway.process.wait(20) == 0
