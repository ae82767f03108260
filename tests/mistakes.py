"""Mistakes that people make in configurations and models: what they write, and what must be said to it.

`python -m tests.mistakes docs/troubleshooting.md` writes the page that lists the messages.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PYTHON = '''"""Models that a user may have written."""

from typing import Annotated
import numpy as np
import numpy.typing as npt

class Echo:
    inputs = [("x", "FP32", (-1, 3))]
    outputs = [("y", "FP32", (-1, 3))]

    def __init__(self, factor, offset=0.0):
        self.factor = factor

    def predict(self, inputs):
        return {"y": inputs["x"]}


class Silent(Echo):
    inputs = outputs = None

    def __init__(self):
        pass


class Numpy(Echo):
    inputs = [("x", "float32", (-1, 3))]

    def __init__(self):
        pass


class Unfinished:
    inputs = outputs = [("x", "FP32", (-1, 3))]


class Failing(Echo):
    def __init__(self):
        raise OSError("no weights at weights.bin")


def hinted(x: Annotated[npt.NDArray[np.float32], (-1, 4)]) -> npt.NDArray[np.float32]:
    return x


def factory(hidden=8):
    raise AssertionError("only a load calls it")
'''


@dataclass(frozen=True, slots=True)
class Mistake:
    """text: of gateway.yaml; the line at fault ends with `# !`, or bears the number `line`. path: of the key at fault.

    says: parts of the message, among them the value that is shown, what was expected and the remedy. arguments: of `check`.
    needs: a package that must be installed.
    """

    title: str
    text: str
    path: str
    says: tuple[str, ...]
    line: int | None = None
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def at_line(self) -> int | None:
        if self.line is not None:
            return self.line
        marked = [number for number, line in enumerate(self.text.splitlines(), 1) if line.endswith("# !")]
        return marked[0] if marked else None


def one(*lines: str, kind: str = "synthetic") -> str:
    """A model with one backend, whose own lines these are."""
    below = "".join(f"\n        {line}" for line in lines)
    return f"models:\n  - name: m\n    backends:\n      - kind: {kind}{below}\n"


def of_model(*lines: str) -> str:
    """A model of which these lines are."""
    below = "".join(f"    {line}\n" for line in lines)
    return f"models:\n  - name: m\n{below}    backends: [{{kind: synthetic}}]\n"


def onnx(*lines: str, model: str = "linear.onnx") -> str:
    """A model of an ONNX file that takes x FP32 [-1, 3] and gives y FP32 [-1, 3]."""
    below = "".join(f"    {line}\n" for line in lines)
    return f"models:\n  - name: m\n{below}    backends:\n      - kind: onnxruntime\n        model: {model}\n"


X = "{name: x, datatype: FP32, shape: [-1, 3]}"

Y = X.replace("name: x", "name: y")
TENSORS = (f"inputs: [{X}]", f"outputs: [{Y}]")

HINTED: Final = (
    "models:\n"
    "  - name: m\n"
    "    inputs:\n"
    "      - {name: x, datatype: FP32, shape: [-1, 4]}\n"
    "    outputs:\n"
    "      - {name: output, datatype: FP32, shape: [-1, 4]}\n"
    "    backends: [{kind: python, model: 'code.py:hinted'}]\n"
)
SECTIONS: dict[str, tuple[str, tuple[Mistake, ...]]] = {
    "The file": (
        "A file that is no YAML stops the check: correct it, and check again.",
        (
            Mistake("tab", "server:\n\thost: 127.0.0.1\n", "", ("not YAML: a tab", "replace the tab by spaces"), line=2),
            Mistake(
                "no space after a colon",
                "server:\n  host:127.0.0.1\n  http_port: 8000\n",
                "",
                ("host:127.0.0.1", "a space is missing after the colon", "write `host: 127.0.0.1`"),
                line=2,
            ),
            Mistake(
                "no space after the only colon",
                "server:  # !\n  http_port:8000\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server",
                ("'http_port:8000'", "expected a mapping with `host`", "a space is missing after the colon: `http_port: 8000`"),
            ),
            Mistake(
                "unclosed bracket",
                "models:\n  - {name: m, backends: [{kind: synthetic}}\n",
                "",
                ("a bracket [ is not closed", "opened in line 2"),
                line=2,
            ),
            Mistake(
                "unclosed quotation mark",
                'models:\n  - name: "m  \n    backends: [{kind: synthetic}]\n',
                "",
                ("a quotation mark that is never closed", "close it"),
                line=2,
            ),
            Mistake(
                "wrong indentation",
                "models:\n  - name: m\n   version: '1'\n    backends: [{kind: synthetic}]\n",
                "",
                ("not YAML", "indented unlike", "indent it as the lines beside it"),
                line=3,
            ),
            Mistake(
                "unknown alias",
                "models:\n  - name: m\n    inputs: *tensors\n    backends: [{kind: synthetic}]\n",
                "",
                ("undefined alias 'tensors'", "define it before, with `&`"),
                line=3,
            ),
            Mistake(
                "key set twice",
                "models:\n  - name: m\n    max_rows: 8\n    max_rows: 16  # !\n    backends: [{kind: synthetic}]\n",
                "models[0].max_rows",
                ("'16'", "set twice, first in line 3", "expected each key once", "remove one of the two"),
            ),
            Mistake(
                "anchors that multiply",
                "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
                + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcde", "bcdef", strict=True)),
                "",
                ("has more than 100000 values, its anchors filled in", "use fewer anchors"),
                line=5,
            ),
            Mistake(
                "a list", "- models\n", "", ("got a list", "expected a mapping with `models`", "begin with `models:`"), line=1
            ),
            Mistake("nothing", "", "", ("got nothing", "expected a mapping with `models`", "begin with `models:`")),
        ),
    ),
    "Keys and values": (
        "[configs/gateway.yaml](../configs/gateway.yaml) has every key with its meaning.",
        (
            Mistake(
                "misspelt key",
                one("sesions: 2  # !"),
                "models[0].backends[0].sesions",
                ("2: unknown key", "did you mean `sessions`?"),
            ),
            Mistake(
                "misspelt key that must be there",
                "models:\n  - name: m\n    backends:\n      - kind: onnxruntime\n        modle: linear.onnx  # !\n",
                "models[0].backends[0].modle",
                ("'linear.onnx': unknown key", "did you mean `model`?"),
            ),
            Mistake(
                "key in the wrong place",
                "http_port: 8000  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "http_port",
                ("8000: unknown key", "it belongs to `server`"),
            ),
            Mistake(
                "key of a backend beside it",
                "models:\n  - name: m\n    cast_outputs: false  # !\n    backends: [{kind: synthetic}]\n",
                "models[0].cast_outputs",
                ("unknown key", "it belongs to `models[].backends[]`"),
            ),
            Mistake(
                "key of another server",
                of_model("max_batch_size: 8  # !"),
                "models[0].max_batch_size",
                ("8: unknown key", "write `max_rows` at the model"),
            ),
            Mistake(
                "another percentile",
                "models:\n  - name: m\n    slo: {p95_ms: 50}  # !\n    backends: [{kind: synthetic}]\n",
                "models[0].slo.p95_ms",
                ("unknown key", "write `p99_ms`, the one promise there is"),
            ),
            Mistake(
                "missing key",
                "models:\n  - name: m\n    backends:\n      - kind: onnxruntime  # !\n",
                "models[0].backends[0].model",
                ("missing, expected text", "add `model: …`"),
            ),
            Mistake(
                "no models", "server: {}\n", "models", ("missing, expected a list of at least 1", "add `models: …`"), line=1
            ),
            Mistake("empty list", "models: []  # !\n", "models", ("[]: expected a list of at least 1", "add one")),
            Mistake(
                "number out of range",
                "server:\n  http_port: 70000  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server.http_port",
                ("70000: expected a whole number from 0 to 65535, or null", "left out, it is 8000"),
            ),
            Mistake(
                "one port for both protocols",
                "server:\n  http_port: 9000\n  grpc_port: 9000  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server.grpc_port",
                ("9000: http_port has it too, expected another port", "0 is any free one"),
            ),
            Mistake(
                "memory for less than one request",
                "server:\n  limits:\n    memory_bytes: 1000000  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server.limits.memory_bytes",
                ("1000000: is too little, expected at least 268435456, which is 4 times body_bytes", "lower body_bytes"),
            ),
            Mistake(
                "host with a port",
                "server:\n  host: localhost:9000  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server.host",
                ("'localhost:9000': expected an address such as 127.0.0.1, or a name", "the ports are http_port and grpc_port"),
            ),
            Mistake(
                "text for a number",
                one("sessions: two  # !"),
                "models[0].backends[0].sessions",
                ("'two': expected a whole number from 1 to 256", "left out, it is 1"),
            ),
            Mistake(
                "yes for a number",
                one("sessions: yes  # !"),
                "models[0].backends[0].sessions",
                ("yes: expected a whole number from 1 to 256",),
            ),
            Mistake(
                "number for a switch",
                of_model("load_at_start: 3  # !"),
                "models[0].load_at_start",
                ("3: expected true or false", "left out, it is true"),
            ),
            Mistake(
                "one item instead of a list",
                of_model("inputs: x  # !"),
                "models[0].inputs",
                ("'x': expected a list, each item a mapping with `name`, `datatype`, `shape`", "write it as a list: [x]"),
            ),
            Mistake(
                "misspelt kind",
                "models:\n  - name: m\n    backends:\n      - kind: onnxrutime  # !\n        model: linear.onnx\n",
                "models[0].backends[0].kind",
                ("'onnxrutime': expected one of synthetic, torch, onnxruntime, python", "did you mean `onnxruntime`?"),
            ),
            Mistake(
                "no kind",
                "models:\n  - name: m\n    backends:\n      - model: linear.onnx  # !\n",
                "models[0].backends[0].kind",
                ("missing, expected one of synthetic, torch", "add `kind: synthetic`"),
            ),
            Mistake(
                "misspelt choice",
                of_model("batching:", "  policy: adaptve  # !"),
                "models[0].batching.policy",
                ("'adaptve': expected one of adaptive, greedy, fixed", "did you mean `adaptive`?"),
            ),
            Mistake(
                "version without quotes",
                of_model("version: 2  # !"),
                "models[0].version",
                ("2: expected a number of 1 to 18 digits, in quotes", 'write "2"'),
            ),
            Mistake(
                "number as a name",
                "models:\n  - name: 7  # !\n    backends: [{kind: synthetic}]\n",
                "models[0].name",
                ("7: expected text", 'put it in quotes: "7"'),
            ),
            Mistake(
                "slash in a name",
                "models:\n  - name: org/model  # !\n    backends: [{kind: synthetic}]\n",
                "models[0].name",
                ("'org/model': expected 1 to 128 characters, none of them '/'", "for instance org-model"),
            ),
            Mistake(
                "model listed twice",
                "models:\n  - {name: m, backends: [{kind: synthetic}]}\n  - {name: m, backends: [{kind: synthetic}]}  # !\n",
                "models[1].name",
                ("'m': version 1 of it is listed twice", "give each a `version` of its own"),
            ),
            Mistake(
                "backends of one name",
                "models:\n  - name: m\n    backends:\n      - kind: synthetic\n      - kind: synthetic  # !\n",
                "models[0].backends[1].name",
                ("'synthetic' is the name of another backend too", "give each a `name` of its own"),
            ),
            Mistake(
                "datatype of another library",
                of_model("inputs:", "  - name: x", "    datatype: float32  # !", "    shape: [-1, 3]"),
                "models[0].inputs[0].datatype",
                ("'float32': unknown datatype, expected one of BOOL", "did you mean `FP32`?"),
            ),
            Mistake(
                "shape without the batch",
                of_model("inputs:", "  - name: x", "    datatype: FP32", "    shape: [16]  # !"),
                "models[0].inputs[0].shape",
                ("[16]: expected -1 as the first dimension", "write [-1, 16] if that is one row, or set max_rows: 0"),
            ),
            Mistake(
                "padding of no input",
                of_model(
                    "inputs: [{name: tokens, datatype: INT64, shape: [-1, -1]}]",
                    "ragged:",
                    "  pad:",
                    "    token: 0  # !",
                ),
                "models[0].ragged.pad.token",
                ("0: expected an input of the model, one of tokens", "did you mean `tokens`?"),
            ),
            Mistake(
                "unknown backend",
                of_model("routing:", "  equivalent: [[synthetic, sinthetic]]  # !"),
                "models[0].routing.equivalent[0][1]",
                ("'sinthetic': expected a backend of this model, one of synthetic", "did you mean `synthetic`?"),
            ),
            Mistake(
                "resource of another name",
                one("resources: {num_gpu: 1}  # !"),
                "models[0].backends[0].resources.num_gpu",
                ("1: no resource of Ray", "did you mean `num_gpus`?"),
            ),
            Mistake(
                "replicas of an embedded backend",
                one("replicas: 3  # !"),
                "models[0].backends[0].replicas",
                ("3: an embedded backend has no replicas, expected `placement: replicas`", "set that, or remove this"),
            ),
            Mistake(
                "scaling of an embedded backend",
                one("autoscaling: {max_replicas: 4}  # !"),
                "models[0].backends[0].autoscaling",
                ("an embedded backend has no replicas, expected `placement: replicas`", "set that, or remove this"),
            ),
            Mistake(
                "nothing but a canary",
                one("canary_share: 0.1"),
                "models[0].backends",
                ("every backend is a canary or a shadow", "expected at least one for the rest of the requests", "add one"),
                line=3,
            ),
        ),
    ),
    "Files": (
        "The message has the path at which the gateway looked.",
        (
            Mistake(
                "misspelt file",
                onnx(model="lineer.onnx  # !"),
                "models[0].backends[0].model",
                ("'lineer.onnx': no such file", "/lineer.onnx)", "did you mean `linear.onnx`, which is there?"),
            ),
            Mistake(
                "misspelt folder",
                onnx(model="exportd/lineer.onnx  # !"),
                "models[0].backends[0].model",
                ("'exportd/lineer.onnx': no such file", "did you mean `exported/linear.onnx`, which is there?"),
            ),
            Mistake(
                "file not built yet",
                onnx(model="later.onnx  # !") + "        build: {source: 'code.py:factory'}\n",
                "models[0].backends[0].model",
                ("'later.onnx': no such file", "`gateway compile` with this configuration makes it"),
            ),
            Mistake(
                "file for a directory",
                "server:\n  state_dir: code.py/state  # !\nmodels: [{name: m, backends: [{kind: synthetic}]}]\n",
                "server.state_dir",
                ("'code.py/state': ", "/code.py is a file, expected a directory", "choose another"),
            ),
            Mistake(
                "pointer of Git LFS",
                onnx(model="pointer.onnx  # !"),
                "models[0].backends[0].model",
                ("a pointer of Git LFS", "expected an ONNX file", "`git lfs pull` brings the file"),
            ),
            Mistake(
                "file cut off",
                onnx(model="half.onnx  # !"),
                "models[0].backends[0].model",
                ("the beginning of an ONNX file: 20 bytes of 58 or more", "/half.onnx)", "copy or download it again, whole"),
            ),
            Mistake(
                "weights left behind",
                onnx(model="moved.onnx  # !"),
                "models[0].backends[0].model",
                (
                    "an ONNX file without its weights, 'moved.onnx.data'",
                    "/moved.onnx)",
                    "put that file, which the export wrote too",
                ),
            ),
            Mistake(
                "file of another library",
                onnx(model="script.pt  # !"),
                "models[0].backends[0].model",
                ("'script.pt': a TorchScript archive", "expected an ONNX file", "set kind: torch"),
            ),
            Mistake(
                "weights without a model",
                f"models:\n  - name: m\n    inputs: [{X}]\n    outputs: [{X}]\n"
                "    backends:\n      - kind: torch\n        model: weights.pt  # !\n",
                "models[0].backends[0].model",
                (
                    "'weights.pt': a state_dict",
                    "expected a file of TorchScript, torch.export or AOTInductor",
                    "serve FILE.py:make",
                ),
            ),
            Mistake(
                "other file",
                onnx(model="code.py  # !"),
                "models[0].backends[0].model",
                ("not an ONNX file", "expected an ONNX file", "set another kind"),
                needs=("onnx",),
            ),
            Mistake(
                "name of a tensor",
                onnx("inputs:", "  - name: input  # !", "    datatype: FP32", "    shape: [-1, 3]"),
                "models[0].inputs[0].name",
                ("'input': expected one of the file's inputs, x", "did you mean `x`?"),
                needs=("onnx",),
            ),
            Mistake(
                "datatype of a tensor",
                onnx("outputs:", "  - name: y", "    datatype: FP64  # !", "    shape: [-1, 3]"),
                "models[0].outputs[0].datatype",
                ("'FP64': expected FP32, as in the file", "write FP32"),
                needs=("onnx",),
            ),
            Mistake(
                "shape of a tensor",
                onnx("inputs:", "  - name: x", "    datatype: FP32", "    shape: [-1, 4]  # !"),
                "models[0].inputs[0].shape",
                ("[-1, 4]: expected [-1, 3], as in the file", "write [-1, 3]"),
                needs=("onnx",),
            ),
            Mistake(
                "file for one row",
                onnx("max_rows: 8  # !", model="fixed.onnx"),
                "models[0].max_rows",
                ("8: the file has x FP32 [1, 3]", "expected an open first dimension", "or set max_rows: 1"),
                needs=("onnx",),
            ),
        ),
    ),
    "Code": (
        "`gateway check` imports the code that is named. `gateway serve` first only looks for the names in the file.",
        (
            Mistake(
                "file without a class",
                one("model: code.py  # !", kind="python"),
                "models[0].backends[0].model",
                ("'code.py': does not name a class", "expected path/to/file.py:Class or module:Class", "add `:Echo`"),
            ),
            Mistake(
                "file with one function, without its name",
                one("model: only.py  # !", kind="python"),
                "models[0].backends[0].model",
                ("'only.py': does not name a class or function", "add `:tokens`"),
            ),
            Mistake(
                "misspelt class",
                one("model: code.py:Ecko  # !", kind="python"),
                "models[0].backends[0].model",
                ("'code.py:Ecko'", "/code.py has no 'Ecko'", "did you mean `Echo`?"),
            ),
            Mistake(
                "misspelt file of code",
                one("model: cod.py:Echo  # !", kind="python"),
                "models[0].backends[0].model",
                ("no such file", "/cod.py)", "did you mean `code.py`"),
            ),
            Mistake(
                "unknown module",
                one("model: my_models.echo:Echo  # !", kind="python"),
                "models[0].backends[0].model",
                ("there is no module 'my_models.echo'", "install it", "name the file: path/to/echo.py:Echo"),
            ),
            Mistake(
                "code that is no Python",
                one("model: broken.py:Echo  # !", kind="python"),
                "models[0].backends[0].model",
                ("not Python: expected ':'", "/broken.py:2", "correct that line"),
            ),
            Mistake(
                "missing import",
                one("model: imports.py:Echo  # !", kind="python"),
                "models[0].backends[0].model",
                ("cannot be imported: ModuleNotFoundError: No module named 'absent_library'", "must be installed"),
            ),
            Mistake(
                "misspelt option",
                one("model: code.py:Echo", "class_options: {factor: 2,", "                offsett: 1}  # !", kind="python"),
                "models[0].backends[0].class_options.offsett",
                ("offsett: Echo takes no such option", "did you mean `offset`?"),
            ),
            Mistake(
                "missing option",
                one("model: code.py:Echo", "class_options: {}  # !", kind="python"),
                "models[0].backends[0].class_options.factor",
                ("missing: Echo needs it", "add `class_options: {factor: …}`"),
            ),
            Mistake(
                "class without predict",
                one("model: code.py:Unfinished  # !", kind="python"),
                "models[0].backends[0].model",
                ("expected a class with a method `predict(inputs)`", "correct the code"),
            ),
            Mistake(
                "tensors stated nowhere",
                one("model: code.py:Silent  # !", kind="python"),
                "models[0].backends[0].model",
                ("'code.py:Silent'", "`inputs`", "set `inputs` of the model in the configuration"),
            ),
            Mistake(
                "tensors of the class",
                one("model: code.py:Numpy  # !", kind="python"),
                "models[0].backends[0].model",
                ("'float32'", "expected (name, datatype, shape) in `inputs` of the class", "correct the class"),
            ),
            Mistake(
                "a datatype that the type hints deny",
                HINTED.replace("FP32", "FP64", 1).replace("[-1, 4]}\n", "[-1, 4]}  # !\n", 1),
                "models[0].inputs[0].datatype",
                ("'FP64': expected FP32, as in the code", "write FP32"),
            ),
            Mistake(
                "a shape that the type hints deny",
                HINTED.replace("[-1, 4]}\n", "[-1, 5]}  # !\n", 1),
                "models[0].inputs[0].shape",
                ("[-1, 5]: expected [-1, 4], as in the code", "write [-1, 4]"),
            ),
            Mistake(
                "tensors of PyTorch",
                one("model: code.py:factory", kind="torch"),
                "models[0].inputs",
                ("missing: PyTorch models do not tell their tensors", "set inputs: ["),
                line=2,
                needs=("torch",),
            ),
            Mistake(
                "a model that does not load",
                one("model: code.py:Failing", kind="python"),
                "models[0].backends[0]",
                ("failed to load", "OSError: no weights at weights.bin", "code.py:"),
                line=4,
                arguments=("--load",),
            ),
        ),
    ),
    "Devices and servers": (
        "The device of a backend with `placement: replicas` is not checked: it may run elsewhere.",
        (
            Mistake(
                "no GPU",
                onnx(model="linear.onnx") + "        device: cuda  # !\n",
                "models[0].backends[0].device",
                ("'cuda': this machine has no NVIDIA GPU", "use the CPU"),
                needs=("no GPU",),
            ),
            Mistake(
                "device of no name",
                onnx(*TENSORS, model="code.py:factory").replace("onnxruntime", "torch") + "        device: gpu  # !\n",
                "models[0].backends[0].device",
                ("'gpu': expected cpu, cuda", "an NVIDIA GPU is `cuda`"),
            ),
            Mistake(
                "no Neuron device",
                one("model: artifacts", kind="neuron  # !"),
                "models[0].backends[0].kind",
                ("'neuron': this machine has no Neuron device", "use another kind"),
                needs=("no Neuron",),
            ),
            Mistake(
                "Triton's HTTP",
                one("model: m", "url: http://triton:8000  # !", kind="triton"),
                "models[0].backends[0].url",
                ("'http://triton:8000': expected host:port of Triton's gRPC", "write triton:8001"),
            ),
            Mistake(
                "gRPC with a scheme",
                one("model: m", "url: grpc://triton:9001  # !", kind="triton"),
                "models[0].backends[0].url",
                ("'grpc://triton:9001': expected host:port of Triton's gRPC", "write triton:9001"),
            ),
        ),
    ),
}
MISTAKES = {mistake.title: mistake for _, mistakes in SECTIONS.values() for mistake in mistakes}


def prepare(folder: Path) -> None:
    """The files that the mistakes are made with."""
    (folder / "code.py").write_text(PYTHON)
    (folder / "only.py").write_text("from json import dumps\n\n\ndef _split(): ...\n\n\ndef tokens(text): ...\n")
    (folder / "broken.py").write_text("class Echo:\n    def predict(self, inputs)\n        return inputs\n")
    (folder / "imports.py").write_text("import absent_library\n\n\nclass Echo: ...\n")
    (folder / "pointer.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    # ModelProto: ir_version, producer, a graph of 45 bytes; and one whose initializer has its data in another file.
    begins = b"\x08\x09\x12\x07pytorch"
    (folder / "half.onnx").write_bytes(begins + b"\x3a\x2d" + bytes(7))
    external = b"\x6a\x1b\x0a\x08location\x12\x0fmoved.onnx.data"
    (folder / "moved.onnx").write_bytes(begins + b"\x3a\x1f\x2a\x1d" + external)
    for name, members in (("script.pt", ("constants.pkl", "code/m.py")), ("weights.pt", ("data.pkl",))):
        with zipfile.ZipFile(folder / name, "w") as archive:
            for member in members:
                archive.writestr(f"m/{member}", b"\x80\x02ccollections\nOrderedDict\n.")
    (folder / "artifacts").mkdir()
    (folder / "artifacts" / "manifest.json").write_text("{}")
    (folder / "exported").mkdir()
    for name, rows in (("linear.onnx", "rows"), ("fixed.onnx", 1), ("exported/linear.onnx", "rows")):
        (folder / name).write_bytes(onnx_file(rows))


def onnx_file(rows: str | int) -> bytes:
    """x FP32 [rows, 3] -> y, the same. Of no content where onnx is not installed."""
    try:
        from onnx import TensorProto, helper
    except ImportError:
        return b"\x08\x09"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 3]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def told(mistake: Mistake, folder: Path) -> dict[str, Any]:
    """What `gateway check --json` says, in the folder that was prepared, which must be the working directory."""
    from gateway.cli import main

    (folder / "gateway.yaml").write_text(mistake.text)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["check", "gateway.yaml", "--json", *mistake.arguments])
    said: dict[str, Any] = json.loads(out.getvalue())
    assert code == (0 if said["valid"] else 2)
    return said


def message_of(said: dict[str, Any], folder: Path) -> str:
    """The first message, without what is of this machine."""
    text = str(said["faults"][0]["message"])
    for own, anyones in ((str(folder.resolve()), "/path/to"), (str(folder), "/path/to"), (sys.prefix, "/path/to/venv")):
        text = text.replace(own, anyones)
    return text


def page(folder: Path) -> str:
    """docs/troubleshooting.md, of a machine that has what all mistakes need."""
    lines = [HEADER]
    for title, (about, mistakes) in SECTIONS.items():
        lines += [f"## {title}", "", about, "", "```text"]
        for mistake in mistakes:
            lines += [f"# {mistake.title}", message_of(told(mistake, folder), folder)]
        lines += ["```", ""]
    return "\n".join(lines)


HEADER = """# Troubleshooting by error message

`gateway check FILE` lists everything that is wrong with a configuration, and then ends with 2. Each line says

    FILE:LINE: FIELD: VALUE: what is wrong, what was expected; what to do

- `gateway check FILE --load` also loads each model and runs it, with one row and with the largest batch, as `serve` does
  before traffic. What a model raises on that made-up input is a warning, repeated at the end.
- `--json` is for programs; `-` reads standard input.
- `gateway serve FILE` refuses the same before it starts anything, but imports no code of yours and opens no model for it.
  It then names every model that fails to load.

Below are the most frequent mistakes, each with its message. tests/mistakes.py has the files with these mistakes.
"""


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        prepare(Path(temporary))
        target.write_text(page(Path(temporary)))
