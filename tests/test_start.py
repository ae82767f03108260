"""What `gateway serve` has imported when it is ready: nothing that the first answer does without."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

# Each takes half a millisecond, or two where no bytecode is kept. Raise it for what the first answer needs, for nothing else.
_MOST: Final = 226

PROGRAM = textwrap.dedent("""
    import io, json, os, sys

    class UntilReady(io.StringIO):
        def write(self, text):
            if text.startswith("gateway ready"):
                os.write(1, json.dumps(sorted(sys.modules)).encode())
                os._exit(0)

    sys.stdout = UntilReady()
    from gateway.cli import main
    main(["serve", sys.argv[1], "--no-ray", "--http-port", "0", "--grpc-port", "0"])
""")

PLUGIN = """
class Plugin:
    def new_schema_validator(self, *_):
        return None, None, None

plugin = Plugin()
"""

MODEL = """
import pydantic

class Side(pydantic.BaseModel):
    width: float

def predict(width: float) -> float:
    return Side(width=width).width
"""

CONFIG = """
models:
  - name: it
    inputs: [{name: x, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a package in it that offers a plugin to pydantic."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "somebodys_plugin.py").write_text(PLUGIN)
    (folder / "somebodys_plugin-1.dist-info").mkdir()
    (folder / "somebodys_plugin-1.dist-info" / "entry_points.txt").write_text("[pydantic]\nit = somebodys_plugin:plugin\n")
    (folder / "somebodys_plugin-1.dist-info" / "METADATA").write_text("Name: somebodys-plugin\nVersion: 1\n")
    return folder


@pytest.fixture(scope="module")
def imported(folder: Path) -> frozenset[str]:
    (folder / "gateway.yaml").write_text(CONFIG)
    return when_ready(folder / "gateway.yaml", folder)


def when_ready(served: Path, packages: Path) -> frozenset[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, served],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return frozenset(json.loads(done.stdout))


@pytest.mark.parametrize(
    "left_out",
    [
        "ray", "torch", "onnxruntime", "onnx", "grpc", "opentelemetry", "boto3", "rich", "loadtest",  # of others
        "tarfile", "somebodys_plugin",
        "gateway.configuring.guess", "gateway.deploying", "gateway.cluster", "gateway.from_python", "gateway.why",
        "gateway.tracing.exporter", "gateway.tracing.opentelemetry",  # nothing is traced
        "gateway.access.doors", "gateway.edges.tls", "gateway.process.certificates",  # nobody shows a key; no TLS
        "gateway.engine.multi_model", "gateway.protocols.openapi", "gateway.batching.replay",
    ],
)  # fmt: skip
def test_what_the_first_answer_does_without_is_not_imported(imported: frozenset[str], left_out: str) -> None:
    assert left_out not in imported


def test_no_more_of_our_modules_are_imported_than_before(imported: frozenset[str]) -> None:
    ours = [name for name in imported if name.split(".")[0] in ("gateway", "backends")]
    assert len(ours) <= _MOST, sorted(ours)


def test_plugins_of_pydantics_are_left_to_models(folder: Path) -> None:
    (folder / "area.py").write_text(MODEL)
    assert "somebodys_plugin" in when_ready(folder / "area.py", folder)
