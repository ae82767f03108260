"""The models that stand on both servers: user classes for the gateway's python backend, and the same for Triton's."""

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.datatypes import NUMPY, config_datatype
from tests.triton_server import write_model

LABELS = ("zero", "one", "two", "three")
SLEEPS_S = 0.4


class Identity:
    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"OUTPUT0": inputs["INPUT0"]}


class AddSub:
    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"OUTPUT0": inputs["INPUT0"] + inputs["INPUT1"], "OUTPUT1": inputs["INPUT0"] - inputs["INPUT1"]}


class Fails:
    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise RuntimeError("this model always fails")


class Sleeps:
    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(SLEEPS_S)
        return {"OUTPUT0": inputs["INPUT0"]}


class Repeats:
    """Answers in parts: `n` times the text, then an error if it is asked for."""

    def predict(self, inputs: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        for index in range(int(inputs["n"].ravel()[0])):
            yield {"said": inputs["text"], "index": np.array([[index, index + 1]], np.int32)}
        if "fail" in inputs:
            raise RuntimeError("this model was asked to fail")


class Unloadable:
    def load(self) -> None:
        raise RuntimeError("this model cannot be loaded")

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"OUTPUT0": inputs["INPUT0"]}


_TRITON_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
{body}
"""
_IDENTITY = """
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]) for tensor in inputs]
"""
_BODIES = {
    Identity: _IDENTITY,
    AddSub: """
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            outputs = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
""",
    Fails: """
    def execute(self, requests):
        raise RuntimeError("this model always fails")
""",
    Sleeps: _IDENTITY.replace("        inputs", f"        time.sleep({SLEEPS_S})\n        inputs"),
    Repeats: """
    def execute(self, requests):
        for request in requests:
            text, n, fail = (pb_utils.get_input_tensor_by_name(request, name) for name in ("text", "n", "fail"))
            sender = request.get_response_sender()
            for index in range(int(n.as_numpy().ravel()[0])):
                counted = np.array([[index, index + 1]], np.int32)
                outputs = [pb_utils.Tensor("said", text.as_numpy()), pb_utils.Tensor("index", counted)]
                sender.send(pb_utils.InferenceResponse(outputs))
            if fail is not None:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("this model was asked to fail")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    Unloadable: _IDENTITY
    + """
    def initialize(self, args):
        raise RuntimeError("this model cannot be loaded")
""",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One model for both servers. inputs, outputs: name, datatype, dimensions without the batch's; max_rows 0: no batches."""

    name: str
    code: type
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    max_rows: int = 8
    labels: tuple[str, ...] = ()
    load_at_start: bool = True
    optional: tuple[str, ...] = ()

    def gateway_config(self) -> dict[str, Any]:
        """This model's entry of the gateway's configuration file."""

        def tensors(specs: tuple[tuple[str, str, tuple[int, ...]], ...], labels: tuple[str, ...]) -> list[dict[str, Any]]:
            batch = (-1,) if self.max_rows else ()
            return [
                {"name": name, "datatype": datatype, "shape": [*batch, *dims], "labels": list(labels)}
                | ({"optional": True} if name in self.optional else {})
                for name, datatype, dims in specs
            ]

        return {
            "name": self.name,
            "max_rows": self.max_rows,
            "load_at_start": self.load_at_start,
            "inputs": tensors(self.inputs, ()),
            "outputs": tensors(self.outputs, self.labels),
            "backends": [{"kind": "python", "model": f"{Path(__file__).resolve()}:{self.code.__name__}"}],
        }

    def write_for_triton(self, repository: Path) -> None:
        """Lay this model into a model repository."""

        def tensors(specs: tuple[tuple[str, str, tuple[int, ...]], ...], extra: str) -> str:
            entries = [
                f'{{name: "{name}" data_type: {config_datatype(datatype)} dims: {list(dims)}{extra}'
                + (" optional: true}" if name in self.optional else "}")
                for name, datatype, dims in specs
            ]
            return f"[{', '.join(entries)}]"

        labels = ' label_filename: "labels.txt"' if self.labels else ""
        config = (
            f"max_batch_size: {self.max_rows}\ninput {tensors(self.inputs, '')}\noutput {tensors(self.outputs, labels)}\n"
            "instance_group [{kind: KIND_CPU count: 1}]\n"
            + ("model_transaction_policy {decoupled: true}\n" if inspect.isgeneratorfunction(self.code.predict) else "")
        )
        files = {"labels.txt": "\n".join(self.labels)} if self.labels else {}
        write_model(repository, self.name, config, _TRITON_MODEL.format(body=_BODIES[self.code]), files)


def _identity(datatype: str) -> Pair:
    tensors = tuple(((name, datatype, (-1,)),) for name in ("INPUT0", "OUTPUT0"))
    return Pair(f"identity_{datatype.lower()}", Identity, *tensors)


_FOUR = (("INPUT0", "FP32", (4,)), ("INPUT1", "FP32", (4,)))
_VECTOR = ((("INPUT0", "FP32", (-1,)),), (("OUTPUT0", "FP32", (-1,)),))

# BF16: Triton's python backend cannot give it as numpy.
DATATYPES = tuple(datatype for datatype in NUMPY if datatype != "BF16")
PAIRS = (
    *(_identity(datatype) for datatype in DATATYPES),
    Pair("add_sub", AddSub, _FOUR, (("OUTPUT0", "FP32", (4,)), ("OUTPUT1", "FP32", (4,))), labels=LABELS),
    Pair("whole", Identity, (("INPUT0", "FP32", (-1, -1)),), (("OUTPUT0", "FP32", (-1, -1)),), max_rows=0),
    Pair("fails", Fails, *_VECTOR),
    Pair("sleeps", Sleeps, *_VECTOR, max_rows=1),
    Pair(
        "repeats",
        Repeats,
        (("text", "BYTES", (1,)), ("n", "INT32", (1,)), ("fail", "BOOL", (1,))),
        (("said", "BYTES", (1,)), ("index", "INT32", (2,))),
        optional=("fail",),
    ),
    Pair("unloadable", Unloadable, *_VECTOR, load_at_start=False),
    Pair("at@home", Identity, *_VECTOR),
)
