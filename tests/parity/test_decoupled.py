"""One decoupled `model.py` on a real Triton, in a gateway, and on that Triton behind a gateway: clients see the same."""

import asyncio
import contextlib
import http.client
import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import yaml
from tritonclient.utils import InferenceServerException

from backends import triton_python_backend_utils as pb_utils
from backends.triton_python import lend_utils
from tests.served.gateway_process import served
from tests.triton_server import TritonServer, require_triton, triton_server, write_model

lend_utils()
from tests import decoupled_model  # noqa: E402  # it imports what was lent

pytestmark = [pytest.mark.slow, pytest.mark.triton]

TIMEOUT_S = 20.0
TRITON, OURS, BEFORE = "triton", "gateway", "gateway before triton"
HERE = (OURS, BEFORE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model is served. folder: of the version that runs."""

    http: str
    grpc: str
    folder: Path

    def noted(self, text: str) -> bool:
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                if text in (self.folder / "notes").read_text():
                    return True
            time.sleep(0.01)
        return False


REFUSES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()) for request in requests]

    def answer(self, said):
        code = said[0, 0].decode()
        if code in ("", "1"):  # 1: what a gateway tries it with
            return pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", np.zeros(said.shape, np.int32))])
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("said so", getattr(pb_utils.TritonError, code)))
"""
REFUSES_CONFIG = """
max_batch_size: 8
input [{ name: "SCRIPT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "VALUE" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""


def lay(repository: Path) -> Path:
    write_model(repository, "refuses", REFUSES_CONFIG, REFUSES)
    write_model(repository, "parts", decoupled_model.CONFIG, Path(decoupled_model.__file__).read_text())
    return repository / "parts" / "1"


def before(triton: TritonServer, folder: Path, **options: Any) -> Path:
    config = folder / "before.yaml"
    backend = {"kind": "triton", "url": triton.grpc_url, "model": "parts", **options}
    models = [
        {"name": "parts", "max_rows": 0, "backends": [backend]},
        {"name": "refuses", "max_rows": 8, "backends": [{**backend, "model": "refuses"}]},
    ]
    config.write_text(yaml.safe_dump({"models": models}))
    return config


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    require_triton()
    folder = tmp_path_factory.mktemp("decoupled")
    there, here = lay(folder / "models"), lay(folder / "ours")
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(triton_server(folder))
        ours = stack.enter_context(served(folder / "ours", "--no-ray"))
        proxy = stack.enter_context(served(before(triton, folder, sessions=16), "--no-ray"))
        yield {
            TRITON: Place(triton.http_url, triton.grpc_url, there),
            OURS: Place(ours.http, ours.grpc, here),
            BEFORE: Place(proxy.http, proxy.grpc, there),
        }


def inputs(script: str) -> list[Any]:
    given = tritonclient.grpc.InferInput("SCRIPT", [1], "BYTES")
    given.set_data_from_numpy(np.array([script.encode()], object))
    return [given]


def seen(result: Any, error: Exception | None) -> Any:
    if error is not None:
        return "an error"
    reply = result.get_response()
    parameters = {name: value.bool_param for name, value in reply.parameters.items()}
    tensors = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in reply.outputs]
    values = [result.as_numpy(name).tolist() for name, _, _ in tensors]
    return reply.model_name, reply.model_version, reply.id, parameters, tensors, values


def requests(scripts: dict[str, str], **options: Any) -> list[dict[str, Any]]:
    """scripts: by request id."""
    return [{"model_name": "parts", "inputs": inputs(script), "request_id": key, **options} for key, script in scripts.items()]


def streamed(place: Place, scripts: dict[str, str], **options: Any) -> list[Any]:
    """By tritonclient's blocking stream."""
    answers: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(place.grpc) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), stream_timeout=TIMEOUT_S)
        for request in requests(scripts, **options):
            client.async_stream_infer(**request)
        client.stop_stream()  # waits for the answers
    return [seen(*answer) for answer in answers]


def streamed_aio(place: Place, scripts: dict[str, str], **options: Any) -> list[Any]:
    """By tritonclient's asyncio stream."""

    async def given() -> Any:
        for request in requests(scripts, **options):
            yield request

    async def main() -> list[Any]:
        async with tritonclient.grpc.aio.InferenceServerClient(place.grpc) as client:
            return [seen(*answer) async for answer in client.stream_infer(given(), stream_timeout=TIMEOUT_S)]

    return asyncio.run(main())


@pytest.mark.parametrize("wants_final", [False, True], ids=["", "empty final"])
@pytest.mark.parametrize(
    "script",
    ["2 3 4 !", "2 3 4!", "!", "error!", "raise", "2 error!", "2 raise", "thread 2 s20 3 !", "thread !", "twice !", "wide 2!"],
)
def test_clients_get_the_same_parts_as_from_triton(places: dict[str, Place], script: str, wants_final: bool) -> None:
    for stream in (streamed, streamed_aio):
        found = {name: stream(place, {"a": script}, enable_empty_final_response=wants_final) for name, place in places.items()}
        assert found[OURS] == found[TRITON]
        assert found[BEFORE] == found[TRITON]


@pytest.mark.parametrize("name", HERE)
def test_an_error_ends_an_answer_where_triton_would_go_on(places: dict[str, Place], name: str) -> None:
    script = {"a": "thread 2 error 3 !"}
    assert [answer if answer == "an error" else answer[-1] for answer in streamed(places[TRITON], script)] == [
        [[2]],
        "an error",
        [[3]],
    ]
    assert [answer if answer == "an error" else answer[-1] for answer in streamed(places[name], script)] == [[[2]], "an error"]


@pytest.mark.parametrize("name", HERE)
def test_an_error_reaches_its_client_while_the_model_still_works(places: dict[str, Place], name: str) -> None:
    for words, parts in (("error", []), ("2 error", [[[2]]])):
        began = time.monotonic()
        answers = streamed(places[name], {"a": f"{words} s3000 !"}, timeout=2_000_000)
        assert time.monotonic() - began < 1.5
        assert [answer if answer == "an error" else answer[-1] for answer in answers] == [*parts, "an error"]


def test_an_answer_in_one_piece_is_refused_as_by_triton(places: dict[str, Place]) -> None:
    for place in places.values():
        with (
            tritonclient.grpc.InferenceServerClient(place.grpc) as client,
            pytest.raises(InferenceServerException, match="decoupled") as refused,
        ):
            client.infer("parts", inputs("2 !"))
        assert "UNIMPLEMENTED" in refused.value.status()
        body = {"inputs": [{"name": "SCRIPT", "datatype": "BYTES", "shape": [1], "data": ["2 !"]}]}
        with contextlib.closing(http.client.HTTPConnection(place.http, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v2/models/parts/infer", json.dumps(body))
            answer = connection.getresponse()
            assert answer.status == 501
            assert "decoupled" in json.load(answer)["error"]


def test_the_policy_is_in_the_configuration(places: dict[str, Place]) -> None:
    for place in places.values():
        with tritonclient.grpc.InferenceServerClient(place.grpc) as client:
            assert client.get_model_config("parts").config.model_transaction_policy.decoupled


def test_many_requests_of_one_stream_each_get_their_own_parts_in_order(places: dict[str, Place]) -> None:
    scripts = {
        f"r{number}": f"{'thread ' if number % 2 else ''}{number} s{number % 5} {number + 100} {number + 200} !"
        for number in range(2, 18)
    }
    for place in places.values():
        answers = streamed(place, scripts, enable_empty_final_response=True)
        for number in range(2, 18):
            own = [answer for answer in answers if answer[2] == f"r{number}"]
            assert [answer[-1] for answer in own] == [[[number]], [[number + 100]], [[number + 200]], []]
            assert [answer[3]["triton_final_response"] for answer in own] == [False, False, False, True]


# Not before Triton, where it is told only after `timeout_s`: Triton may die of it.
@pytest.mark.parametrize("name", [TRITON, OURS])
@pytest.mark.parametrize("thread", ["", "thread "])
@pytest.mark.parametrize(("script", "notes"), [("2 wait 3 !", "cancelled: True True"), ("endless !", "endless: ")])
def test_a_stream_that_is_cancelled_ends_its_model(
    places: dict[str, Place], name: str, thread: str, script: str, notes: str
) -> None:
    place = places[name]
    (place.folder / "notes").unlink(missing_ok=True)
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(place.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(**requests({"a": f"{thread}{script}"})[0])
        assert seen(*answers.get(timeout=TIMEOUT_S)) != "an error"
        client.stop_stream(cancel_requests=True)
    assert place.noted(notes)
    scripts = {str(number): "7 !" for number in range(3)}  # more than there are instances
    assert [answer[-1] for answer in streamed(place, scripts)] == [[[7]]] * 3


def test_a_triton_that_is_killed_among_the_parts_ends_the_stream_with_one_error(tmp_path: Path) -> None:
    require_triton()
    lay(tmp_path / "models")
    answers: queue.Queue[Any] = queue.Queue()
    with (
        triton_server(tmp_path) as triton,
        served(before(triton, tmp_path), "--no-ray") as gateway,
        tritonclient.grpc.InferenceServerClient(gateway.grpc) as client,
    ):
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
        client.async_stream_infer(**requests({"a": "thread endless !"}, enable_empty_final_response=True)[0])
        found = [seen(*answers.get(timeout=TIMEOUT_S))]
        os.kill(triton.pid, signal.SIGKILL)
        client.stop_stream()
        while not answers.empty():
            found.append(seen(*answers.get()))
    assert found[0] != "an error"
    assert found.index("an error") == len(found) - 1


@pytest.mark.parametrize("code", ["", *(code.name for code in pb_utils.ErrorCode if code.name != "UNKNOWN")])
def test_clients_get_the_statuses_of_triton_for_what_a_model_refuses(places: dict[str, Place], code: str) -> None:
    def rest(place: Place) -> int:
        body = {"inputs": [{"name": "SCRIPT", "datatype": "BYTES", "shape": [1, 1], "data": [code]}]}
        with contextlib.closing(http.client.HTTPConnection(place.http, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v2/models/refuses/infer", json.dumps(body))
            return connection.getresponse().status

    def grpc(place: Place) -> str:
        with tritonclient.grpc.InferenceServerClient(place.grpc) as client:
            given = tritonclient.grpc.InferInput("SCRIPT", [1, 1], "BYTES")
            given.set_data_from_numpy(np.array([[code.encode()]], object))
            try:
                client.infer("refuses", [given])
            except InferenceServerException as exc:
                return str(exc.status())
            return "OK"

    assert grpc(places[OURS]) == grpc(places[TRITON])
    if code == "INVALID_ARG":
        assert (grpc(places[BEFORE]), rest(places[BEFORE])) == ("StatusCode.INVALID_ARGUMENT", 400)
    # Nobody is left to read what is cancelled here.
    assert rest(places[OURS]) == (499 if code == "CANCELLED" else rest(places[TRITON]))
