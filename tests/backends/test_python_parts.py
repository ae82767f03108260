"""A user's class or function that yields: what makes it decoupled, and what is said where that cannot be known."""

import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Annotated, Any, ClassVar, TypedDict, cast

import numpy as np
import numpy.typing as npt
import pytest

import backends
from backends.base import ExecutionFailed, LoadFailed, ModelSpec, OutputsRefused, StreamingSession, Tensors
from backends.signatures import stream_by_name
from backends.type_hints import signature_of

X = Annotated[npt.NDArray[np.float32], (-1, 1)]


def x(*values: float) -> Tensors:
    return {"x": np.array(values, np.float32).reshape(-1, 1)}


class Doubles:
    """Yields what it got, twice as much each time."""

    inputs = (("x", "FP32", (-1, 1)),)
    outputs = (("y", "FP32", (-1, 1)),)

    def predict(self, inputs: Tensors) -> Any:
        for factor in (1, 2, 4):
            yield {"y": inputs["x"] * np.float32(factor)}


class Delegates(Doubles):
    def predict(self, inputs: Tensors) -> Iterator[Tensors]:
        return Doubles.predict(self, inputs)


class DelegatesOn(Doubles):
    def predict(self, inputs: Tensors) -> Generator[Tensors, None, None]:
        return Doubles.predict(self, inputs)


class Maps(Doubles):
    """Its iterator is no generator: it has no close."""

    def predict(self, inputs: Tensors) -> Iterator[Tensors]:
        return map(dict, Doubles.predict(self, inputs))


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*given: Any) -> Any:
        return function(*given)

    return wrapper


class Decorated(Doubles):
    @logged
    def predict(self, inputs: Tensors) -> Any:
        yield {"y": inputs["x"]}


class Secret(Doubles):
    def predict(self, inputs: Tensors) -> Any:
        return Doubles.predict(self, inputs)


class Listed(Doubles):
    def predict(self, inputs: Tensors) -> Iterator[Tensors]:
        return list(Doubles.predict(self, inputs))  # type: ignore[return-value]


class Async(Doubles):
    async def predict(self, inputs: Tensors) -> AsyncIterator[Tensors]:  # type: ignore[override]
        yield inputs


class HiddenAsync(Doubles):
    def predict(self, inputs: Tensors) -> Any:
        return Async().predict(inputs)


class YieldsNone(Doubles):
    def predict(self, inputs: Tensors) -> Any:
        yield {"y": inputs["x"]}
        yield None


def halves(x: X) -> Iterator[X]:
    yield x
    yield x / 2


def letters(text: str, upper: bool = False) -> Iterable[str]:
    yield from text


def pairs(text: str, count: int) -> Any:
    for index in range(count):
        yield {"word": text, "place": [index, len(text)], "letters": list(text)}


def so_far(text: str) -> Iterator[list[str]]:
    found: list[str] = []
    for letter in text:
        found.append(letter)
        yield found


def so_often(x: X) -> Iterator[tuple[npt.NDArray[np.float32], X]]:
    for count in range(1, 4):
        yield np.repeat(x, count, axis=1), x


def deeper(x: X) -> Iterator[list[float]]:
    """As a model may that answers whole."""
    yield x.tolist()


def rows_and_words(x: X) -> Iterator[tuple[X, list[str]]]:
    yield x, ["a"]


def rows_by_name(x: X) -> Iterator[dict[str, X]]:
    yield {"y": x}


class RowsAndWords(TypedDict):
    y: Annotated[np.ndarray, (-1, 1)]
    words: list[str]


def rows_in_a_typed_dict(x: X) -> Iterator[RowsAndWords]:
    yield {"y": x, "words": ["a"]}


class Exemplified(Doubles):
    inputs = ()
    example: ClassVar = {"x": np.ones((2, 1), np.float32)}


hidden = lambda inputs: Doubles().predict(inputs)  # noqa: E731  # as users write it


def load(name: str, declared: ModelSpec | None = None) -> backends.base.Model:
    return backends.load("python", {"model": f"{__file__}:{name}"}, declared or ModelSpec("", (), (), 8))


def stream(name: str, inputs: Tensors, declared: ModelSpec | None = None) -> Generator[Tensors, None, None]:
    session = load(name, declared).open_session(0)
    return cast(StreamingSession, session).stream(inputs, {})


@pytest.mark.parametrize(
    ("name", "factors"),
    [("Doubles", [1, 2, 4]), ("Delegates", [1, 2, 4]), ("DelegatesOn", [1, 2, 4]), ("Maps", [1, 2, 4]), ("Decorated", [1])],
)
def test_a_predict_that_yields_or_says_that_it_returns_an_iterator_is_decoupled(name: str, factors: list[int]) -> None:
    assert load(name).spec.decoupled
    parts = [part["y"].ravel().tolist() for part in stream(name, x(3))]
    assert parts == [[3.0 * factor] for factor in factors]


def test_functions_that_yield_are_read_by_their_type_hints() -> None:
    assert [part["output"].tolist() for part in stream("halves", x(3, 5))] == [[[3], [5]], [[1.5], [2.5]]]
    found = backends.read("python", f"{__file__}:letters")
    assert found.max_rows == 1
    (output,) = found.outputs
    assert (output.name, output.datatype, output.shape) == ("output", "BYTES", (-1,))
    text = {"text": np.array([b"abc"], object)}
    assert [part["output"].tolist() for part in stream("letters", text)] == [["a"], ["b"], ["c"]]
    assert load("letters").spec.max_rows == 1
    with pytest.raises(ExecutionFailed, match="answers requests of one row, got 2"):
        next(stream("letters", {"text": np.array([b"abc", b"d"], object)}))


def test_what_a_part_of_single_values_is_shows_the_first_of_one_row_of_ones() -> None:
    found = backends.read("python", f"{__file__}:pairs")
    shapes = {output.name: (output.datatype, output.shape) for output in found.outputs}
    assert shapes == {"word": ("BYTES", (-1,)), "place": ("INT64", (-1, -1)), "letters": ("BYTES", (-1, -1))}
    assert found.max_rows == 1


def test_sizes_of_a_part_are_open_where_no_type_hint_says_them() -> None:
    (output,) = backends.read("python", f"{__file__}:so_far").outputs
    assert (output.datatype, output.shape) == ("BYTES", (-1, -1))
    assert [output.shape for output in backends.read("python", f"{__file__}:so_often").outputs] == [(-1, -1), (-1, 1)]
    assert backends.read("python", f"{__file__}:deeper").outputs[0].shape == (-1, -1)


@pytest.mark.parametrize("name", ["rows_and_words", "rows_by_name", "rows_in_a_typed_dict", "Exemplified"])
def test_sizes_of_a_part_are_those_that_the_class_or_the_type_of_an_output_says(name: str) -> None:
    assert backends.read("python", f"{__file__}:{name}").outputs[0].shape == (-1, 1)


def test_what_yields_in_secret_is_refused_with_what_to_write() -> None:
    for name in ("Secret", "hidden"):
        found = backends.load("python", {"model": f"{__file__}:{name}"}, load("Doubles").spec)
        assert not found.spec.decoupled
        with pytest.raises(OutputsRefused, match=r"returned an iterator \(generator\): to answer in parts, write `yield`"):
            found.open_session(0).run(x(1), {})


def test_what_says_that_it_yields_and_does_not_is_refused() -> None:
    with pytest.raises(OutputsRefused, match=r"predict returned list: expected an iterator, as it yields or has the return"):
        next(stream("Listed", x(1)))
    parts = stream("YieldsNone", x(1))
    next(parts)
    with pytest.raises(OutputsRefused, match="predict yielded None: yield the outputs of a part"):
        next(parts)


def test_an_async_generator_is_refused_in_words() -> None:
    with pytest.raises(LoadFailed, match="Async: predict is async: write a plain function"):
        load("Async")
    with pytest.raises(OutputsRefused, match="an async generator: write a plain one, `def` with `yield`"):
        load("HiddenAsync").open_session(0).run(x(1), {})


class Stubborn(Doubles):
    """Fails as it is closed."""

    def predict(self, inputs: Tensors) -> Iterator[Tensors]:
        try:
            while True:
                yield {"y": inputs["x"]}
        finally:
            raise ValueError("no end")


def stubborn(x: X) -> Iterator[X]:
    try:
        while True:
            yield x
    finally:
        raise ValueError("no end")


@pytest.mark.parametrize("name", ["Stubborn", "stubborn"])
def test_what_a_model_raises_as_it_is_closed_early_is_told(name: str) -> None:
    parts = stream(name, x(1))
    next(parts)
    with pytest.raises(ExecutionFailed, match="ValueError: no end"):
        parts.close()


def test_a_stream_that_is_closed_early_runs_its_finally() -> None:
    closed = []

    def endless(x: X) -> Iterator[X]:
        try:
            while True:
                yield x
        finally:
            closed.append(True)

    parts = stream_by_name(endless, signature_of(endless, method=False), x(1), None)
    next(parts)
    parts.close()
    assert closed


class Reuses(Doubles):
    """One array for all parts."""

    def predict(self, inputs: Tensors) -> Iterator[Tensors]:
        y = np.zeros((1, 1), np.float32)
        for _ in range(3):
            y += 1
            yield {"y": y}


def reuses(x: Annotated[npt.NDArray[np.float32], (-1, 1)]) -> Iterator[Annotated[npt.NDArray[np.float32], (-1, 1)]]:
    y = np.zeros((1, 1), np.float32)
    for _ in range(3):
        y += 1
        yield y


@pytest.mark.parametrize("name", ["Reuses", "reuses"])
def test_a_part_stays_what_it_was_while_the_model_makes_the_next(name: str) -> None:
    parts = list(stream(name, x(3)))
    assert [float(next(iter(part.values()))[0, 0]) for part in parts] == [1, 2, 3]
