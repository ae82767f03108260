"""Packages of SageMaker's PyTorch container, and requests to them, whose answers its own toolkit gave: see `record`.

All numbers are exact in floats of 32 bits, whatever the order in which they are added, so that answers are the same everywhere.

    python -m tests.backends.sagemaker_cases ANSWERS.json

writes what the toolkit answers, in an environment that has torch, sagemaker-inference and sagemaker-pytorch-inference of PyPI.
Nothing of the gateway is imported then.
"""

import base64
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.npy import npy

ANSWERS = Path(__file__).with_name("sagemaker_answers.json")

DEFAULTS = '"""Nothing but what the container does by itself."""\n'

OWN = """
import io
import json
import os

import numpy as np
import torch


def model_fn(model_dir):
    model = torch.jit.load(os.path.join(model_dir, "model.pth"), map_location="cpu")
    with open(os.path.join(model_dir, "labels.json")) as file:
        model_labels = json.load(file)
    return model.eval(), model_labels


def input_fn(body, content_type):
    if content_type == "application/json":
        return torch.tensor(json.loads(body)["features"], dtype=torch.float32)
    if content_type == "text/csv":
        rows = [[float(number) for number in line.split(",")] for line in body.strip().splitlines()]
        return torch.tensor(rows, dtype=torch.float32)
    if content_type == "application/x-npy":
        return torch.from_numpy(np.load(io.BytesIO(body))).float()
    if content_type == "image/x-portable-pixmap":
        kind, width, height, most, pixels = body.split(maxsplit=4)
        image = np.frombuffer(pixels, np.uint8).reshape(int(height), int(width), 3)
        return torch.from_numpy(image[..., :2].reshape(-1, 4).astype(np.float32))
    raise ValueError(f"Unsupported content type: {content_type}")


def predict_fn(data, model):
    with torch.no_grad():
        return model[0](data), model[1]


def output_fn(prediction, accept):
    scores, labels = prediction
    best = [labels[index] for index in scores.argmax(dim=1).tolist()]
    if accept == "text/csv":
        return "\\n".join(best), "text/csv; charset=utf-8"
    if accept == "application/x-npy":
        buffer = io.BytesIO()
        np.save(buffer, scores.numpy())
        return buffer.getvalue(), accept
    if accept == "text/plain":
        return {"labels": best, "scores": scores.tolist()}
    return json.dumps({"labels": best, "scores": scores.tolist()})
"""

TRANSFORM = """
import json

import torch


def model_fn(model_dir, context):
    return torch.jit.load(model_dir + "/model.pth", map_location="cpu")


def transform_fn(model, body, content_type, accept, context):
    asked = context.request_processor[0].get_request_properties()
    scores = model(torch.tensor([json.loads(body)], dtype=torch.float32))
    return json.dumps([scores.tolist(), content_type, accept, asked.get("Accept")]), "application/vnd.mine+json"
"""

TOOLKIT = """
import torch
from sagemaker_inference import content_types, decoder, encoder, errors, utils


def input_fn(body, content_type):
    assert content_type == content_types.ANY or isinstance(body, str) == (content_type in content_types.UTF8_TYPES)
    return torch.from_numpy(decoder.decode(body, content_type).astype("float32"))


def output_fn(prediction, accept):
    for kind in utils.parse_accept(accept):
        if kind in encoder.SUPPORTED_CONTENT_TYPES:
            return encoder.encode(prediction.numpy(), kind), kind
    raise errors.UnsupportedFormatError(accept)
"""

PACKAGES = {"defaults": DEFAULTS, "own": OWN, "transform": TRANSFORM, "toolkit": TOOLKIT}


@dataclass(frozen=True)
class Request:
    package: str
    content_type: str
    accept: str
    body: bytes

    @property
    def name(self) -> str:
        return f"{self.package} {self.content_type} to {self.accept or 'what it likes'}, {len(self.body)} bytes"


ROWS = np.array([[1, 2, 3, 4], [0.5, -0.25, 8, 0]], np.float32)
NPY = npy(ROWS)
CSV = b"1.0,2.0,3.0,4.0\n0.5,-0.25,8.0,0.0\n"
JSON = b"[[1, 2, 3, 4], [0.5, -0.25, 8, 0]]"
IMAGE = b"P6 2 2 255\n" + bytes(range(0, 24, 2))
FEATURES = b'{"features": [[1, 2, 3, 4], [0.5, -0.25, 8, 0]]}'

REQUESTS = [
    *(
        Request("defaults", content_type, accept, body)
        for content_type, body in (("application/json", JSON), ("text/csv", CSV), ("application/x-npy", NPY))
        for accept in ("application/json", "text/csv", "application/x-npy", "", "*/*", "text/html, text/csv")
    ),
    Request("defaults", "application/json", "application/json", b"[1, 2, 3, 4]"),
    Request("defaults", "text/csv", "application/json", b"1,2,3,4"),
    *(
        Request("own", content_type, accept, body)
        for content_type, body in (
            ("application/json", FEATURES), ("text/csv", CSV), ("application/x-npy", NPY), ("image/x-portable-pixmap", IMAGE)
        )
        for accept in ("application/json", "text/csv", "application/x-npy", "text/plain", "*/*")
    ),
    Request("transform", "application/json", "application/json", b"[1, 2, 3, 4]"),
    Request("transform", "application/json; charset=utf-8", "text/csv", b"[1, 2, 3, 4]"),
    *(
        Request("toolkit", content_type, accept, body)
        for content_type, body in (("application/json", JSON), ("text/csv", CSV), ("application/x-npy", NPY))
        for accept in ("application/json", "text/plain, text/csv", "application/x-npy")
    ),
    # what it fails on
    Request("defaults", "image/png", "application/json", b"1"),
    Request("defaults", "application/json", "text/html", JSON),
    Request("defaults", "application/json", "application/json", b"no JSON"),
    Request("defaults", "text/csv", "application/json", b"1,2,3,4\n0.5,-0.25,8,0\n"),  # columns of other datatypes
    Request("own", "image/png", "application/json", b"1"),
    Request("own", "application/json", "application/json", b"{}"),
    Request("toolkit", "application/json", "image/png", JSON),
    Request("toolkit", "image/png", "application/json", b"1"),
]  # fmt: skip


def write_package(folder: Path, name: str) -> Path:
    """One of PACKAGES in a folder, as its model.tar.gz has it."""
    import torch

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)
            with torch.no_grad():
                self.linear.weight.copy_(torch.tensor([[1, 0.5, 0, -2], [0, 0.25, 1, 0], [-1, 2, -0.5, 0.125]]))
                self.linear.bias.copy_(torch.tensor([0.5, -1, 0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x))

    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(PACKAGES[name])
    (folder / "labels.json").write_text(json.dumps(["rose", "lily", "iris"]))
    torch.jit.trace(Scores().eval(), torch.zeros(2, 4)).save(str(folder / "model.pth"))
    return folder


class _Context:
    """What the toolkit asks of TorchServe, whose request is the one at hand."""

    def __init__(self, model_dir: str) -> None:
        self.system_properties = {"model_dir": model_dir}
        self.request_processor = [self]
        self.headers: dict[str, str] = {}
        self.status = 200
        self.content_type = ""

    def get_request_properties(self) -> dict[str, str]:
        return self.headers

    def set_response_content_type(self, index: int, value: str) -> None:
        self.content_type = value

    def set_response_status(self, code: int, phrase: str) -> None:
        self.status = code


def record() -> list[dict[str, Any]]:
    """What the toolkit answers, as TorchServe would send it (its `create_predict_response`), for each of REQUESTS."""
    handler_service = importlib.import_module("sagemaker_pytorch_serving_container.handler_service")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            place = write_package(Path(folder) / package, package)
            sys.path.insert(0, str(place / "code"))
            sys.modules.pop("inference", None)
            os.chdir(place)  # where a worker of TorchServe is
            service, context = handler_service.HandlerService(), _Context(str(place))
            service.initialize(context)
            for request in REQUESTS:
                if request.package != package:
                    continue
                context.headers = {"Content-Type": request.content_type, "Accept": request.accept}
                context.status = 200
                (given,) = service.handle([{"body": request.body}], context)
                if not isinstance(given, str | bytes | bytearray):
                    given = json.dumps(given, indent=2)
                body = given.encode() if isinstance(given, str) else bytes(given)
                answer = {"request": request.name, "status": context.status}
                if context.status == 200:
                    answer |= {"content_type": context.content_type, "body": base64.b64encode(body).decode()}
                found[request.name] = answer
            sys.path.remove(str(place / "code"))
            os.chdir("/")
    return [found[request.name] for request in REQUESTS]


if __name__ == "__main__":
    place = Path(sys.argv[1]).absolute()  # before anything changes the folder
    place.write_text(json.dumps(record(), indent=1) + "\n")
