"""Requests to a container of SageMaker, and what AWS's own code says to them: model-hosting-container-standards, see `record`.

    python -m tests.containers.standards ANSWERS.json

writes what an application of that package answers, in an environment that has it, of PyPI (0.1.16, with python-multipart and
httpx, which FastAPI's test client needs). Nothing of the gateway is imported then.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ANSWERS: Final = Path(__file__).with_name("standards_answers.json")
SESSION: Final = "X-Amzn-SageMaker-Session-Id"


class Case(NamedTuple):
    """A request. session: the value of its header."""

    method: str
    path: str
    body: str = ""
    session: str = ""


ROWS: Final = '{"instances": [[1, 2]]}'
CASES: Final = (
    Case("GET", "/ping"),
    Case("DELETE", "/ping"),
    Case("POST", "/invocations", ROWS),
    Case("GET", "/invocations"),
    Case("PUT", "/invocations", ROWS),
    Case("POST", "/invocations", "{bad"),
    Case("POST", "/invocations", ""),
    Case("POST", "/invocations", ROWS, "0bd5cafe"),
    Case("POST", "/invocations", '{"requestType": "NEW_SESSION"}', "NEW_SESSION"),
    Case("POST", "/invocations", '{"requestType": "NEW_SESSION"}'),
    Case("POST", "/invocations", '{"requestType": "CLOSE"}', "0bd5cafe"),
    Case("POST", "/invocations", '{"requestType": "ODD"}'),
    Case("POST", "/invocations", '{"requestType": "CLOSE", "more": 1}', "0bd5cafe"),
    Case("POST", "/adapters", '{"name": "a", "src": "b"}'),
    Case("DELETE", "/adapters/a"),
    Case("GET", "/nothing"),
)


def record(path: Path) -> None:
    """Write what the package says of names, and to CASES: one application with two handlers, and no sessions."""
    from fastapi import FastAPI, Request, Response
    from fastapi.testclient import TestClient
    from model_hosting_container_standards import sagemaker
    from model_hosting_container_standards.sagemaker.config import SageMakerDefaults
    from model_hosting_container_standards.sagemaker.sagemaker_router import get_sagemaker_route_config
    from model_hosting_container_standards.sagemaker.sessions.models import SageMakerSessionHeader

    @sagemaker.custom_ping_handler
    async def ping() -> Response:
        return Response(status_code=200)

    @sagemaker.custom_invocation_handler
    @sagemaker.stateful_session_manager()
    async def invoke(raw_request: Request) -> dict[str, Any]:
        return {"predictions": (await raw_request.json())["instances"]}

    client = TestClient(sagemaker.bootstrap(FastAPI()), raise_server_exceptions=False)
    routes = {name: get_sagemaker_route_config(name) for name in ("ping", "invoke")}
    names = {
        "routes": {name: [route.method, route.path] for name, route in routes.items()},
        "model": SageMakerDefaults.SCRIPT_PATH,
        "session": SageMakerSessionHeader.SESSION_ID,
    }
    answers = []
    for case in CASES:
        headers = {SESSION: case.session} if case.session else {}
        answer = client.request(case.method, case.path, content=case.body, headers=headers)
        answers.append({**case._asdict(), "status": answer.status_code})
    path.write_text(json.dumps({"names": names, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
