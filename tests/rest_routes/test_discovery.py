"""What whoever knows nothing but the address can find out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from backends.base import ModelSpec, TensorSpec
from gateway.access.rules import digest_of
from gateway.config import Limits
from gateway.edges.rest_routes import RestRoutes
from gateway.protocols.openapi import describe_api
from tests.rest_routes.serving import MODELS, Served, serving
from tests.rest_routes.test_generate import events
from tests.rest_routes.test_routes import ask, row

HALVES = """\
  - name: halves
    inputs: [{name: HALF, datatype: FP16, shape: [-1, 2]}, {name: BRAIN, datatype: BF16, shape: [-1, 2]}]
    outputs: [{name: OUT0, datatype: FP16, shape: [-1, 2]}, {name: OUT1, datatype: BF16, shape: [-1, 2]}]
    backends: [{kind: synthetic, fixed_ms: 0}]
"""
COUNTS = """\
  - {name: counts, max_rows: 0, backends: [{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}]}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("rest"), MODELS + HALVES + COUNTS) as running:
        yield running


def test_the_address_itself_says_what_is_here(served: Served) -> None:
    answer = ask(served, "GET", "/")
    found = answer.json()
    assert (answer.status, found["status"], found["name"], found["version"]) == (
        200,
        "alive",
        "serving-gateway",
        ask(served, "GET", "/v2").json()["version"],
    )
    assert {"name": "echo", "state": "READY", "url": "/v2/models/echo"}.items() <= found["models"][0].items()
    for link in (*found["links"].values(), *(model["url"] for model in found["models"] if model["state"] == "READY")):
        assert ask(served, "GET", link).status == 200, link


def test_models_are_listed_with_the_state_of_each_version(served: Served) -> None:
    for path in ("/v2/models", "/v2/models/"):
        models = {model["name"]: model for model in ask(served, "GET", path).json()["models"]}
        assert models["pair"] == {
            "name": "pair",
            "state": "READY",
            "versions": [{"version": "1", "state": "READY"}, {"version": "2", "state": "READY"}],
            "url": "/v2/models/pair",
        }
        assert models["later"]["state"] == "UNAVAILABLE"
        assert models["a+b cé"]["url"] == "/v2/models/a%2Bb%20c%C3%A9"


def test_another_method_is_told_in_words(served: Served) -> None:
    assert ask(served, "GET", "/v2/models/echo/infer").error == "Method Not Allowed: expected POST"


def api(served: Served) -> dict[str, Any]:
    document: dict[str, Any] = ask(served, "GET", "/openapi.json").json()
    return document


@pytest.mark.slow
def test_the_api_is_valid_openapi(served: Served) -> None:
    OpenAPIV31SpecValidator(api(served)).validate()


def test_the_api_names_every_path_that_is_served_and_no_other(served: Served) -> None:
    routes = RestRoutes(served.repository, Limits(), scrape=lambda accept: pytest.fail("is not asked"))
    expected = {"/", "/openapi.json", "/ping", "/metrics", "/invocations", "/execution-parameters", "/v1/models"}
    for at in ("/v1/models/{model}", "/v1/models/{model}/versions/{version}"):
        expected |= {at, f"{at}:predict"}
    expected |= {f"/v2/{key}".rstrip("/") for key in routes._server_actions}
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        expected |= {f"{prefix}/{key}".rstrip("/") for key in routes._model_actions}
    expected |= {f"/v2/repository/models/{{model}}/{verb}" for verb in routes._control_actions}
    expected |= {f"/v2/{kind}/region/{{region}}/{verb}" for kind, verbs in routes._region_actions.items() for verb in verbs}
    for served_model in served.repository.ready_models():
        at = f"/v2/models/{quote(served_model.name)}"
        verbs = {"infer"} if not served_model.spec.decoupled else set()
        verbs |= {"generate", "generate_stream"} if served_model.name != "halves" else set()  # which JSON has no form for
        expected |= {f"{prefix}/{verb}" for prefix in (at, f"{at}/versions/{served_model.version}") for verb in verbs}
    paths = api(served)["paths"]
    assert set(paths) == expected
    for path, method in [(path, method) for path, operations in paths.items() for method in operations]:
        model = "later" if "repository" in path else "echo"
        at = path.replace("{model}", model).replace("{version}", "1").replace("{region}", "r")
        answer = ask(served, method.upper(), at)
        assert answer.status != 405, path
        assert not answer.body.startswith(b'{"error":"Not Found'), path


def schema(document: dict[str, Any], path: str, part: str) -> Any:
    """A validator of the requests at a path, or of the answers there."""
    post = document["paths"][path]["post"]
    body = post["requestBody"] if part == "request" else post["responses"]["200"]
    content = body["content"]
    described = (
        content["application/json"]["schema"] if "application/json" in content else content["text/event-stream"]["x-itemSchema"]
    )
    return jsonschema.Draft202012Validator(described | {"components": document["components"]})


@pytest.mark.slow
def test_each_models_example_is_served_and_the_answer_is_as_described(served: Served) -> None:
    document = api(served)
    tried = 0
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        of_a_model = path.endswith(("/infer", "/generate", "/generate_stream")) and "{" not in path
        assert ("example" in body) == (of_a_model and "halves" not in path), path
        if "example" not in body:
            continue
        schema(document, path, "request").validate(body["example"])
        answer = ask(served, "POST", path, body["example"])
        assert answer.status == 200, (path, answer.body)
        objects = events(answer.body) if path.endswith("_stream") else [answer.json()]
        assert objects
        for each in objects:
            schema(document, path, "response").validate(each)
        tried += 1
    assert tried >= 12 * 3


def test_classes_are_described_too(served: Served) -> None:
    asked = row(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 2}}])
    asked = json.loads(json.dumps(asked))  # of lists
    path = "/v2/models/echo/infer"
    document = api(served)
    schema(document, path, "request").validate(asked)
    schema(document, path, "response").validate(ask(served, "POST", path, asked).json())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("pair", {"inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}),
        ("echo", {"inputs": []}),
        ("echo", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 5], "data": [1] * 5}]}),
        ("echo", {"inputs": [{"name": "INPUT0", "datatype": "FP64", "shape": [1, 4], "data": [1] * 4}]}),
        ("echo", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": ["1"] * 4}]}),
        ("echo", {"inputs": [{"name": "OTHER", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]}),
        ("echo", row(outputs=[{"name": "nope"}])),
    ],
)
def test_what_the_description_refuses_the_server_refuses(served: Served, model: str, body: dict[str, Any]) -> None:
    path = f"/v2/models/{model}/infer"
    assert not schema(api(served), path, "request").is_valid(json.loads(json.dumps(body)))
    assert ask(served, "POST", path, body).status == 400


def test_an_event_that_is_an_error_is_described_too(served: Served) -> None:
    path = "/v2/models/counts/generate_stream"
    document = api(served)
    asked = {"text": "a", "n": [2], "fails_at": 1, "parameters": {"gap_s": 0.0}, "id": "7"}
    schema(document, path, "request").validate(asked)
    given = events(ask(served, "POST", path, asked).body)
    assert [next(iter(each)) for each in given] == ["id", "error"]
    for each in given:
        schema(document, path, "response").validate(each)
    assert not schema(document, path, "request").is_valid({"text": "a"})
    assert not schema(document, path, "request").is_valid({"text": 1, "n": 1})


def test_the_api_follows_what_is_loaded(served: Served) -> None:
    assert "/v2/models/later/infer" not in api(served)["paths"]
    assert ask(served, "POST", "/v2/repository/models/later/load").status == 200
    assert "/v2/models/later/infer" in api(served)["paths"]
    assert ask(served, "POST", "/v2/repository/models/later/unload").status == 200
    assert "/v2/models/later/infer" not in api(served)["paths"]


def test_where_keys_are_asked_for_the_api_says_which_and_how_it_refuses(tmp_path: Path) -> None:
    keys = f"keys: [{{name: all, hash: 'sha256:{digest_of(b'k').hex()}', scopes: [infer, status]}}]"
    (tmp_path / "keys.yaml").write_text(keys)
    access = f"access: {{keys: '{tmp_path / 'keys.yaml'}', open: [metrics]}}"
    with serving(tmp_path, MODELS.replace("server: {", f"server: {{{access}, ")) as locked:
        document = ask(locked, "GET", "/openapi.json", X_Api_Key="k").json()
        OpenAPIV31SpecValidator(document).validate()
        assert document["components"]["securitySchemes"].keys() == {"bearer", "key"}
        concrete = {"model": "echo", "version": "1", "region": "r"}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                asked = ask(locked, method.upper(), path.format(**concrete))
                refusals = {"401", "403", "429"} & operation["responses"].keys()
                assert (asked.status == 401) == bool(operation["security"]) == bool(refusals), (method, path, asked.status)
                assert not operation["security"] or "error" in asked.json()
        wanted = {
            "/v2/models/echo/infer": [{"bearer": ["infer"]}, {"key": ["infer"]}],
            "/v2/models/{model}/versions/{version}/why": [{"bearer": ["status"]}, {"key": ["status"]}],
            "/v2/repository/models/{model}/load": [{"bearer": ["admin"]}, {"key": ["admin"]}],
            "/": [{"bearer": ["infer"]}, {"key": ["infer"]}],
            "/metrics": [],
            "/ping": [],
        }
        for path, security in wanted.items():
            assert next(each["security"] for each in document["paths"][path].values()) == security, path
        posts = {path: each["post"] for path, each in document["paths"].items() if "post" in each}
        limited = [path for path, each in posts.items() if "429" in each["responses"]]
        assert {path.rpartition("/")[2].rpartition(":")[2] for path in limited} == {
            "infer", "generate", "generate_stream", "predict", "invocations",
        }  # fmt: skip


def test_where_none_are_the_api_says_nothing_of_keys(served: Served) -> None:
    document = api(served)
    assert "securitySchemes" not in document["components"]
    assert not any("security" in each for path in document["paths"].values() for each in path.values())


def test_a_request_too_large_for_an_example_is_not_even_made() -> None:
    spec = ModelSpec("", (TensorSpec("x", "UINT8", (-1, 1 << 40)),), (TensorSpec("y", "BOOL", (-1,)),), 8)
    document = describe_api([("m", "1", spec)], metrics=False)
    assert "example" not in document["paths"]["/v2/models/m/infer"]["post"]["requestBody"]["content"]["application/json"]


@pytest.mark.slow
def test_names_that_are_alike_once_quoted_have_schemas_of_their_own() -> None:
    spec = ModelSpec("", (TensorSpec("x", "FP32", ()),), (TensorSpec("y", "BOOL", (-1,)),), 0)
    names = ["a b", "a/b{c}", "a_b", "ä", "a" * 128]
    document = describe_api([(name, version, spec) for name in names for version in ("2", "1")], metrics=False)
    OpenAPIV31SpecValidator(json.loads(json.dumps(document))).validate()
    paths = [path for path in document["paths"] if path.endswith("/infer") and "/{model}" not in path]
    assert len(paths) == 2 * len(names) + len(names)
