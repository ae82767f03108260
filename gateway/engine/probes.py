"""Runs before traffic: they warm every session up, and teach the service model of a lane what its backend costs.

Inputs are made up from the model's spec: ones, open dimensions of size 1, padded inputs of each bucket's length. The smallest
batches of all buckets come first, then the largest ones, until the time is up: what was not probed is learned from the first
requests. Where two rows take far longer than one, some sizes more tell whether rows are padded in steps (`batching.steps`).
Where few sizes run at all, all of them do: the first run of each may be what compiles, loads or records it. Where there is an
SLO, and no buckets say which lengths come, a longer one is tried at last (`further_rows`): a model that does not take it says
nothing by that.

A probe that fails ends the probing, but for images of open height and width, which are tried as large as they commonly are,
and smaller, where a model does not take one pixel. Outputs that are not as declared fail the load: no other content mends
that. What the model raises is a warning, since it may insist on content that is not made up; in few words where dimensions
were, too.
"""

import asyncio
import logging
import math
from itertools import product
from typing import Final

import msgspec
import numpy as np

from backends.base import ModelSpec, Tensors, TensorSpec, ones
from backends.early_failure import EarlyFailure
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.groups import FURTHER_LENGTH, further_rows
from gateway.clock import Clock
from gateway.config import Ragged
from gateway.engine.runner import BatchRunner, Execution
from gateway.errors import BackendFailed, Cancelled, ConfigError, InvalidArgument
from gateway.protocols.tensors import shape_key
from gateway.types import InferRequest

# First what most models of images were trained on, a multiple of 32, by which many halve it; then within smaller bounds.
_IMAGE_SIDES: Final = (224, 64, 8)
_CHANNELS: Final = 4  # at most
# As long as `FURTHER_LENGTH`, of words as long as most are: it is split into so many tokens as other texts.
_TEXT: Final = b"The price of a good seat by the window was more than he had paid."

log = logging.getLogger(__name__)


async def probe(
    runner: BatchRunner,
    batcher: Batcher,
    spec: ModelSpec,
    ragged: Ragged | None,
    *,
    name: str,
    budget_ns: int,
    every_length: bool,
    clock: Clock,
) -> bool:
    """Run each of the batcher's probe sizes in each bucket: in every session side by side, then once alone to be timed.

    budget_ns: no run begins after so long. every_length: else the shortest bucket only. runner: open and idle. name: of the
    lane, for the log.
    Gives whether all went well. Raises: ConfigError, if outputs are not as declared.
    """
    if spec.raw:  # whose handlers rightly refuse what is made up: there is no type of content that all take
        return True
    until_ns = clock.now_ns() + budget_ns
    batched = spec.max_rows and not spec.decoupled
    sizes = batcher.probe_rows if batched else (1,)
    others = tuple(size for size in batcher.service.sizes if size not in sizes) if spec.row_sizes else ()
    lengths = (ragged.buckets or (1,)) if ragged else (1,)
    further: tuple[int, ...] = ()
    if not every_length:
        lengths = lengths[:1]
    elif batched and batcher.policy.by_length:
        further = further_rows(ragged, batcher.service.sizes, batcher.slo_ns)
    well = trying = False
    side, sides = 1, [*_IMAGE_SIDES]
    shown: tuple[Execution, InferRequest] | None = None  # of the first of these
    while sizes:
        for rows, length in product(sizes, lengths):
            request = _request(spec, ragged, rows, length, side)
            if clock.now_ns() >= until_ns:
                return True
            # Started at once: an idle session may be lost at any await.
            ends = await asyncio.gather(*[_start(runner, batcher, spec, request, clock) for _ in range(runner.free_slots)])
            failed = next((execution for _, execution, _ in ends if execution.error), None)
            if failed is not None and trying:
                return True
            if failed is not None and not well and _raised(failed) and any(map(_is_image, spec.inputs)):
                shown = shown if side != _IMAGE_SIDES[0] else (failed, request)
                if sides:
                    side = sides.pop(0)
                    break
                failed, request = shown or (failed, request)
            if failed is not None:
                _tell(name, failed, spec, request, well=well)
                return False
            if not ends or not runner.free_slots:
                return True
            batch, execution, time_ns = await _start(runner, batcher, spec, request, clock)
            if execution.error is not None:
                return True
            well = True
            curve = batcher.service.curve(batch.group)
            curve.probe(batch.padded_rows, [time_ns - execution.streamed_ns])
        else:
            sizes = curve.telling_rows  # none, once these have run
            if not sizes:
                sizes, others = others, ()
            if not sizes:
                sizes, lengths, further, trying = further, (FURTHER_LENGTH,), (), True
    return True


def _raised(failed: Execution) -> bool:
    """Whether the model did, be it to refuse the request, and its session is still good."""
    return isinstance(failed.error, BackendFailed | InvalidArgument) and not failed.refused and not failed.session_lost


def _is_image(tensor: TensorSpec) -> bool:
    """Whether two dimensions are open, behind the rows, and the rest may be channels."""
    sides = tensor.shape[1:]
    return len(sides) > 2 and sides.count(-1) == 2 and math.prod(size for size in sides if size > 0) <= _CHANNELS


def _tell(name: str, failed: Execution, spec: ModelSpec, request: InferRequest, *, well: bool) -> None:
    """Say what a failed probe means. well: an earlier one, of fewer rows or another length, went well. Raises: ConfigError."""
    assert failed.error is not None
    fault = failed.error.message.removeprefix(f"{name}: ")
    shapes = ", ".join(f"{tensor} {list(array.shape)}" for tensor, array in request.inputs.items())
    tried = f"tried with inputs of ones, {shapes}"
    which = "every request"
    if well:
        which = f"every batch of {request.rows} rows" if request.rows > 1 else "every request of this length"
    way = ""
    if request.rows > 1:
        way = (
            f"; where the model takes one row at a time, set max_rows: 1 (it is {spec.max_rows}), or 0 where these are no rows"
        )
    if failed.refused:
        raise ConfigError(f"{name}: {which} would fail: {fault} ({tried}){way}")
    if not isinstance(failed.error, BackendFailed):  # it has come to no run, or is gone
        of_content = f" ({tried})" if isinstance(failed.error, InvalidArgument) else ""
        log.warning("%s: not probed: %s%s", name, fault, of_content)
        return
    if not well and any(-1 in tensor.shape[1:] and tensor.name in request.inputs for tensor in spec.inputs):
        log.warning("%s: not probed: made-up inputs fail: %s (%s; all is well if others do not)%s", name, fault, tried, way)
        return
    unless = f"({tried}; all is well if only such made-up inputs are refused)"
    log.warning("%s: %s will fail: %s %s%s\n%s", name, which, fault, unless, way, failed.trace.rstrip())


def _request(spec: ModelSpec, ragged: Ragged | None, rows: int, length: int, side: int) -> InferRequest:
    # Nobody can ask rows with no input.
    every = spec.max_rows and all(tensor.optional for tensor in spec.inputs)
    inputs = {
        tensor.name: _input(tensor, rows if spec.max_rows else 0, length if ragged and tensor.name in ragged.pad else 1, side)
        for tensor in spec.inputs
        if every or not tensor.optional
    }
    for name in ragged.text if ragged and length > 1 else ():
        if name in inputs:
            inputs[name] = np.full_like(inputs[name], _TEXT[:length])
    return InferRequest("", "", "", inputs, rows, 0, shape_key=shape_key(spec, ragged, inputs))


def _input(tensor: TensorSpec, rows: int, length: int, side: int) -> np.ndarray:
    """rows: 0 for a model without a batch dimension. length: of an open axis 1. side: of an image."""
    inner = side if _is_image(tensor) else 1
    shape = [size if size >= 0 else inner if axis else 1 for axis, size in enumerate(tensor.shape)]
    if rows:
        shape[0] = rows
        if len(shape) > 1 and tensor.shape[1] < 0:
            shape[1] = length
    return ones(tensor.datatype, shape)


def _start(
    runner: BatchRunner, batcher: Batcher, spec: ModelSpec, request: InferRequest, clock: Clock
) -> "asyncio.Future[tuple[Batch, Execution, int]]":
    """Run a request as a batch of its own; gives also the nanoseconds that its worker was taken.

    Of a decoupled model, until the first part of its answer: what comes after it may have no end.
    """
    ended: asyncio.Future[tuple[Batch, Execution, int]] = asyncio.get_running_loop().create_future()

    def done(batch: Batch, execution: Execution) -> None:
        if isinstance(execution.error, Cancelled) and execution.first_part_ns is not None:
            execution = msgspec.structs.replace(execution, error=None)
        if not ended.done():  # else nobody waits any more
            ended.set_result((batch, execution, clock.now_ns() - batch.closed_ns))

    def part(batch: Batch, outputs: Tensors) -> None:
        if not isinstance(outputs, EarlyFailure):
            runner.cancel(batch)

    runner.start(batcher.probe(request, clock.now_ns()), done, part if spec.decoupled else None)
    return ended
