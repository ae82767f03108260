"""How long from a model to its first right answer, and what must be written for it: here, with BentoML, and with LitServe.

    python -m benchmarks.first_answer --gateway ENV --bentoml ENV --litserve ENV

Each ENV is a virtual environment with one of them, torch, onnxruntime and scikit-learn; the first one has onnx too. For every
kind of model a folder is made with the model and, of each server, the files that its user writes: as its own quickstart has
it, and no more. Seconds are from the command to the first answer that is right, the middle of --rounds runs, after one that is
not counted. The servers take turns, so that other work on the machine is the same for all. Only the loopback is contacted.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port

GIVE_UP_S = 60.0
ROW = [5.1, 3.5, 1.4, 0.2]  # the first iris

# The models, as they are found: made in the gateway's environment, and not counted as written.
MAKE = """
import joblib, os, torch
from onnx import TensorProto, checker, helper, save
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

class Sums(torch.nn.Module):
    def forward(self, x):
        return torch.stack([x.sum(1), x.prod(1)], 1)

rows = torch.tensor([ROW])
traced = torch.jit.trace(Sums(), rows)
exported = torch.export.export(Sums(), (rows.repeat(2, 1),), dynamic_shapes=({0: torch.export.Dim("rows")},))
nodes = [
    helper.make_node("ReduceSum", ["x", "axis"], ["sum"], keepdims=1),
    helper.make_node("ReduceProd", ["x", "axis"], ["product"], keepdims=1),
    helper.make_node("Concat", ["sum", "product"], ["y"], axis=1),
]
shape = lambda name, *sizes: helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
graph = helper.make_graph(nodes, "sums", [shape("x", "rows", 4)], [shape("y", "rows", 2)], [axis])
onnx = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
checker.check_model(onnx)
CONFIG = \"\"\"
platform: "{}"
max_batch_size: 8
input {{ name: "{}" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "{}" data_type: TYPE_FP32 dims: 2 }}
\"\"\"

save(onnx, "onnx/model.onnx")
joblib.dump(LogisticRegression(max_iter=1000).fit(*load_iris(return_X_y=True)), "sklearn/iris.joblib")
traced.save("torchscript/model.pt")
torch.export.save(exported, "pt2/model.pt2")
for name, platform, file, ends in (
    ("first", "onnxruntime_onnx", "model.onnx", ("x", "y")),
    ("second", "pytorch_libtorch", "model.pt", ("INPUT__0", "OUTPUT__0")),
):
    os.makedirs(f"repository/models/{name}/1")
    with open(f"repository/models/{name}/config.pbtxt", "w") as file_of_it:
        file_of_it.write(CONFIG.format(platform, *ends))
    place = f"repository/models/{name}/1/{file}"
    save(onnx, place) if file.endswith("onnx") else traced.save(place)
"""


@dataclass(frozen=True)
class Way:
    """What a user of one server does. files: what they write. asked: path and body of each request; `Case.right` answers.

    command: {port} stands for the port that is asked, which its user would leave out.
    """

    command: str
    asked: tuple[tuple[str, Any], ...]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """Written, without empty ones."""
        return sum(bool(line.strip()) for text in self.files.values() for line in text.splitlines())


@dataclass(frozen=True)
class Case:
    """right: what every way must answer to each of its requests."""

    name: str
    right: tuple[list[float], ...]
    ways: Mapping[str, Way]


SUMS = [sum(ROW), 5.1 * 3.5 * 1.4 * 0.2]


def infer(name: str, tensor: str = "x") -> tuple[str, Any]:
    entry = {"name": tensor, "datatype": "FP32", "shape": [1, 4], "data": ROW}
    return f"/v2/models/{name}/infer", {"inputs": [entry]}


def ours(model: str, *asked: tuple[str, Any], files: Mapping[str, str] | None = None) -> Way:
    return Way(f"gateway serve {model} --http-port {{port}} --grpc-port 0", asked, files or {})


def bento(setup: str, predict: str, *imports: str) -> Way:
    head = "".join(f"import {name}\n" for name in ("bentoml", "numpy as np", *imports))
    service = f"""{head}
@bentoml.service
class Model:
    def __init__(self):
{setup}
    @bentoml.api
    def predict(self, x: np.ndarray) -> np.ndarray:
{predict}
"""
    return Way("bentoml serve --port {port}", (("/predict", {"x": [ROW]}),), {"service.py": service})


def lit(setup: str, predict: str, *imports: str) -> Way:
    head = "".join(f"import {name}\n" for name in ("litserve as ls", *imports))
    server = f"""{head}
class Model(ls.LitAPI):
    def setup(self, device):
{setup}
    def predict(self, request):
{predict}

if __name__ == "__main__":
    ls.LitServer(Model(), accelerator="auto").run(port={{port}})
"""
    return Way("python server.py", (("/predict", {"x": [ROW]}),), {"server.py": server})


ONNX_SETUP = '        self.session = onnxruntime.InferenceSession("model.onnx")'
ONNX_RUN = 'self.session.run(None, {"x": '
SCRIPT_SETUP = '        self.model = torch.jit.load("model.pt")'
PT2_SETUP = '        self.model = torch.export.load("model.pt2").module()'
JOBLIB_SETUP = '        self.model = joblib.load("iris.joblib")'
TORCH_BENTO = "        return self.model(torch.from_numpy(x.astype(np.float32))).detach().numpy()"
TORCH_LIT = '        return {"y": self.model(torch.tensor(request["x"])).tolist()}'

CASES = (
    Case(
        "onnx",
        (SUMS,),
        {
            "gateway": ours("model.onnx", infer("model")),
            "bentoml": bento(ONNX_SETUP, f"        return {ONNX_RUN}x.astype(np.float32)}})[0]", "onnxruntime"),
            "litserve": lit(
                ONNX_SETUP,
                f'        return {{"y": {ONNX_RUN}np.array(request["x"], np.float32)}})[0].tolist()}}',
                "numpy as np",
                "onnxruntime",
            ),
        },
    ),
    Case(
        "sklearn",
        ([0.0],),
        {
            "gateway": ours(
                "iris.py",
                infer("iris"),
                files={
                    "iris.py": """import joblib
from typing import Annotated
import numpy as np
import numpy.typing as npt

class Iris:
    def __init__(self):
        self.model = joblib.load("iris.joblib")

    def predict(self, x: Annotated[npt.NDArray[np.float32], (-1, 4)]):
        return self.model.predict(x)
"""
                },
            ),
            "bentoml": bento(JOBLIB_SETUP, "        return self.model.predict(x)", "joblib"),
            "litserve": lit(JOBLIB_SETUP, '        return {"y": self.model.predict(request["x"]).tolist()}', "joblib"),
        },
    ),
    Case(
        "function",
        ([6.0],),
        {
            "gateway": ours(
                "area.py",
                (
                    "/v2/models/area/infer",
                    {
                        "inputs": [
                            {"name": name, "datatype": "FP64", "shape": [1], "data": [size]}
                            for name, size in (("width", 2), ("height", 3))
                        ]
                    },
                ),
                files={"area.py": "def predict(width: float, height: float) -> float:\n    return width * height\n"},
            ),
            "bentoml": Way(
                "bentoml serve --port {port}",
                (("/area", {"width": 2, "height": 3}),),
                {
                    "service.py": """import bentoml

@bentoml.service
class Area:
    @bentoml.api
    def area(self, width: float, height: float) -> float:
        return width * height
"""
                },
            ),
            "litserve": Way(
                "python server.py",
                (("/predict", {"width": 2, "height": 3}),),
                {
                    "server.py": """import litserve as ls

class Area(ls.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        return {"area": request["width"] * request["height"]}

if __name__ == "__main__":
    ls.LitServer(Area(), accelerator="auto").run(port={port})
"""
                },
            ),
        },
    ),
    Case(
        "torchscript",
        (SUMS,),
        {
            "gateway": ours("model.pt", infer("model")),
            "bentoml": bento(SCRIPT_SETUP, TORCH_BENTO, "torch"),
            "litserve": lit(SCRIPT_SETUP, TORCH_LIT, "torch"),
        },
    ),
    Case(
        "pt2",
        (SUMS,),
        {
            "gateway": ours("model.pt2", infer("model")),
            "bentoml": bento(PT2_SETUP, TORCH_BENTO, "torch"),
            "litserve": lit(PT2_SETUP, TORCH_LIT, "torch"),
        },
    ),
    Case(
        "repository",
        (SUMS, SUMS),
        {
            "gateway": ours("models", infer("first"), infer("second", "INPUT__0")),
            "bentoml": Way(
                "bentoml serve --port {port}",
                (("/first", {"x": [ROW]}), ("/second", {"x": [ROW]})),
                {
                    "service.py": """import bentoml
import numpy as np
import onnxruntime
import torch

@bentoml.service
class Repository:
    def __init__(self):
        self.session = onnxruntime.InferenceSession("models/first/1/model.onnx")
        self.model = torch.jit.load("models/second/1/model.pt")

    @bentoml.api
    def first(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(None, {"x": x.astype(np.float32)})[0]

    @bentoml.api
    def second(self, x: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(x.astype(np.float32))).detach().numpy()
"""
                },
            ),
            "litserve": Way(
                "python server.py",
                (("/first", {"x": [ROW]}), ("/second", {"x": [ROW]})),
                {
                    "server.py": """import litserve as ls
import numpy as np
import onnxruntime
import torch

class First(ls.LitAPI):
    def setup(self, device):
        self.session = onnxruntime.InferenceSession("models/first/1/model.onnx")

    def predict(self, request):
        return {"y": self.session.run(None, {"x": np.array(request["x"], np.float32)})[0].tolist()}

class Second(ls.LitAPI):
    def setup(self, device):
        self.model = torch.jit.load("models/second/1/model.pt")

    def predict(self, request):
        return {"y": self.model(torch.tensor(request["x"])).tolist()}

if __name__ == "__main__":
    apis = [First(api_path="/first"), Second(api_path="/second")]
    ls.LitServer(apis, accelerator="auto").run(port={port})
"""
                },
            ),
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", type=Path, metavar="ENV", required=True, help="the environment with the gateway")
    for server in ("bentoml", "litserve"):
        parser.add_argument(f"--{server}", type=Path, metavar="ENV", help=f"the environment with {server}; left out: not run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    environments = {name: path.absolute() for name in ("gateway", "bentoml", "litserve") if (path := getattr(arguments, name))}
    for server, environment in environments.items():
        if not (environment / "bin/python").exists():
            parser.error(f"--{server}: {environment} is no environment: it has no bin/python")
    found = []
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in environments}
        with tempfile.TemporaryDirectory(prefix="first-answer-") as folder:
            make(Path(folder), environments["gateway"])
            for number in range(arguments.rounds + 1):
                for server, environment in environments.items():
                    took = first_answer(case, case.ways[server], Path(folder) / case.name, environment)
                    if number:
                        seconds[server].append(took)
        for server, took_s in seconds.items():
            way = case.ways[server]
            command = way.command.replace(" --port {port}", "").replace(" --http-port {port} --grpc-port 0", "")
            row = {"model": case.name, "server": server, "command": command, "lines": way.lines, "seconds": took_s}
            found.append(row)
            told = ", ".join(f"{each:.2f}" for each in took_s)
            print(
                f"{case.name:12} {server:9} {way.lines:2} lines  {command:28} {statistics.median(took_s):5.2f} s  ({told})",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))


def make(folder: Path, environment: Path) -> None:
    for case in CASES:
        (folder / case.name).mkdir()
    program = f"ROW = {ROW}\n{MAKE}"
    subprocess.run([environment / "bin" / "python", "-W", "ignore", "-c", program], cwd=folder, check=True)


def first_answer(case: Case, way: Way, folder: Path, environment: Path) -> float:
    """Seconds from the command until every request has its right answer."""
    port = free_port()
    for name, text in way.files.items():
        (folder / name).write_text(text.replace("{port}", str(port)))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "BENTOML_DO_NOT_TRACK": "true"}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            way.command.format(port=port).split(),
            cwd=folder, env=variables, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            for (path, body), right in zip(way.asked, case.right, strict=True):
                while (answer := ask(f"http://127.0.0.1:{port}{path}", body)) is None or not close(numbers(answer), right):
                    if process.poll() is not None or time.perf_counter() - began > GIVE_UP_S:
                        said.seek(0)
                        raise SystemExit(f"{case.name}: {way.command}: {answer!r}\n{said.read().decode()[-3000:]}")
                    time.sleep(0.01)
            return time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def ask(url: str, body: Any) -> Any:
    """The answer, or None while there is none."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def numbers(answer: Any) -> list[float]:
    """All numbers of an answer but those that are shapes, in order."""
    if isinstance(answer, Mapping):
        return [number for key, value in answer.items() if key not in ("shape", "model_version") for number in numbers(value)]
    if isinstance(answer, list):
        return [number for value in answer for number in numbers(value)]
    return [float(answer)] if isinstance(answer, int | float) else []


def close(found: list[float], right: list[float]) -> bool:
    return len(found) == len(right) and all(abs(a - b) <= 1e-4 * max(1.0, abs(b)) for a, b in zip(found, right, strict=True))


if __name__ == "__main__":
    main()
