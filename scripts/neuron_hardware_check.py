"""Check the Neuron backend on a real Inferentia2 or Trainium: run it on an inf2 or trn1 instance with AWS's Neuron packages.

    NEURON_RT_VISIBLE_CORES=0,1 python scripts/neuron_hardware_check.py [--model minilm] [--target inf2]

Compiles an example model, holds its outputs against PyTorch on the CPU, and asks of the device what tests ask of its double:
fixed shapes, refusal of others, a session on each core at once, refusal without cores, and a core's single owner. Then it times
each rows × length. Exit code 0 if nothing failed; what could not be asked is said to be skipped. Nothing else in this project
claims to have run on a Neuron device.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import backends
from backends.base import LoadFailed, Model, ModelSpec, Session, Tensors, TensorSpec, example_inputs
from backends.neuron import VISIBLE_CORES, library, set_neuron_cores, visible_cores
from backends.source import load_object

# Of the greatest output. neuronx-cc leaves fp32 as it is since SDK 2.27; before, it cast matrix products to bf16 (2e-2).
TOLERANCE = 1e-3
REFUSED = 3  # exit code of this script's second process, if it got no core
MODELS = {
    "linear": (
        "configs/examples/linear.py:linear",
        ModelSpec("", (TensorSpec("INPUT0", "FP32", (-1, 16)),), (TensorSpec("OUTPUT0", "FP32", (-1, 4)),), 8),
        (),
    ),
    "minilm": (
        "configs/examples/minilm.py:embedder",
        ModelSpec(
            "",
            (TensorSpec("input_ids", "INT64", (-1, -1)), TensorSpec("attention_mask", "INT64", (-1, -1))),
            (TensorSpec("embedding", "FP32", (-1, 384)),),
            8,
        ),
        (16, 128),
    ),
}


class Skipped(Exception):
    """What could not be asked here, and why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="linear")
    parser.add_argument("--target", choices=("inf2", "trn1"), default="inf2")
    parser.add_argument("--folder", type=Path, default=Path("models"))
    parser.add_argument("--hold-core", action="store_true", help=argparse.SUPPRESS)  # this script's own second process
    arguments = parser.parse_args()
    source, spec, lengths = MODELS[arguments.model]
    artifact = arguments.folder / f"{arguments.model}-{arguments.target}-check"
    if arguments.hold_core:
        model = backends.load("neuron", {"model": str(artifact)}, spec)
        try:
            model.open_session(0)
        except LoadFailed as exc:
            print(exc)
            return REFUSED
        return 0

    how: dict[str, Any] = {"source": source, "options": {}, "row_sizes": (1, 8), "target": arguments.target, "lengths": lengths}
    print(backends.build("neuron", artifact, spec, **how))
    model = backends.load("neuron", {"model": str(artifact)}, spec)
    print(
        f"platform {model.spec.platform}, cores {os.environ.get(VISIBLE_CORES)}, {model.memory_bytes / 1e6:.0f} MB of artifacts"
    )
    if model.spec.platform != "neuron":
        print("NOTE: this is a double of the library, not a device")
    checks: list[tuple[str, Callable[[], None]]] = [
        ("outputs equal PyTorch on the CPU", lambda: outputs_equal(model, source, lengths)),
        ("a shape that was not compiled is refused", lambda: other_shape_is_refused(artifact, spec)),
        ("sessions run in parallel, each on its core", lambda: sessions_run_in_parallel(model, lengths)),
        ("a core has one owner", lambda: a_core_has_one_owner(arguments)),
        ("without cores it refuses to load", lambda: no_cores_refuses(artifact, spec)),
    ]
    failed = 0
    for name, check in checks:
        try:
            check()
            print(f"ok      {name}")
        except Skipped as exc:
            print(f"skipped {name}: {exc}")
        except Exception as exc:  # the point is to report every check
            failed += 1
            print(f"FAILED  {name}: {type(exc).__name__}: {exc}")
    session = model.open_session(0)
    for rows in model.spec.row_sizes:
        for length in lengths or (0,):
            inputs = example_inputs(model.spec, rows, length)
            times = [timed(lambda inputs=inputs: session.run(inputs, {})) for _ in range(200)]
            p50, p99 = statistics.median(times), sorted(times)[197]
            print(
                f"{rows} rows × length {length}: p50 {p50:.3f} ms, p99 {p99:.3f} ms, {1e3 * rows / p50:.0f} rows/s on one core"
            )
    return 1 if failed else 0


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def sample(spec: ModelSpec, rows: int, length: int) -> Tensors:
    generator = np.random.default_rng(rows)
    inputs = example_inputs(spec, rows, length)
    for name, array in inputs.items():
        if array.dtype.kind == "f":
            array[...] = generator.standard_normal(array.shape)
        elif name == "input_ids":
            array[...] = generator.integers(1000, 20000, array.shape)
    return inputs


def outputs_equal(model: Model, source: str, lengths: tuple[int, ...]) -> None:
    import torch

    module = load_object(source)()
    session = model.open_session(0)
    for rows in model.spec.row_sizes:
        for length in lengths or (0,):
            inputs = sample(model.spec, rows, length)
            with torch.inference_mode():
                expected = module(*(torch.from_numpy(array) for array in inputs.values())).numpy()
            outputs = session.run(inputs, {})[model.spec.outputs[0].name]
            difference = float(np.abs(outputs - expected).max() / np.abs(expected).max())
            print(f"        {rows} × {length}: greatest difference {difference:.2e} of the greatest output")
            if not difference <= TOLERANCE:
                raise AssertionError(f"{difference:.3g} is more than {TOLERANCE:g}")


def other_shape_is_refused(artifact: Path, spec: ModelSpec) -> None:
    """By the artifact itself: a session of ours asks it for no other."""
    import torch

    path = sorted(artifact.glob("*.pt"))[0]
    program = torch.jit.load(str(path))
    set_neuron_cores(library("inf2"))(program, start_nc=0, nc_count=1)
    rows, length = map(int, path.stem.split("x"))
    given = [[torch.from_numpy(array) for array in example_inputs(spec, more, length).values()] for more in (rows, rows + 1)]
    program(*given[0])
    try:
        program(*given[1])
    except RuntimeError as exc:
        if "shape" in str(exc):
            return
        raise
    raise AssertionError("it was accepted")


def sessions_run_in_parallel(model: Model, lengths: tuple[int, ...]) -> None:
    """As many at once as there are cores take about as long as one; on one core they would take as many times as long."""
    cores = len(visible_cores(os.environ.get(VISIBLE_CORES)))
    if cores < 2:
        raise Skipped(f"{VISIBLE_CORES} names one core: name two or more")
    inputs = sample(model.spec, model.spec.row_sizes[-1], max(lengths, default=0))
    sessions = [model.open_session(index) for index in range(cores)]
    alone_ms, (expected,) = run_at_once(sessions[:1], inputs)
    together_ms, outputs = run_at_once(sessions, inputs)
    for output in outputs:
        np.testing.assert_allclose(output, expected, rtol=1e-5)
    print(f"        {cores} sessions at once took {together_ms / alone_ms:.2f} times as long as one alone")
    if model.spec.platform != "neuron":
        raise Skipped("their answers are right, but a double says nothing of the time")
    if together_ms > alone_ms * (1 + cores) / 2:
        raise AssertionError("they share a core")


def run_at_once(sessions: list[Session], inputs: Tensors) -> tuple[float, list[np.ndarray]]:
    """Milliseconds of 200 runs of each, and the last outputs of each."""
    outputs: dict[int, np.ndarray] = {}
    failures: list[Exception] = []

    def work(index: int) -> None:
        try:
            for _ in range(200):
                (outputs[index],) = sessions[index].run(inputs, {}).values()
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(sessions))]

    def all_of_them() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    took_ms = timed(all_of_them)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise AssertionError("a session hangs: 200 runs were not done in 120 s")
    return took_ms, [outputs[index] for index in range(len(sessions))]


def a_core_has_one_owner(arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--hold-core", "--model", arguments.model, "--target", arguments.target]
    ended = subprocess.run([*command, "--folder", str(arguments.folder)], capture_output=True, text=True, timeout=300)
    if ended.returncode == 0:
        raise AssertionError("a second process got the same cores")
    said = ended.stdout + ended.stderr  # the runtime logs there
    if ended.returncode != REFUSED or "not available" not in said:
        raise AssertionError(f"a second process ended otherwise, with {ended.returncode}: {said.strip()[-500:]}")


def no_cores_refuses(artifact: Path, spec: ModelSpec) -> None:
    given = os.environ.pop(VISIBLE_CORES)
    try:
        backends.load("neuron", {"model": str(artifact)}, spec)
    except LoadFailed as exc:
        if "no NeuronCore was given" in str(exc):
            return
        raise
    finally:
        os.environ[VISIBLE_CORES] = given
    raise AssertionError("it loaded")


if __name__ == "__main__":
    sys.exit(main())
