"""`import gateway`: quick, and with the one version."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import gateway

ROOT = Path(__file__).parent.parent.parent


def test_alone_it_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import gateway; gateway.__version__; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "gateway\n"


@pytest.mark.slow
def test_a_model_is_loaded_without_ray_and_torch() -> None:
    code = (
        "import sys, gateway; from tests.from_python.models import double;"
        "gateway.load(double).close(); gateway.run(double).close(); gateway.TestClient(double).close();"
        "print(*{'ray', 'torch', 'onnxruntime', 'loadtest', 'argparse'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_every_public_name_is_there_and_no_other() -> None:
    for name in gateway.__all__:
        assert getattr(gateway, name) is not None
    assert set(gateway.__all__) <= set(dir(gateway))
    with pytest.raises(AttributeError, match="module 'gateway' has no attribute 'laod'"):
        _ = gateway.laod  # type: ignore[attr-defined]  # the mistake


def test_the_version_of_the_package_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gateway.__version__"}
    assert version("serving-gateway") == gateway.__version__


def test_the_packages_say_that_they_are_typed() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("gateway", "backends", "loadtest"):
        assert (ROOT / package / "py.typed").exists()
        assert "py.typed" in data[package]
