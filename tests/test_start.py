"""What `gateway serve` has imported when it is ready: nothing that the first answer does without."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

# Each takes half a millisecond, or two where no bytecode is kept. Raise it for what the first answer needs, for nothing else.
_MOST: Final = 210

PROGRAM = textwrap.dedent("""
    import io, json, os, sys

    class UntilReady(io.StringIO):
        def write(self, text):
            if text.startswith("gateway ready"):
                ready = sorted(sys.modules)
                import pydantic
                type("OfAModel", (pydantic.BaseModel,), {})
                os.write(1, json.dumps([ready, sorted(sys.modules)]).encode())
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

CONFIG = """
models:
  - name: it
    inputs: [{name: x, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""


class Imported(NamedTuple):
    """When it is ready, and once a model's code has made a class of pydantic's."""

    ready: frozenset[str]
    later: frozenset[str]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("start")
    config = folder / "gateway.yaml"
    config.write_text(CONFIG)
    (folder / "somebodys_plugin.py").write_text(PLUGIN)
    (folder / "somebodys_plugin-1.dist-info").mkdir()
    (folder / "somebodys_plugin-1.dist-info" / "entry_points.txt").write_text("[pydantic]\nit = somebodys_plugin:plugin\n")
    (folder / "somebodys_plugin-1.dist-info" / "METADATA").write_text("Name: somebodys-plugin\nVersion: 1\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, config],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return Imported(*map(frozenset, json.loads(done.stdout)))


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
def test_what_the_first_answer_does_without_is_not_imported(imported: Imported, left_out: str) -> None:
    assert left_out not in imported.ready


def test_no_more_of_our_modules_are_imported_than_before(imported: Imported) -> None:
    ours = [name for name in imported.ready if name.split(".")[0] in ("gateway", "backends")]
    assert len(ours) <= _MOST, sorted(ours)


def test_plugins_of_pydantics_are_left_to_models(imported: Imported) -> None:
    assert "somebodys_plugin" in imported.later
