"""Starts and ends what benchmarks/gpu.py loads: this gateway and Triton, with one `minilm` on a GPU, and checks them.

Imports little, as it is to run where little is installed.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from benchmarks.lengths import LENGTHS
from benchmarks.peer_embedders import TRITON_CODE, TRITON_CONFIG, TRITON_RAGGED
from tests import triton_server

ROOT: Final = Path(__file__).resolve().parent.parent
ONNX, ONNX_FP16 = ROOT / "models/minilm.onnx", ROOT / "models/minilm-fp16.onnx"
TORCH: Final = f"{ROOT / 'configs/examples/minilm.py'}:embedder"
MAX_ROWS: Final = 64
BUCKETS: Final = (16, 32, 48, 64, 96, 128)  # where each shape is recorded or compiled
GATEWAY: Final[Mapping[str, dict[str, Any]]] = {
    "ort": {"kind": "onnxruntime", "model": str(ONNX)},
    "ort-fp16": {"kind": "onnxruntime", "model": str(ONNX_FP16)},
    "ort-fp16-graphs": {"kind": "onnxruntime", "model": str(ONNX_FP16), "cuda_graphs": True},
    "torch": {"kind": "torch", "model": TORCH},
    "torch-bf16-graphs": {"kind": "torch", "model": TORCH, "precision": "bf16", "cuda_graphs": True},
    "torch-bf16-compile": {"kind": "torch", "model": TORCH, "precision": "bf16", "compile": True},
}
TRITON: Final = {"triton-ort": str(ONNX), "triton-ort-fp16": str(ONNX_FP16), "triton-torch": TORCH}
START_S: Final = 180.0  # torch.compile takes a minute

EMBEDDER: Final = """import contextlib
import importlib.util
import os

import numpy as np

MODEL, DEVICE = os.environ["PEER_MODEL"], os.environ["PEER_DEVICE"]
if np.__version__.startswith("2"):
    raise ImportError("Triton's stub needs numpy 1, found " + np.__version__ + " in " + np.__file__)


class Embedder:
    def __init__(self):
        self._embed = self._onnx() if MODEL.endswith(".onnx") else self._torch()

    def run(self, requests):
        longest = max(len(ids) for ids, _ in requests)
        tokens, mask = (np.zeros((len(requests), longest), np.int64) for _ in range(2))
        for at, (ids, attended) in enumerate(requests):
            tokens[at, : len(ids)] = ids
            mask[at, : len(attended)] = attended
        return self._embed(tokens, mask).astype(np.float32, copy=False)

    def _onnx(self):
        if DEVICE == "cuda":
            with contextlib.suppress(ImportError):
                import torch  # loads CUDA's libraries, wherever they lie
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        if DEVICE == "cuda":
            if hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()
            providers.insert(0, ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}))
        session = onnxruntime.InferenceSession(MODEL, options, providers=providers)
        if DEVICE == "cuda" and session.get_providers()[0] != "CUDAExecutionProvider":
            raise RuntimeError("ONNX Runtime fell back to the CPU")
        return lambda tokens, mask: session.run(["embedding"], {"input_ids": tokens, "attention_mask": mask})[0]

    def _torch(self):
        import torch

        torch.set_num_threads(1)
        file, _, factory = MODEL.rpartition(":")
        spec = importlib.util.spec_from_file_location("minilm", file)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        module = getattr(found, factory)().to(DEVICE)

        def embed(*arrays):
            with torch.inference_mode():
                return module(*(torch.from_numpy(array).to(DEVICE) for array in arrays)).cpu().numpy()

        return embed
"""


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    port: int
    pid: int


# what is served


def configuration(name: str, device: str, sessions: int, slo_ms: float = 0.0) -> dict[str, Any]:
    """The gateway's. slo_ms: 0: none."""
    backend = GATEWAY[name] | {"sessions": sessions} | ({"device": device} if device != "cpu" else {})
    recorded = backend.get("cuda_graphs") or backend.get("compile")
    tokens = [{"name": each, "datatype": "INT64", "shape": [-1, -1]} for each in ("input_ids", "attention_mask")]
    model = {
        "name": "minilm",
        "inputs": tokens,
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}],
        "max_rows": MAX_ROWS,
        "ragged": {"pad": {"input_ids": 0, "attention_mask": 0}} | ({"buckets": list(BUCKETS)} if recorded else {}),
        "backends": [backend],
    }
    return {"models": [model | ({"slo": {"p99_ms": slo_ms}} if slo_ms else {})]}


@contextlib.contextmanager
def gateway(name: str, device: str, sessions: int, slo_ms: float, folder: Path) -> Iterator[Server]:
    file, log = folder / "gateway.yaml", folder / "gateway.log"
    file.write_text(yaml.safe_dump(configuration(name, device, sessions, slo_ms)))
    command = [sys.executable, "-m", "gateway", "serve", str(file), "--no-ray", "--quiet"]
    command += ["--http-port", "0", "--grpc-port", "0"]
    with log.open("w") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while "gateway ready http=" not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("did not become ready")
            time.sleep(0.1)
        address = text.split("gateway ready http=")[1].split()[0]
        yield Server(name, int(address.rpartition(":")[2]), process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def triton(name: str, device: str, sessions: int, folder: Path) -> Iterator[Server]:
    config = TRITON_CONFIG % {"rows": MAX_ROWS, "ragged": TRITON_RAGGED, "queue_policy": ""}
    config = config.replace("count: 2", f"count: {sessions}")
    own = next((triton_server.VENV / "lib").glob("python3.*"), triton_server.VENV) / "site-packages"
    told = os.environ.get("PYTHONPATH", "").split(":")
    places = [str(own), *(place for place in sys.path if place and (place.endswith("-packages") or place in told))]
    code = f"import sys\n\nsys.path[:0] = {places!r}  # the stub knows no PYTHONPATH\n{TRITON_CODE}"
    peer = {"variables": {"PEER_MODEL": TRITON[name], "PEER_DEVICE": device}, "packages": str(own)}
    files = {"embedder.py": EMBEDDER, "peer.json": json.dumps(peer)}
    triton_server.write_model(folder / "models", "minilm", config, code, files)
    with triton_server.triton_server(folder) as found:
        yield Server(name, int(found.http_url.rpartition(":")[2]), found.pid)


# whether it is right


def body(length: int) -> bytes:
    tensors = {"input_ids": [101, *range(2000, 1998 + length), 102], "attention_mask": [1] * length}
    told = [{"name": name, "datatype": "INT64", "shape": [1, length], "data": data} for name, data in tensors.items()]
    return json.dumps({"inputs": told}).encode()


@cache
def references() -> dict[int, np.ndarray]:
    """By length, from ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(ONNX), providers=["CPUExecutionProvider"])
    found = {}
    for length in LENGTHS:
        feeds = {each["name"]: np.array([each["data"]], np.int64) for each in json.loads(body(length))["inputs"]}
        found[length] = np.asarray(session.run(["embedding"], feeds)[0][0], np.float64)
    return found


def answer(port: int, length: int, timeout_s: float) -> np.ndarray:
    """Raises: RuntimeError, OSError or HTTPException, if there is none."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
        connection.request("POST", "/v2/models/minilm/infer", body(length), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {text[:200].decode(errors='replace')}")
    return np.asarray(json.loads(text)["outputs"][0]["data"], np.float64)


def cosine(server: Server) -> float:
    """The lowest of all lengths, asked at once, twice. Who has no answer is asked again. Raises: RuntimeError."""
    expected = references()
    until = time.monotonic() + START_S / 2

    def one(length: int) -> float:
        while True:
            try:
                found = answer(server.port, length, 60.0)
            except (OSError, http.client.HTTPException, RuntimeError) as exc:  # not ready, or too late for its SLO
                if time.monotonic() > until:
                    raise RuntimeError(f"no answer: {exc}") from exc
                time.sleep(0.2)
                continue
            return float(found @ expected[length] / (np.linalg.norm(found) * np.linalg.norm(expected[length])))

    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        lowest = min(pool.map(one, LENGTHS * 2))
    least = 0.99 if "16" in server.name else 0.999
    if not lowest > least:
        raise RuntimeError(f"wrong answers: cosine {lowest:.5f} with the reference, expected above {least}")
    return lowest


def last_words(folder: Path) -> str:
    lines = [line.strip() for log in folder.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
    lines = [line[:400] for line in lines if line and not line.startswith(("|", "+", "error: creating server"))]  # Triton's
    return " / ".join(([line for line in lines if "rror" in line] or lines)[-2:])
