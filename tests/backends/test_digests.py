"""A file is loaded only if it is the one that is meant."""

import hashlib
import json
import os
import py_compile
import sys
from pathlib import Path

import pytest

import backends
from backends.base import LoadFailed
from backends.model_folders import forget_code
from backends.source import load_object
from gateway.config import parse_config
from gateway.configuring.check import check
from gateway.deploying.packing import packed
from gateway.documents.reader import read
from gateway.errors import ConfigError

CODE = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()

class Model:
    inputs = (("INPUT0", "FP32", (-1, 1)),)
    outputs = (("OUTPUT0", "FP32", (-1, 1)),)

    def predict(self, inputs):
        return {"OUTPUT0": inputs["INPUT0"]}
"""


def test_the_file_that_is_meant_is_loaded_and_no_other_is_run(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(CODE)
    options = {"model": f"{path}:Model", "sha256": hashlib.sha256(CODE.encode()).hexdigest()}
    with pytest.raises(LoadFailed, match=f"expected {'0' * 64}: it is not the file that is meant"):
        backends.load("python", options | {"sha256": "0" * 64})
    assert not path.with_suffix(".ran").exists()
    backends.load("python", options).close()
    assert path.with_suffix(".ran").exists()


def test_what_is_run_is_the_file_and_not_what_python_has_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "model.py"
    for text in ('MADE = "1"', 'MADE = "2"'):
        path.write_text(text)
        os.utime(path, (1, 1))  # and of the same size
        py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
        path.write_text(text.replace("1", "3").replace("2", "4"))
        os.utime(path, (1, 1))
        forget_code(tmp_path)
        assert load_object(f"{path}:MADE") == ("3" if "1" in text else "4")


def test_code_that_was_loaded_before_its_file_became_the_one_that_is_meant_is_not_taken_for_it(tmp_path: Path) -> None:
    path, other = tmp_path / "model.py", tmp_path / "other.py"
    path.write_text(CODE)
    other.write_text("from .model import Model")
    load_object(f"{other}:Model")
    backends.load("python", {"model": f"{path}:Model"}).close()
    meant = CODE + "# changed"
    path.write_text(meant)
    options = {"model": f"{path}:Model", "sha256": hashlib.sha256(meant.encode()).hexdigest()}
    with pytest.raises(LoadFailed, match=r"model.py: has changed since this process imported it: restart"):
        backends.load("python", options)
    forget_code(tmp_path)
    backends.load("python", options).close()


@pytest.mark.parametrize("sha256", ["0" * 64, "no digest"])
def test_a_check_tells_of_another_file_and_runs_none_of_it(tmp_path: Path, sha256: str) -> None:
    path, config = tmp_path / "model.py", tmp_path / "gateway.yaml"
    path.write_text(CODE)
    backend = {"kind": "python", "model": "model.py:Model", "sha256": sha256}
    config.write_text(json.dumps({"models": [{"name": "m", "backends": [backend | {"sessions": 0}]}]}))
    told = {fault.path: fault.found for fault in check(config).faults}
    assert told.keys() == {"models[0].backends[0].sessions", "models[0].backends[0].sha256"}
    if sha256 == "0" * 64:
        real = hashlib.sha256(CODE.encode()).hexdigest()
        assert f"another file: its SHA-256 is {real}" in told["models[0].backends[0].sha256"]
        with pytest.raises(ConfigError, match=f"sha256: .*another file: its SHA-256 is {real}"):
            packed(read(_rewritten(config, {"models": [{"name": "m", "backends": [backend]}]})))
        backend["sha256"] = real
        assert packed(read(_rewritten(config, {"models": [{"name": "m", "backends": [backend]}]}))).files == {"model.py": path}
    assert not path.with_suffix(".ran").exists()


def test_a_check_tells_that_a_module_has_no_digest_and_does_not_import_it(tmp_path: Path) -> None:
    backend = {"kind": "python", "model": "this:Zen", "sha256": "0" * 64}
    config = _rewritten(tmp_path / "gateway.yaml", {"models": [{"name": "m", "backends": [backend]}]})
    told = {fault.path: fault.found for fault in check(config).faults}
    assert told["models[0].backends[0].sha256"] == "of a module (this), which is no one file"
    assert "this" not in sys.modules


def _rewritten(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_what_is_no_file_has_no_digest() -> None:
    with pytest.raises(LoadFailed, match="its sha256 cannot be known: No such file"):
        backends.load("python", {"model": "some.module:Model", "sha256": "0" * 64})


def test_the_configuration_takes_only_a_digest() -> None:
    backend = {"kind": "onnxruntime", "model": "m.onnx"}
    for wrong in ("sha256:" + "0" * 64, "0" * 63, "g" * 64, 5):
        with pytest.raises(ConfigError, match=r"backends\[0\]\.sha256: .*64 hexadecimal digits"):
            parse_config({"models": [{"name": "m", "backends": [{**backend, "sha256": wrong}]}]}, source="test")
    (model,) = parse_config({"models": [{"name": "m", "backends": [{**backend, "sha256": "0" * 64}]}]}, source="test").models
    assert model.backends[0].options()["sha256"] == "0" * 64
