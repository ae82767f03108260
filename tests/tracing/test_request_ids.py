"""The request id in answers, over REST and gRPC."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import gateway
from tests.grpc_server.serving import infer_request, on_loop, serving

FAST = {"kind": "synthetic", "fixed_ms": 0, "row_ms": 0, "faults": {"fail": 666}}
TENSOR = {"datatype": "FP32", "shape": [-1, 4]}
CONFIG: dict[str, Any] = {
    "models": [
        {
            "name": "echo",
            "inputs": [{"name": "INPUT0", **TENSOR}],
            "outputs": [{"name": "OUTPUT0", **TENSOR}],
            "batching": {"probe_s": 0},
            "backends": [FAST],
        }
    ]
}
INFER = "/v2/models/echo/infer"


def body(value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}], **more}


@pytest.fixture(scope="module")
def client() -> Iterator[gateway.TestClient]:
    with gateway.TestClient(CONFIG) as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", INFER, 200),
        ("POST", "/v2/models/echo/generate", 400),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2", 200),
        ("GET", "/nowhere", 404),
        ("PUT", "/v2", 405),
        ("GET", "/metrics", 200),
    ],
)
def test_every_rest_answer_has_an_id(client: gateway.TestClient, method: str, path: str, status: int) -> None:
    sent = body() if path == INFER else None
    own = client.request(method, path, json=sent, headers={"X-Request-Id": "order-17"})
    assert (own.status_code, own.headers["x-request-id"]) == (status, "order-17")
    made = [client.request(method, path, json=sent).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(len(each) < 32 for each in made)


def test_an_answer_to_what_is_no_request_has_one(client: gateway.TestClient) -> None:
    answer = client.post(INFER, content=b"x", headers={"Transfer-Encoding": "gzip"})
    assert answer.status_code >= 400
    assert answer.headers["x-request-id"]


@pytest.mark.slow
@on_loop
async def test_a_grpc_answer_has_the_id_that_its_client_gave_and_an_error_has_one_in_any_case() -> None:
    async with serving() as served:
        own = (("x-request-id", "order-17"),)
        call = served.stub.ModelInfer(infer_request(), metadata=own)
        await call
        assert dict(await call.initial_metadata())["x-request-id"] == "order-17"
        for metadata, expected in ((own, "order-17"), ((), None), ((("x-request-id", "two words"),), None)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await served.stub.ModelInfer(infer_request("nobody"), metadata=metadata)
            told = dict(failed.value.initial_metadata() or ()) | dict(failed.value.trailing_metadata() or ())
            assert told["x-request-id"] == expected or (expected is None and len(told["x-request-id"]) > 8)

        async def asked() -> Any:
            yield infer_request(value=666)

        stream = served.stub.ModelStreamInfer(asked(), metadata=own)
        assert [answer.error_message async for answer in stream] != [""]
        assert dict(await stream.initial_metadata())["x-request-id"] == "order-17"
