"""A gateway that is worth looking at: models with a promise and prices, an attack for a name, and an answer in parts."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from tests.rest_routes.serving import Served

HOSTILE = """<img src=x onerror="document.title='pwned'"><script>document.title='pwned'<-script>'"&amp;{{7*7}}%3Cb%3E"""
HOSTILE_BACKEND = HOSTILE[:45]
MODELS = f"""
models:
  - name: quick
    slo: {{p99_ms: 5000}}
    max_rows: 8
    routing: {{ejection: {{pause_s: 5}}}}
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 4]}}, {{name: MASK, datatype: BOOL, shape: [-1, 2], optional: true}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    backends:
      - kind: synthetic
        name: cheap
        output: sum
        fixed_ms: 1
        row_ms: 0
        sessions: 2
        usd_per_hour: 0.1
        faults: {{fail: 666}}
      # So dear that it is not the cheaper one either when the machine has made a run of the other's slow.
      - {{kind: synthetic, name: dear, output: sum, fixed_ms: 1, row_ms: 0, usd_per_hour: 2.4}}
  - name: {json.dumps(HOSTILE)}
    inputs: [{{name: {json.dumps(HOSTILE)}, datatype: BYTES, shape: [-1, 1]}}]
    outputs: [{{name: OUT, datatype: BYTES, shape: [-1, 1]}}]
    max_rows: 4
    backends: [{{kind: synthetic, name: {json.dumps(HOSTILE_BACKEND)}, fixed_ms: 0, row_ms: 0}}]
  - {{name: counts, max_rows: 0, backends: [{{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}}]}}
  - {{name: absent, load_at_start: false, backends: [{{kind: synthetic}}]}}
"""
_EJECTS = 666.0  # three requests with it that `cheap` gets, and it is ejected: the other backend answers them


def body(*values: float) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": values or (1, 2, 3, 4)}]}


def ask(served: Served, request: dict[str, Any], model: str = "quick") -> int:
    """Send one request; gives its status."""
    asked = urllib.request.Request(f"http://{served.url}/v2/models/{model}/infer", json.dumps(request).encode())
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code


def eject(served: Served) -> None:
    """Have `cheap` ejected."""
    for _ in range(10):
        for _ in range(3):
            assert ask(served, body(_EJECTS, 0, 0, 0)) == 200
        if model_of(fresh(served), "quick")["backends"][0]["state"] == "ejected":
            return
    raise AssertionError("`cheap` is not ejected")


def status(served: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{served.url}/v2/status", timeout=20) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def fresh(served: Served) -> dict[str, Any]:
    """A status that nobody has seen before: one is kept for half a second."""
    before = status(served)["time_s"]
    for _ in range(200):
        told = status(served)
        if told["time_s"] > before:
            return told
        time.sleep(0.01)
    raise AssertionError("the status stays the same")


def model_of(told: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in told["models"] if model["name"] == name)
