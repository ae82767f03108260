import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.source import load_object
from tests.backends.contract import LINEAR, MAX_ROWS
from tests.triton_server import TritonServer, triton_server, write_model

CONFIG = f"""
max_batch_size: {MAX_ROWS}
input [{{ name: "INPUT0" data_type: TYPE_FP32 dims: [16] }}]
output [{{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }}]
"""

# Linear(16, 4) in Triton's python backend, and faults by the first element of a batch.
CODE = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        with open(os.path.join(os.path.dirname(__file__), "weights.json")) as file:
            self.weight, self.bias = (np.array(part, np.float32) for part in json.load(file))

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if x[0, 0] == -666:
                os._exit(1)
            if x[0, 0] <= -1000:
                time.sleep(-x[0, 0] / 1000)
            if x[0, 0] == -400:
                responses.append(pb.InferenceResponse(error=pb.TritonError("a bad row")))
                continue
            if x[0, 0] == -404:
                responses.append(pb.InferenceResponse(error=pb.TritonError("no such row", pb.TritonError.NOT_FOUND)))
                continue
            if x[0, 0] == -401:
                told = json.dumps(json.loads(request.parameters()) | {"left_us": request.timeout()})
                responses.append(pb.InferenceResponse(error=pb.TritonError("asked with " + told)))
                continue
            responses.append(pb.InferenceResponse([pb.Tensor("OUTPUT0", x @ self.weight.T + self.bias)]))
        return responses
"""

# One part, and then what it has not found: of the key 1 as the end, of others before the end.
LOOKUP = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, key = request.get_response_sender(), pb.get_input_tensor_by_name(request, "KEY")
            sender.send(pb.InferenceResponse([pb.Tensor("FOUND", key.as_numpy())]))
            missing = pb.InferenceResponse(error=pb.TritonError("no such key", pb.TritonError.NOT_FOUND))
            if key.as_numpy()[0] == 1:
                sender.send(missing, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                sender.send(missing)
                sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LOOKUP_CONFIG = """
max_batch_size: 0
input [{ name: "KEY" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "FOUND" data_type: TYPE_FP32 dims: [1] }]
model_transaction_policy { decoupled: true }
"""


def write_linear(folder: Path) -> None:
    """Lay the model `linear` into a Triton's folder."""
    module = load_object(LINEAR)()
    weights = json.dumps([parameter.tolist() for parameter in (module.weight.detach(), module.bias.detach())])
    write_model(folder / "models", "linear", CONFIG, CODE, {"1/weights.json": weights})


NEURON_DOUBLE = Path(__file__).parent.parent / "neuron_double"


@pytest.fixture(scope="session")
def neuron_double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The double of torch_neuronx importable, with two of its cores visible; its directory."""
    folder = tmp_path_factory.mktemp("neuron")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(NEURON_DOUBLE))
        patch.setenv("NEURON_DOUBLE_DIR", str(folder))
        patch.setenv("NEURON_RT_VISIBLE_CORES", "2,3")
        yield folder


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A real Triton with the models `linear`, `wide`, which gives rows of 1 MiB back, and `lookup`, which is decoupled."""
    folder = tmp_path_factory.mktemp("triton")
    write_linear(folder)
    outputs = 'dims: [262144] }, { name: "FIRST" data_type: TYPE_FP32 dims: [1] }'
    wide = CONFIG.replace("dims: [16]", "dims: [262144]").replace("dims: [4] }", outputs)
    typed = '"OUTPUT0", x.astype({16: np.float16, 64: np.float64}.get(x[0, 0], x.dtype))), pb.Tensor("FIRST", x[:, :1])'
    echo = CODE.replace('"OUTPUT0", x @ self.weight.T + self.bias)', typed)
    write_model(folder / "models", "wide", wide, echo, {"1/weights.json": "[[], []]"})
    write_model(folder / "models", "lookup", LOOKUP_CONFIG, LOOKUP)
    with triton_server(folder) as server:
        yield server
    for lock in Path("/dev/shm").glob(f"gateway-{os.getpid()}-*.lock"):  # of sessions that no test has closed
        lock.unlink()
