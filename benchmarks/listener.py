"""The bare HTTP listener against well-kept servers: the same POST of 150 bytes, the same answer, nothing behind them.

    python -m benchmarks.listener --connections 1 64 --seconds 5 [--granian PYTHON]

Needs `wrk`. Each server is one process on the first core this process may use, wrk has the others. --granian names an
interpreter that has granian (it is no dependency of the project); uvicorn comes with ray[serve]. Rounds alternate between
the servers, so that a noisy machine treats them alike; the best round of each counts, all are shown.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [round(n * 0.37, 2) for n in range(16)]}]}
).encode()
ANSWER = json.dumps(
    {
        "model_name": "linear",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0.1, 0.2, 0.3, 0.4]}],
    }
).encode()
LUA = 'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\nwrk.body = [==[%s]==]\n'


# the servers


def serve_ours(port: int) -> None:
    import uvloop

    from gateway.config import Limits
    from gateway.edges.http_server import HttpServer
    from gateway.wire.exchange import Exchange

    def answer(exchange: Exchange) -> None:
        assert len(exchange.body) == len(BODY)
        exchange.respond(200, ANSWER)

    async def main() -> None:
        await HttpServer(answer, Limits()).start("127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(main())


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    assert len(body) == len(BODY)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def rsgi(scope: Any, protocol: Any) -> None:
    assert len(await protocol()) == len(BODY)
    protocol.response_bytes(200, [("content-type", "application/json")], ANSWER)


def serve_uvicorn(port: int) -> None:
    import uvicorn

    uvicorn.run(asgi, port=port, loop="uvloop", http="httptools", log_level="error", access_log=False, lifespan="off")


def serve_granian(port: int) -> None:
    from granian import Granian  # type: ignore[import-not-found,unused-ignore]  # from the interpreter of --granian

    Granian("listener:rsgi", port=port, interface="rsgi", workers=1, loop="uvloop", log_enabled=False).serve()


SERVERS = {"ours": serve_ours, "uvicorn": serve_uvicorn, "granian": serve_granian}


# measuring


@dataclass(frozen=True, slots=True)
class Round:
    """cpu_us: of the server and its children, per request."""

    rps: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


def measure(name: str, python: str, connections: int, seconds: int, script: Path, cores: list[int]) -> Round:
    import psutil

    from benchmarks.processor_time import cpu_between, cpu_s

    port = free_port()
    here = Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parent.parent)])}
    server = subprocess.Popen(
        [python, str(here), "--serve", name, "--port", str(port)], env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]),
    )  # fmt: skip
    try:
        wait_for(port, server)
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        before = cpu_s(processes)
        output = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), f"http://127.0.0.1:{port}/x"],
            check=True, capture_output=True, text=True, timeout=seconds + 30,
            preexec_fn=lambda: os.sched_setaffinity(0, cores[1:] or cores),
        ).stdout  # fmt: skip
        used_s = cpu_between(before, cpu_s(processes))
    finally:
        server.terminate()
        server.wait(30)
    assert "Non-2xx" not in output, output
    requests = int(find(r"(\d+) requests in", output))
    return Round(
        float(find(r"Requests/sec:\s+([\d.]+)", output)),
        milliseconds(find(r"\n +50%\s+(\S+)", output)),
        milliseconds(find(r"\n +99%\s+(\S+)", output)),
        used_s / requests * 1e6,
    )


def find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def milliseconds(text: str) -> float:
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--granian", metavar="PYTHON", help="an interpreter that has granian")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve](options.port)
        return
    pythons = {"ours": sys.executable, "uvicorn": sys.executable} | ({"granian": options.granian} if options.granian else {})
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "post.lua"
        script.write_text(LUA % BODY.decode())
        for connections in options.connections:
            rounds: dict[str, list[Round]] = {name: [] for name in pythons}
            for _ in range(options.rounds):
                for name, python in pythons.items():
                    rounds[name].append(measure(name, python, connections, options.seconds, script, cores))
            best = {name: max(found, key=lambda each: each.rps) for name, found in rounds.items()}
            print(f"\n{connections} connections, best of {options.rounds} rounds of {options.seconds} s")
            for name, found in best.items():
                every = " ".join(f"{each.rps:.0f}" for each in rounds[name])
                print(
                    f"  {name:8} {found.rps:8.0f} requests/s  p50 {found.p50_ms:6.2f} ms  p99 {found.p99_ms:6.2f} ms  "
                    f"{found.cpu_us:5.1f} µs CPU/request  ours / {name}: {best['ours'].rps / found.rps:.2f}  ({every})"
                )


if __name__ == "__main__":
    main()
