"""What the CPU image holds and takes: installed size, time from start to the first answer, memory under load.

    make sbom                                     # makes build/image as docker/Dockerfile does
    python -m benchmarks.image build/image        # what an image has in /opt/gateway

The environment is measured where it lies, in a plain process with `--no-ray`. Seconds are the middle of --rounds starts, after
one that is not counted. Memory is the most that the process and what it started have ever held (VmHWM), after --seconds of 64
connections that send one row at a time over REST; meanwhile each may have no more than --mib of data (RLIMIT_DATA: the heap and
private mappings, which is more than what is resident). Without a container engine that stands in for its memory limit.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
INPUTS = {
    "linear": {"INPUT0": ("FP32", [0.5] * 16)},
    "minilm": {"input_ids": ("INT64", [101, *range(2000, 2014), 102]), "attention_mask": ("INT64", [1] * 16)},
}
CONNECTIONS = 64
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=lambda path: Path(path).absolute(), metavar="ENV")
    parser.add_argument("--models", nargs="+", default=["linear", "minilm"], choices=INPUTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--mib", type=int, default=1024)
    arguments = parser.parse_args()
    if not (arguments.environment / "bin/gateway").exists():
        parser.error(f"ENV: {arguments.environment} has no bin/gateway: `make sbom` makes build/image")
    sizes = installed(arguments.environment)
    print(f"installed: {sum(sizes.values()) / MIB:.0f} MiB")
    print("\n".join(f"  {name:24} {size / MIB:6.1f}" for name, size in sizes.most_common(12)))
    for model in arguments.models:
        starts = [first_answer_s(arguments.environment, model) for _ in range(arguments.rounds + 1)][1:]
        around = f"{min(starts):.2f} to {max(starts):.2f}"
        print(f"{model}: first answer {statistics.median(starts):.2f} s after the start ({around})")
        with serving(arguments.environment, model, arguments.mib) as (process, address):
            before = held_mib(process)
            rps = asyncio.run(load(address, model, arguments.seconds))
            print(f"{model}: {rps:.0f} requests/s; {before:.0f} MiB at rest, at most {held_mib(process):.0f} MiB under load")
    return 0


def installed(environment: Path) -> Counter[str]:
    """Bytes by package, as its files state them; a file with two names counts once."""
    (packages,) = environment.glob("lib/python3.*/site-packages")
    sizes: Counter[str] = Counter()
    seen = set()
    for path in environment.rglob("*"):
        status = path.lstat()
        if path.is_file() and not path.is_symlink() and status.st_ino not in seen:
            seen.add(status.st_ino)
            inside = path.relative_to(packages).parts[0] if path.is_relative_to(packages) else "(the environment itself)"
            sizes[inside] += status.st_size
    return sizes


@contextmanager
def serving(environment: Path, model: str, mib: int) -> Iterator[tuple[psutil.Process, str]]:
    """A gateway of that environment; its process, and where it listens."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (mib * MIB, mib * MIB))

    backend = f"{{kind: onnxruntime, model: {ROOT}/models/{model}.onnx}}"
    text = f"{{models: [{{name: {model}, max_rows: 32, backends: [{backend}]}}]}}"
    command = [str(environment / "bin" / "gateway"), "serve", "-", "--quiet", "--no-ray"]
    command += ["--http-port", "0", "--grpc-port", "0"]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with subprocess.Popen(
        command, cwd="/", env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=limited
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.close()
        try:
            yield psutil.Process(process.pid), process.stdout.readline().split("http=")[1].split()[0]
        finally:
            process.terminate()


def body_of(model: str) -> bytes:
    tensors = [
        {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}
        for name, (datatype, data) in INPUTS[model].items()
    ]
    return json.dumps({"inputs": tensors}).encode()


def first_answer_s(environment: Path, model: str) -> float:
    begun = time.monotonic()
    with serving(environment, model, 1 << 20) as (_, address):
        with urllib.request.urlopen(f"http://{address}/v2/models/{model}/infer", body_of(model)) as response:
            assert json.load(response)["outputs"]
        return time.monotonic() - begun


def held_mib(process: psutil.Process) -> float:
    """The most that it and its children have held."""
    peaks = []
    for each in (process, *process.children(recursive=True)):
        status = Path(f"/proc/{each.pid}/status").read_text()
        peaks.append(int(status.split("VmHWM:")[1].split()[0]) / 1024)
    return sum(peaks)


async def load(address: str, model: str, seconds: float) -> float:
    """Answers per second; every one must be a success."""
    host, _, port = address.rpartition(":")
    body = body_of(model)
    request = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    until = time.monotonic() + seconds

    async def client() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        answered = 0
        while time.monotonic() < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            answered += 1
        writer.close()
        return answered

    return sum(await asyncio.gather(*(client() for _ in range(CONNECTIONS)))) / seconds


if __name__ == "__main__":
    sys.exit(main())
