"""Time the backends of a configuration's models bare: one session, no gateway, batches of rows × length.

    python benchmarks/sessions.py configs/examples/minilm.yaml configs/examples/minilm-cpu.yaml

One line per model: p50 in ms of each rows × length, and the megabytes of its weights. Run it on an otherwise idle machine.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import backends
from backends.base import Session, example_inputs
from gateway.compile import stated_spec
from gateway.config import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="*", type=int, default=[16, 64, 128])
    parser.add_argument("--seconds", type=float, default=0.8, help="for each rows × length")
    arguments = parser.parse_args()
    shapes = [(rows, length) for rows in arguments.rows for length in arguments.lengths]
    print("p50 ms".ljust(34), *(f"{rows}×{length}".rjust(9) for rows, length in shapes), "MB".rjust(7))
    for path in arguments.configs:
        for configured in load_config(path).models:
            backend: Any = configured.backends[0]
            if (arguments.models and configured.name not in arguments.models) or configured.ragged is None:
                continue
            model = backends.load(backend.kind, backend.options(), stated_spec(configured))
            session = model.open_session(0)
            times = [p50_ms(session, example_inputs(model.spec, rows, length), arguments.seconds) for rows, length in shapes]
            name = f"{configured.name} ({backend.kind})"
            print(name.ljust(34), *(f"{ms:9.2f}" for ms in times), f"{model.memory_bytes / 1e6:7.0f}", flush=True)
            session.close()
            model.close()


def p50_ms(session: Session, inputs: Any, seconds: float) -> float:
    for _ in range(2):
        session.run(inputs, {})
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        started = time.perf_counter()
        session.run(inputs, {})
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
