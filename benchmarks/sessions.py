"""Time the backends of a configuration's models bare: one session, no gateway, batches of rows × length.

    python -m benchmarks.sessions configs/examples/minilm.yaml configs/examples/minilm-cpu.yaml

One line per model: p50 in ms of each rows × length, and the megabytes of its weights. With --cpu: of the CPU time of the
session's own thread, which is steadier on a machine that is not idle, and right where sessions have one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backends
from backends.base import Session, example_inputs
from gateway.config import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="*", type=int, default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=0.8, help="for each rows × length")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time of the thread, for sessions of one thread")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu else time.perf_counter
    shapes = [(rows, length) for rows in arguments.rows for length in arguments.lengths]
    print(
        ("p50 CPU ms" if arguments.cpu else "p50 ms").ljust(34),
        *(f"{rows}×{length}".rjust(9) for rows, length in shapes),
        "MB".rjust(7),
    )
    for path in arguments.configs:
        for configured in load_config(path).models:
            backend: Any = configured.backends[0]
            if (arguments.models and configured.name not in arguments.models) or configured.ragged is None:
                continue
            model = backends.load(backend.kind, backend.options(), configured.declared())
            session = model.open_session(0)
            times = [
                p50_ms(session, example_inputs(model.spec, rows, length), arguments.seconds, clock) for rows, length in shapes
            ]
            name = f"{configured.name} ({backend.kind})"
            print(name.ljust(34), *(f"{ms:9.2f}" for ms in times), f"{model.memory_bytes / 1e6:7.0f}", flush=True)
            session.close()
            model.close()


def p50_ms(session: Session, inputs: Any, seconds: float, clock: Callable[[], float]) -> float:
    for _ in range(2):
        session.run(inputs, {})
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        started = clock()
        session.run(inputs, {})
        times.append(clock() - started)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
