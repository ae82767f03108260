"""A real Triton server on loopback, for tests and benchmarks that compare with it.

It comes from the wheel of nvidia-pytriton, in a virtual environment of its own (`make triton` makes it in .venv-triton):
Triton 2.51 with the python backend, no GPU needed.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ports import free_port

VENV = Path(__file__).resolve().parent.parent / ".venv-triton"
_START_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class TritonServer:
    """A running server. http_url, grpc_url: host:port, as tritonclient takes them."""

    http_url: str
    grpc_url: str
    pid: int


def require_triton() -> None:
    """Skip the calling test where no tritonserver is installed."""
    import pytest  # here: benchmarks start this server where no tests are installed

    if not (VENV / "bin" / "python").exists():
        pytest.skip("no Triton server in .venv-triton: run `make triton` (linux x86_64)")


def write_model(repository: Path, name: str, config: str, code: str | None = None, files: dict[str, str] | None = None) -> None:
    """Lay a python-backend model into a repository: version 1, its config.pbtxt and files beside it.

    config: without name and backend. code: None leaves the model without its model.py, so that it fails to load.
    """
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{config}')
    if code is not None:
        (repository / name / "1" / "model.py").write_text(code)
    for path, text in (files or {}).items():
        (repository / name / path).write_text(text)


@contextmanager
def triton_server(directory: Path, *, load: Sequence[str] = ("*",), options: tuple[str, ...] = ()) -> Iterator[TritonServer]:
    """Serve the models in `directory`/models until the block ends; the rest of `directory` is the server's.

    load: the models to load at the start, "*" being all; the rest waits for clients to load it (explicit model control).
    options: more of tritonserver's flags.
    """
    site = next((VENV / "lib").glob("python3.*")) / "site-packages"
    python_version = site.parent.name.removeprefix("python")
    backends = directory / "backends" / "python"
    shutil.copytree(site / "pytriton/tritonserver/backends/python", backends)
    stub = site / "pytriton/tritonserver/python_backend_stubs" / python_version / "triton_python_backend_stub"
    shutil.copy(stub, backends)
    find_libdir = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    libdir = subprocess.run(
        [VENV / "bin" / "python", "-c", find_libdir], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    http_port, grpc_port, metrics_port = free_port(), free_port(), free_port()
    command = [
        str(site / "pytriton/tritonserver/bin/tritonserver"),
        f"--model-repository={directory / 'models'}",
        f"--backend-directory={directory / 'backends'}",
        f"--cache-directory={site / 'pytriton/tritonserver/caches'}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        "--allow-gpu-metrics=false",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in load),
        "--exit-timeout-secs=5",
        *options,
    ]
    environment = {
        **os.environ,
        # The interpreter's own library directory first: the stub would else load another libpython and time out.
        "LD_LIBRARY_PATH": f"{libdir}:{site / 'nvidia_pytriton.libs'}",
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
    }
    log = directory / "triton.log"
    die_with_us = ctypes.CDLL(None, use_errno=True).prctl
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_us(_PR_SET_PDEATHSIG, signal.SIGTERM),  # should the tests be killed
        )
        try:
            _wait_until_ready(process, http_port, log)
            yield TritonServer(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", process.pid)
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: triton\r\nConnection: close\r\n\r\n")
                if connection.recv(64).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"tritonserver did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # The python stubs are in the server's process group; it may die without them.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=5)
