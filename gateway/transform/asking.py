"""Rows to requests of a model, and back: what it gave for each, or why it gave nothing.

Rows whose inputs have one shape go together. What is refused is halved until the row is alone that is to blame, so that the
reason is what a server would tell who sends that row.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import GatewayError, InvalidArgument, Unavailable
from gateway.protocols.json_data import any_value
from gateway.protocols.plain_forms import cell_of_table
from gateway.protocols.tensors import cast
from gateway.transform.rows import Bare, Chunk, Row, Unread

Ask = Callable[[Mapping[str, npt.ArrayLike]], Awaitable[dict[str, npt.NDArray[Any]]]]
Answer = dict[str, Any]
"""What a model gave for one row, by output: arrays without the batch dimension, or their scalars."""

_PATIENCE_S: Final = 60.0  # without any answer, while the model cannot be asked
_AGAIN_S: Final = 0.2
_CELLS: Final = "true, 12, 0.5, NaN, Infinity or [1, 2]"


class Asker:
    """Asks a model for the rows of chunks, several at once. On one event loop."""

    def __init__(self, spec: ModelSpec, ask: Ask, *, from_text: bool, request_rows: int, in_flight: int) -> None:
        """from_text: cells are text, of which numbers are to be read. request_rows: of a request, at most; one, of a model that
        has no batch dimension. in_flight: rows that are asked for at once.
        """
        self._spec = spec
        self._ask = ask
        self._from_text = from_text
        self._rows = request_rows if spec.max_rows else 1
        self._turns = asyncio.Semaphore(max(1, in_flight // self._rows))
        self._answered_s = 0.0  # when there was an answer, last

    async def answers(self, chunk: Chunk) -> list[Answer | str]:
        """For each row of a chunk what the model gave, or why it gave nothing. Raises: Unavailable, if it cannot be asked."""
        found: list[Answer | str] = [""] * len(chunk.rows)
        groups: defaultdict[Any, list[tuple[int, Row]]] = defaultdict(list)
        for at, row in enumerate(chunk.rows):
            if isinstance(row, Unread):
                found[at] = row.why
                continue
            try:
                given = self._given(row)
            except InvalidArgument as exc:
                found[at] = str(exc)
            else:
                groups[_shapes(given) or at].append((at, given))
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in groups.values():
                    for start in range(0, len(group), self._rows):
                        await self._turns.acquire()
                        task = tasks.create_task(self._answer(group[start : start + self._rows], found))
                        task.add_done_callback(lambda _: self._turns.release())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return found

    def _given(self, row: Row | Bare) -> Row:
        """Its inputs. Raises: InvalidArgument."""
        inputs = self._spec.input_by_name
        if isinstance(row, Bare):
            if len(inputs) > 1:
                raise InvalidArgument(f"a value without a name: the model has several inputs: {', '.join(inputs)}")
            row = {next(iter(inputs)): row.value}
        return {name: self._value(row[name], tensor) for name, tensor in inputs.items() if name in row}

    def _value(self, value: Any, tensor: TensorSpec) -> Any:
        shape = tensor.shape[1:] if self._spec.max_rows else tensor.shape
        if self._from_text and (tensor.datatype != "BYTES" or shape not in ((), (1,))):
            try:
                value = any_value(value.encode())
            except (ValueError, RecursionError) as exc:
                try:
                    value = cell_of_table(tensor.datatype, value)
                except ValueError:
                    expected = f"expected JSON, as {_CELLS}: {exc}"
                    raise InvalidArgument(f"input '{tensor.name}': got {value[:80]!r}, {expected}") from exc
        if "INT" in tensor.datatype:
            value = _whole(value, tensor, len(tensor.shape) + 1)
        if isinstance(value, np.ndarray):
            value = cast(tensor.name, tensor.datatype, value)
            if -1 not in shape and value.size == math.prod(shape):
                return value.reshape(shape)
        elif shape == (1,) and not isinstance(value, list):
            return [value]
        elif shape == () and isinstance(value, list) and len(value) == 1:
            return value[0]
        return value

    async def _answer(self, group: list[tuple[int, Row]], found: list[Answer | str]) -> None:
        """Ask for rows of one shape, and lay what is answered at their places."""
        while True:
            try:
                outputs = await self._ask(self._request([given for _, given in group]))
                break
            except Unavailable as exc:
                await self._wait(exc)
            except GatewayError as exc:
                if len(group) == 1:
                    found[group[0][0]] = exc.words
                    return
                middle = len(group) // 2
                await self._answer(group[:middle], found)
                await self._answer(group[middle:], found)
                return
        self._answered_s = asyncio.get_running_loop().time()
        for index, (at, _) in enumerate(group):
            found[at] = {name: output[index] if self._spec.max_rows else output for name, output in outputs.items()}

    def _request(self, rows: Sequence[Row]) -> dict[str, Any]:
        if not self._spec.max_rows:
            return rows[0]
        return {name: _together([row[name] for row in rows], self._spec.input_by_name[name]) for name in rows[0]}

    async def _wait(self, refused: Unavailable) -> None:
        """Raises: Unavailable, after a long time without an answer."""
        now_s = asyncio.get_running_loop().time()
        self._answered_s = self._answered_s or now_s
        if now_s - self._answered_s > _PATIENCE_S:
            raise refused
        await asyncio.sleep(_AGAIN_S)


def _whole(value: Any, tensor: TensorSpec, depth: int) -> Any:
    """Integers, where they are held as floats, as by pandas beside a missing one. Raises: InvalidArgument.

    depth: of lists, at most; deeper ones are left to be refused.
    """
    if isinstance(value, list):
        return [_whole(each, tensor, depth - 1) for each in value] if depth and set(map(type, value)) != {int} else value
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        flat = [_whole(each, tensor, 0) for each in value.reshape(-1).tolist()]
        return np.array(flat, NUMPY[tensor.datatype]).reshape(value.shape)
    if not isinstance(value, float):
        return value
    if not value.is_integer():
        raise InvalidArgument(f"input '{tensor.name}': {value} is no whole number, expected {tensor.datatype}")
    bounds = np.iinfo(NUMPY[tensor.datatype])
    if not bounds.min <= value <= bounds.max:
        raise InvalidArgument(f"input '{tensor.name}': got {value}, expected {tensor.datatype} ({bounds.min} to {bounds.max})")
    return int(value)


def _shapes(given: Row) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """By name; None, if one of them has none, as a list of unequal lists."""
    try:
        return tuple((name, np.shape(value)) for name, value in given.items())
    except ValueError:
        return None


def _of_numbers(values: list[Any]) -> bool:
    """Whether nested lists hold nothing else; true and false are none, though arrays take them for 1 and 0 beside numbers."""
    kinds = set(map(type, values))
    return all(map(_of_numbers, values)) if kinds == {list} else kinds <= {int, float}


def _together(values: list[Any], tensor: TensorSpec) -> Any:
    """Rows of one shape. Lists of numbers as an array, which is a tenth of the work; what is none is left to be refused."""
    if isinstance(values[0], np.ndarray):
        return np.stack(values)
    if isinstance(values[0], list) and tensor.datatype != "BYTES" and _of_numbers(values):
        try:
            array = np.array(values)
        except ValueError:  # lists of unequal lengths
            return values
        if array.dtype.kind in "if" and NUMPY[tensor.datatype].kind in "if":
            with suppress(InvalidArgument):  # lists are refused in the words of a server
                return cast(tensor.name, tensor.datatype, array)
    return values
