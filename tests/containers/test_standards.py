"""The contract as AWS has it in code: model-hosting-container-standards, and the SDK for Python as a client."""

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.commands.sagemaker import MODEL
from tests.containers.front_end import before
from tests.containers.standards import ANSWERS, CASES, ROWS, SESSION
from tests.rest_routes.serving import TIMEOUT_S, Served, serving
from tests.rest_routes.test_generate import events

RECORDED = json.loads(ANSWERS.read_text())
MODELS = """
models:
  - name: echo
    inputs: [{name: x, datatype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, datatype: FP32, shape: [-1, 2]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - {name: counts, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}]}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), MODELS) as found:
        yield found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_request_gets_the_status_that_aws_own_application_gives(served: Served, number: int) -> None:
    case, told = CASES[number], RECORDED["answers"][number]
    assert case._asdict() == {name: told[name] for name in case._fields}, "record anew: tests/containers/standards.py"
    connection = http.client.HTTPConnection(served.url, timeout=TIMEOUT_S)
    headers = {"X-Amzn-SageMaker-Target-Model": "echo"} | ({SESSION: case.session} if case.session else {})
    connection.request(case.method, case.path, case.body, headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == told["status"], body
    if answer.status >= 400:
        assert json.loads(body).keys() == {"error"}


def test_paths_and_the_models_place_are_those_of_aws() -> None:
    names = RECORDED["names"]
    assert names["routes"] == {"ping": ["GET", "/ping"], "invoke": ["POST", "/invocations"]}
    assert (names["model"].rstrip("/"), names["session"]) == (MODEL, SESSION)


# the SDK


@pytest.fixture(scope="module")
def sdk(served: Served) -> Iterator[Any]:
    session = pytest.importorskip("botocore.session").get_session()
    config = pytest.importorskip("botocore.config").Config(retries={"total_max_attempts": 1}, signature_version=unsigned())
    with before(served.url) as url:
        yield session.create_client("sagemaker-runtime", region_name="us-east-1", endpoint_url=url, config=config)


def unsigned() -> Any:
    return pytest.importorskip("botocore").UNSIGNED


def of_the_contract(sdk: Any, operation: str, answer: dict[str, Any]) -> None:
    """Headers that come back are what AWS's model of the API allows."""
    shape = sdk.meta.service_model.operation_model(operation).output_shape
    for name, member in shape.members.items():
        if isinstance(answer.get(name), str):
            assert len(answer[name]) <= member.metadata.get("max", 1024)
            pattern = member.metadata.get("pattern", "").replace(r"\p{ASCII}", "[\x00-\x7f]")
            assert re.fullmatch(pattern or ".*", answer[name]), name


def test_the_sdk_gets_an_answer_and_its_own_attributes_back(served: Served, sdk: Any) -> None:
    attributes = "model=echo;note=" + "~" * (1024 - len("model=echo;note="))
    answer = sdk.invoke_endpoint(
        EndpointName="e", Body=ROWS, ContentType="application/json", Accept="text/csv", CustomAttributes=attributes,
        TargetModel="echo.tar.gz", TargetVariant="v", TargetContainerHostname="c", InferenceId="i" * 64,
        InferenceComponentName="component", PrefixAwareId="p", EnableExplanations="`false`",
    )  # fmt: skip
    assert answer["Body"].read() == b"1.0,2.0\n"
    assert (answer["ContentType"], answer["CustomAttributes"]) == ("text/csv; charset=utf-8", attributes)
    of_the_contract(sdk, "InvokeEndpoint", answer)


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"Body": "{bad"}, 400, "failed to parse"),
        ({"Body": ROWS, "TargetModel": "none.tar.gz"}, 404, "is not found"),
        ({"Body": ROWS, "ContentType": "text/xml"}, 415, "is not taken"),
        ({"Body": ROWS, "Accept": "image/png"}, 406, "nothing of it is given"),
        ({"Body": ROWS, "SessionId": "NEW_SESSION"}, 400, "sessions are not kept"),
        ({"Body": json.dumps({"instances": [{"n" * 100_000: 1}]})}, 400, "n"),
        ({"Body": json.dumps({"inputs": {"n" * 100_000: 1}})}, 400, "n"),
        ({"Body": b"x" * 100_000, "ContentType": "text/csv"}, 400, "x"),
        ({"Body": ROWS, "Accept": "a" * 1000}, 406, "a"),
    ],
)  # fmt: skip
def test_the_sdk_raises_the_containers_own_words(
    served: Served, sdk: Any, asked: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(sdk.exceptions.ModelError) as caught:
        sdk.invoke_endpoint(EndpointName="e", **{"ContentType": "application/json", "TargetModel": "echo"} | asked)
    told = caught.value.response
    assert told["OriginalStatusCode"] == status
    error = json.loads(told["OriginalMessage"])["error"]
    assert said in error
    most = sdk.meta.service_model.shape_for("ModelError").members["OriginalMessage"].metadata["max"]
    assert len(told["OriginalMessage"]) <= most, "more of it is not passed on"


def test_the_sdk_reads_an_answer_in_parts_as_they_come(served: Served, sdk: Any) -> None:
    body = json.dumps({"inputs": {"text": ["a"], "n": [3]}})
    answer = sdk.invoke_endpoint_with_response_stream(
        EndpointName="e", Body=body, ContentType="application/json", Accept="text/event-stream", CustomAttributes="model=counts"
    )
    assert answer["ContentType"] == "text/event-stream; charset=utf-8"
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    assert [each["outputs"]["index"] for each in events(b"".join(parts))] == [[0], [1], [2]]
    of_the_contract(sdk, "InvokeEndpointWithResponseStream", answer)
