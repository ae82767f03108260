"""The peers that benchmarks/peers.py installs: what each is made of, how it is set, and the program that serves `linear` by it.

Every program takes the port and the model's file, and answers v2 JSON at the same path. Each batches as the page of its
documentation that stands beside it describes. The values, which these pages leave to the user, are ours: batches of 64, and no
wait where that can be set.
"""

from dataclasses import dataclass
from typing import Final

RUNTIME: Final = ("onnxruntime==1.32.0",)  # as the gateway's own environment has it


@dataclass(frozen=True)
class Installed:
    """packages: pinned. source: a page of its documentation. files: by name. command: behind `python`; {port} is filled in."""

    packages: tuple[str, ...]
    files: dict[str, str]
    command: tuple[str, ...]
    settings: str
    source: str


SESSION: Final = """import numpy as np
import onnxruntime


class Session:
    def __init__(self, model):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, rows):
        return self._session.run(None, {"INPUT0": rows})[0]


def row(tensor):
    return np.asarray(tensor["data"], np.float32).reshape(tensor["shape"])


def told(output):
    return {"name": "OUTPUT0", "datatype": "FP32", "shape": list(output.shape), "data": output.ravel().tolist()}
"""

LITSERVE: Final = """import os
import sys

import litserve as ls
import numpy as np
from session import Session, row, told


class Linear(ls.LitAPI):
    def setup(self, device):
        self.session = Session(os.environ["PEER_MODEL"])

    def decode_request(self, request):
        return row(request["inputs"][0])

    def batch(self, inputs):
        return np.concatenate(inputs)

    def predict(self, rows):
        return self.session.run(rows)

    def unbatch(self, output):
        return [output[index : index + 1] for index in range(len(output))]

    def encode_response(self, output):
        return {"model_name": "linear", "model_version": "1", "outputs": [told(output)]}


if __name__ == "__main__":
    api = Linear(max_batch_size=64, batch_timeout=0.0, api_path="/v2/models/linear/infer")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
"""

BENTO: Final = """import os

import bentoml
import numpy as np
from session import Session, row, told


@bentoml.service(traffic={"timeout": 30}, workers=1)
class Linear:
    def __init__(self):
        self.session = Session(os.environ["PEER_MODEL"])

    @bentoml.api(route="/v2/models/linear/infer", batchable=True, max_batch_size=64, max_latency_ms=1000)
    def infer(self, inputs: list[dict]) -> list[dict]:
        output = self.session.run(np.concatenate([row(each) for each in inputs]))
        return [told(output[index : index + 1]) for index in range(len(output))]
"""

MLSERVER: Final = """import os

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from session import Session


class Linear(MLModel):
    async def load(self):
        self.session = Session(os.environ["PEER_MODEL"])
        return True

    async def predict(self, payload):
        output = self.session.run(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name="linear", outputs=[NumpyCodec.encode_output("OUTPUT0", output)])
"""

INSTALLED: Final = {
    "litserve": Installed(
        ("litserve==0.2.19", *RUNTIME),
        {"session.py": SESSION, "server.py": LITSERVE},
        ("server.py", "{port}"),
        "max_batch_size 64, batch_timeout 0, fast_queue, one worker",
        "https://lightning.ai/docs/litserve/features/batching",
    ),
    "bentoml": Installed(
        ("bentoml==1.4.40", *RUNTIME),
        {"session.py": SESSION, "service.py": BENTO},
        ("-m", "bentoml", "serve", "service:Linear", "--host", "127.0.0.1", "--port", "{port}"),
        "adaptive batching to 64, max_latency_ms 1000, one worker",
        "https://docs.bentoml.com/en/latest/guides/adaptive-batching.html",
    ),
    "mlserver": Installed(
        ("mlserver==1.7.1", "uvloop==0.21.0", *RUNTIME),
        {
            "session.py": SESSION,
            "model.py": MLSERVER,
            "settings.json": '{{"host": "127.0.0.1", "http_port": {port}, "grpc_port": {grpc}, "metrics_port": {metrics},'
            ' "parallel_workers": 0, "debug": false}}',
            "model-settings.json": '{"name": "linear", "implementation": "model.Linear",'
            ' "max_batch_size": 64, "max_batch_time": 0.001}',
        },
        ("-c", "from mlserver.cli import main; main()", "start", "."),
        "max_batch_size 64, max_batch_time 1 ms, no parallel workers",
        "https://docs.seldon.ai/mlserver/user-guide/adaptive-batching",
    ),
}

NOT_RUN: Final = {
    "serve, HAProxy mode": "its configuration binds its statistics on every interface, so it takes a network of its own",
    "AWS's adapter": "speaks `/invocations` alone: `python -m benchmarks.sagemaker` measures it, on `linear` and `minilm`",
    "infinity": "serves embeddings alone, so it has no `linear`",
}
"""Why a peer is not among those measured."""
