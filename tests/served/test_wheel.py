"""What is installed stands alone: the wheel, made of the source distribution, where nothing of this checkout is seen.

Nothing is fetched: the libraries that it needs are those of the environment that runs the tests.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PathDistribution, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
SERVE = ["gateway", "serve", "configs/examples/iris.yaml"]

pytestmark = pytest.mark.slow

SPEC = """
gateway: configs/examples/iris.yaml
model: iris
slo: "p99<50ms"
launcher: {kind: local, stands_for: {c7i.large: [0]}}
candidates:
  - {instances: [c7i.large], backend: python}
"""


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """files: of the checkout, as git knows them. source: the source distribution, unpacked."""

    files: tuple[str, ...]
    source: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    checkout, distributed = folder / "checkout", folder / "dist"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout: git does not know which files are its")
    files = tuple(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    for name in files:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    build = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
    run(sys.executable, "-c", build.format("sdist"), distributed, folder=checkout)
    shutil.unpack_archive(next(distributed.glob("*.tar.gz")), folder)
    source = next(folder.glob("serving_gateway-*"))
    run(sys.executable, "-c", build.format("wheel"), distributed, folder=source)
    return Built(files, source, next(distributed.glob("*.whl")))


@dataclass(frozen=True)
class Installed:
    """programs: their folder in a fresh environment. target: what `pip install --target` has made."""

    programs: Path
    target: Path


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    environment, target = folder / "environment", folder / "target"
    install = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", built.wheel)

    def into_environment() -> None:
        run(sys.executable, "-m", "venv", "--without-pip", environment, folder=folder)
        run(sys.executable, "-m", "pip", "--python", environment / "bin" / "python", *install, folder=folder)

    def into_target() -> None:
        run(sys.executable, "-m", "pip", *install, "--target", target, folder=folder)

    together(into_environment, into_target)
    # The libraries of the environment that runs this, without what is installed there of ours: it links to the checkout.
    paths = sysconfig.get_paths()
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text("\n".join({paths["purelib"], paths["platlib"]}))
    return Installed(environment / "bin", target)


def together(*calls: Callable[[], object]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def test_the_source_distribution_is_the_checkout(built: Built) -> None:
    assert not [name for name in built.files if not (built.source / name).exists()]
    assert not [*built.source.rglob("*.pyc")]


def test_the_wheel_says_what_it_is(installed: Installed) -> None:
    (information,) = installed.programs.parent.glob("lib/python*/site-packages/serving_gateway-*.dist-info")
    metadata = PathDistribution(information).metadata
    assert metadata["Version"] == version("serving-gateway")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "\n# Serving gateway\n" in str(metadata)
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "LicenseRef-All-Rights-Reserved"
    assert (information / "licenses" / metadata["License-File"]).read_text() == (ROOT / "LICENSE").read_text()


def test_an_example_is_served_from_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    gateway, loadtest = installed.programs / "gateway", installed.programs / "loadtest"
    (tmp_path / "spec.yaml").write_text(SPEC)

    def first() -> None:
        written = run(gateway, "examples", "iris", folder=tmp_path)
        assert written.splitlines()[:2] == ["configs/examples/iris.yaml", "configs/examples/iris.py"]
        assert written.splitlines()[-1].split() == SERVE
        assert "configs/examples/iris.yaml: valid" in run(gateway, "check", SERVE[-1], folder=tmp_path)
        plan = json.loads(run(loadtest, "plan", "spec.yaml", "--json", folder=tmp_path))
        assert plan["candidates"][0]["usd_per_hour"] == 0.08925

    def meanwhile() -> None:
        assert run(gateway, "--version", folder=tmp_path) == f"gateway {version('serving-gateway')}\n"
        assert "\niris " in run(gateway, "examples", folder=tmp_path)
        assert "inf2.xlarge" in run(loadtest, "prices", "show", "inf2.xlarge", folder=tmp_path)

    together(first, meanwhile)
    assert served_species(gateway, tmp_path) == ["setosa"]


def served_species(gateway: Path, folder: Path) -> list[str]:
    """What the example answers to the first iris there is."""
    command = [gateway, *SERVE[1:], "--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split("http=")[1].split()[0]
            tensor = {"name": "measurements", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}
            body = json.dumps({"inputs": [tensor]}).encode()
            with urllib.request.urlopen(f"http://{address}/v2/models/iris/infer", body, timeout=20) as response:
                answer = json.load(response)
        finally:
            process.terminate()
    assert process.returncode == 0
    species: list[str] = answer["outputs"][0]["data"]
    return species


def test_it_works_from_a_folder_of_its_own(installed: Installed, tmp_path: Path) -> None:
    def there(program: str, *arguments: str) -> str:
        return run(installed.target / "bin" / program, *arguments, folder=tmp_path, PYTHONPATH=str(installed.target))

    together(lambda: there("gateway", "examples", "linear"), lambda: there("loadtest", "prices", "show", "c7i.large"))
    assert (tmp_path / "configs" / "examples" / "linear.py").is_file()
