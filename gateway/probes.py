"""Runs before traffic: they warm every session up, and teach the service model of a lane what its backend costs.

Inputs are made up from the model's spec: ones (which are valid token ids, masks and pixels alike), open dimensions of size 1,
ragged inputs of each bucket's length. The smallest batches of all buckets come first, then the largest ones, until the time
is up: what was not probed is learned from the first requests. A probe that fails says nothing about real requests, whose
content the model may insist on: it ends the probing, not the load.
"""

import asyncio
import logging
from collections.abc import Iterator

import numpy as np

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.clock import Clock
from gateway.config import Ragged
from gateway.protocols.tensors import shape_key
from gateway.runner import BatchRunner, Execution
from gateway.types import InferRequest

log = logging.getLogger(__name__)


async def probe(
    runner: BatchRunner, batcher: Batcher, spec: ModelSpec, ragged: Ragged | None, *, name: str, budget_ns: int, clock: Clock
) -> None:
    """Run each of the batcher's probe sizes in each bucket: in every session side by side, then once alone to be timed.

    budget_ns: no run begins after so long. runner: open and idle. name: of the lane, for the log.
    """
    until_ns = clock.now_ns() + budget_ns
    sizes = batcher.service.probe_rows if spec.max_rows else (1,)
    for request in _requests(spec, ragged, sizes):
        if clock.now_ns() >= until_ns:
            return
        # Started at once: an idle session may be lost at any await.
        ends = await asyncio.gather(*[_start(runner, batcher, request, clock) for _ in range(runner.free_slots)])
        error = next((execution.error for _, execution, _ in ends if execution.error), None)
        if error is not None:
            log.info("%s: not probed, the model refuses made-up inputs: %s", name, error)
            return
        if not ends or not runner.free_slots:
            return
        batch, execution, time_ns = await _start(runner, batcher, request, clock)
        if execution.error is None:
            batcher.service.probe(batch.group, batch.padded_rows, [time_ns])


def _requests(spec: ModelSpec, ragged: Ragged | None, sizes: tuple[int, ...]) -> Iterator[InferRequest]:
    """One request per size and length, small ones first."""
    lengths = (ragged.buckets or (1,)) if ragged else (1,)
    for rows in sizes:
        for length in lengths:
            inputs = {
                tensor.name: _ones(tensor, rows if spec.max_rows else 0, length if ragged and tensor.name in ragged.pad else 1)
                for tensor in spec.inputs
                if not tensor.optional
            }
            yield InferRequest("", "", "", inputs, rows, 0, shape_key=shape_key(spec, ragged, inputs))


def _ones(tensor: TensorSpec, rows: int, length: int) -> np.ndarray:
    """rows: 0 for a model without a batch dimension. length: of an open axis 1."""
    shape = [size if size >= 0 else 1 for size in tensor.shape]
    if rows:
        shape[0] = rows
        if len(shape) > 1 and tensor.shape[1] < 0:
            shape[1] = length
    if tensor.datatype == "BYTES":
        return np.full(shape, b"1", dtype=object)
    return np.ones(shape, NUMPY[tensor.datatype])


def _start(
    runner: BatchRunner, batcher: Batcher, request: InferRequest, clock: Clock
) -> "asyncio.Future[tuple[Batch, Execution, int]]":
    """Run a request as a batch of its own; gives also the nanoseconds that its worker was taken."""
    ended: asyncio.Future[tuple[Batch, Execution, int]] = asyncio.get_running_loop().create_future()

    def done(batch: Batch, execution: Execution) -> None:
        if not ended.done():  # else nobody waits any more
            ended.set_result((batch, execution, clock.now_ns() - batch.closed_ns))

    runner.start(batcher.probe(request, clock.now_ns()), done)
    return ended
