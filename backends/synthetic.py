"""A model that is only its cost: fixed_ms + row_ms · rows, and faults on demand. For tests, simulation and benchmarks.

A run takes that time asleep (a device that works while the CPU is free) or spinning (Python code that holds a core and the
GIL). Faults are chosen by content, so that a client can provoke them through a whole gateway: `faults` maps a fault to the
value that brings it about when an element of the first input equals it.

    fail   the batch fails                        ExecutionFailed
    lose   the session is lost                    SessionLost
    hang   the run does not return until the session is closed, then the session is lost
    exit   the process ends at once, as if killed
    short  one row too few comes back
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from backends.base import NO_OPTIONS, Device, ExecutionFailed, LoadFailed, ModelSpec, SessionLost, Tensors, TensorSpec
from backends.datatypes import NUMPY

FAULTS: Final = ("fail", "lose", "hang", "exit", "short")


def load(
    declared: ModelSpec,
    *,
    fixed_ms: float = 1.0,
    row_ms: float = 0.1,
    spin: bool = False,
    output: str = "echo",
    faults: Mapping[str, float] = NO_OPTIONS,
    load_ms: float = 0.0,
    fail_opens: int = 0,
) -> "SyntheticModel":
    """output: `echo` gives input i as output i, `sum` gives each row's sum over all inputs, in every output's shape.

    load_ms: how long opening a session takes. fail_opens: so many openings fail before one succeeds.
    Without declared tensors the model takes INPUT0 FP32 (rows, 16) and gives OUTPUT0 of the same shape.
    """
    unknown = set(faults) - set(FAULTS)
    if unknown:
        raise LoadFailed(f"faults: unknown {sorted(unknown)}, expected some of {', '.join(FAULTS)}")
    if output not in ("echo", "sum"):
        raise LoadFailed(f"output: unknown {output!r}, expected echo or sum")
    inputs = declared.inputs or (TensorSpec("INPUT0", "FP32", (-1, 16) if declared.max_rows else (16,)),)
    if declared.outputs:
        outputs = declared.outputs
    elif output == "echo":
        outputs = tuple(TensorSpec(f"OUTPUT{i}", tensor.datatype, tensor.shape) for i, tensor in enumerate(inputs))
    else:
        outputs = (TensorSpec("OUTPUT0", "FP32", (-1, 1) if declared.max_rows else (1,)),)
    if output == "echo" and [(t.datatype, len(t.shape)) for t in inputs] != [(t.datatype, len(t.shape)) for t in outputs]:
        raise LoadFailed("output: echo needs as many outputs as inputs, of the same datatypes and dimensions; use `sum`")
    spec = ModelSpec(
        "synthetic",
        inputs,
        outputs,
        declared.max_rows,
        declared.row_sizes,
        reads_parameters=False,
        only_computes=not faults and (spin or not (fixed_ms or row_ms)),
    )
    return SyntheticModel(
        spec,
        fixed_ns=int(fixed_ms * 1e6),
        row_ns=int(row_ms * 1e6),
        spin=spin,
        sums=output == "sum",
        faults=dict(faults),
        load_s=load_ms / 1e3,
        fail_opens=fail_opens,
    )


class SyntheticModel:
    def __init__(
        self,
        spec: ModelSpec,
        *,
        fixed_ns: int,
        row_ns: int,
        spin: bool,
        sums: bool,
        faults: dict[str, float],
        load_s: float,
        fail_opens: int,
    ) -> None:
        self.spec = spec
        self.device = Device("cpu")
        self.memory_bytes = 0
        self.fixed_ns = fixed_ns
        self.row_ns = row_ns
        self.spin = spin
        self.sums = sums
        self.faults = faults
        self._load_s = load_s
        self._fail_opens = fail_opens
        self._lock = threading.Lock()

    def open_session(self, index: int) -> "SyntheticSession":
        with self._lock:
            fails = self._fail_opens > 0
            self._fail_opens -= fails
        time.sleep(self._load_s)
        if fails:
            raise LoadFailed(f"session {index}: told to fail by `fail_opens`")
        return SyntheticSession(self)

    def close(self) -> None:
        pass


class SyntheticSession:
    def __init__(self, model: SyntheticModel) -> None:
        self._model = model
        self._closed = threading.Event()

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        started_ns = time.monotonic_ns()
        model = self._model
        first = next(iter(inputs.values()))
        rows = first.shape[0] if model.spec.max_rows else 1
        fault = self._fault(first) if model.faults else None
        outputs = _sums(model.spec, inputs) if model.sums else _echo(model.spec, inputs)
        rest_ns = started_ns + model.fixed_ns + model.row_ns * rows - time.monotonic_ns()
        if model.spin:
            end_ns = time.monotonic_ns() + rest_ns
            while time.monotonic_ns() < end_ns:
                pass
        elif rest_ns > 0:
            time.sleep(rest_ns / 1e9)
        if fault == "short":
            return {name: array[:-1] for name, array in outputs.items()}
        return outputs

    def _fault(self, first: np.ndarray) -> str | None:
        for fault, value in self._model.faults.items():
            if not (first == value).any():
                continue
            if fault == "fail":
                raise ExecutionFailed(f"told to fail by an input of {value:g}")
            if fault == "lose":
                raise SessionLost(f"told to be lost by an input of {value:g}")
            if fault == "exit":
                os._exit(1)
            if fault == "hang":
                self._closed.wait()
                raise SessionLost("closed while it hung")
            return fault
        return None

    def close(self) -> None:
        self._closed.set()


def _echo(spec: ModelSpec, inputs: Tensors) -> Tensors:
    return {output.name: inputs[given.name] for given, output in zip(spec.inputs, spec.outputs, strict=True)}


def _sums(spec: ModelSpec, inputs: Tensors) -> Tensors:
    """Each row's sum, in every element of the row; an open dimension of an output beside the rows has size 1."""
    arrays = [inputs[given.name] for given in spec.inputs if given.name in inputs]
    rows = arrays[0].shape[0] if spec.max_rows else 1
    totals = np.zeros(rows)
    for array in arrays:
        totals += array.reshape(rows, -1).sum(axis=1, dtype=np.float64)
    outputs: Tensors = {}
    for output in spec.outputs:
        per_row = tuple(max(size, 1) for size in (output.shape[1:] if spec.max_rows else output.shape))
        filled = np.broadcast_to(totals.reshape(rows, *(1 for _ in per_row)), (rows, *per_row)).astype(NUMPY[output.datatype])
        outputs[output.name] = filled if spec.max_rows else filled.reshape(per_row)
    return outputs
