"""What a model prints fails no request."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from tests.served.gateway_process import ROOT, served

SPEAKS = """
import sys
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
    print("a line", file=stream)
    stream.buffer.write(b"bytes" * 100_000)
"""


def speak(before: str, shell: str) -> "subprocess.CompletedProcess[str]":
    """In a process whose output goes where the shell says."""
    code = "import logging; logging.basicConfig(level='INFO')\nfrom gateway.process import prints\n" + before + SPEAKS
    command = ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_without_it_a_print_raises() -> None:
    assert speak("", ">/dev/full 2>/dev/full").returncode != 0


def test_what_cannot_be_printed_is_lost() -> None:
    assert speak("prints.never_raise()\n", ">/dev/full 2>/dev/full").returncode == 0


def test_it_is_told_once_that_standard_output_is_lost() -> None:
    said = speak("prints.never_raise()\n", ">/dev/full")
    told = "standard output: No space left on device: what models print there is lost, as long as that is so"
    assert said.stderr.count(told) == 1
    assert said.stderr.count("a line") == 1


def test_what_can_be_printed_is() -> None:
    said = speak("print('before', end=' ')\nprints.never_raise()\n", "")
    assert said.stdout.startswith("before xxx")
    for stream in (said.stdout, said.stderr):
        assert (stream.count("x"), stream.count("a line"), stream.count("bytes")) == (100_000, 1, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_that_prints_answers_while_the_disk_is_full(tmp_path: Path, isolation: str) -> None:
    speaks = "".join(f"            {line}\n" for line in SPEAKS.strip().splitlines())
    speaks = f"        if inputs['INPUT0'][0, 0] == 7:  # not where it is warmed up\n{speaks}"
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def predict(self, inputs):\n{speaks}        return {{'OUTPUT0': inputs['INPUT0']}}\n"
    )
    config = tmp_path / "x.yaml"
    config.write_text(
        "models:\n- name: m\n  inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]\n"
        "  outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]\n"
        f"  backends: [{{kind: python, model: '{tmp_path}/own.py:Own', isolation: {isolation}}}]\n"
    )
    full = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    with served(config, "--no-ray", within=full) as gateway:
        assert gateway.process.stdout is not None
        gateway.process.stdout.close()  # whoever started it has read enough
        with tritonclient.http.InferenceServerClient(gateway.http) as client:
            for _ in range(3):
                tensor = tritonclient.http.InferInput("INPUT0", [1, 4], "FP32")
                tensor.set_data_from_numpy(np.full((1, 4), 7, np.float32))
                assert client.infer("m", [tensor]).as_numpy("OUTPUT0").sum() == 28
