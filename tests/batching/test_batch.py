import numpy as np
import pytest

from backends.base import DEADLINE_NS, REQUEST_ROWS, Tensors
from gateway.batching.batch import Batch, Part, bucket_of, ragged_length
from gateway.config import Ragged
from gateway.errors import BackendFailed
from gateway.types import InferRequest


def request(inputs: Tensors) -> InferRequest:
    return InferRequest("m", "1", "", inputs, next(iter(inputs.values())).shape[0], arrival_ns=0)


def batch_of(*parts: Part, padded_rows: int = 0, ragged: Ragged | None = None, batched: bool = True) -> Batch:
    rows = sum(part.rows for part in parts)
    return Batch(
        parts=list(parts),
        rows=rows,
        padded_rows=padded_rows or rows,
        reason="idle",
        closed_ns=0,
        ragged=ragged,
        batched=batched,
    )


def whole(inputs: Tensors) -> Part:
    asked = request(inputs)
    return Part(asked, 0, asked.rows)


def kept(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_one_whole_request_is_not_copied() -> None:
    inputs = {"x": kept(np.arange(6.0).reshape(2, 3))}
    assert batch_of(whole(inputs)).concat() is inputs


@pytest.mark.parametrize("ragged", [None, Ragged(pad={"other": 0})])
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_what_one_request_brought_cannot_be_written_to(ragged: Ragged | None, rows: int, batched: bool) -> None:
    array = np.arange(6.0).reshape(3, 2)
    view = batch_of(Part(request({"x": array}), 0, rows), ragged=ragged, batched=batched).concat()["x"]
    assert np.shares_memory(view, array)
    assert not view.flags.writeable
    assert array.flags.writeable


def test_a_model_that_answers_requests_apart_is_told_the_rows_of_each() -> None:
    first, second = request({"x": np.zeros(3)}), request({"x": np.zeros(2)})
    first.parameters = {"a": 1, REQUEST_ROWS: "what a client sends"}
    batch = batch_of(Part(first, 1, 2), Part(second, 0, 2))
    assert batch.parameters() is first.parameters
    batch.apart = True
    first.deadline_ns = second.deadline_ns = 7
    assert batch.parameters() == {"a": 1, REQUEST_ROWS: "2,2", DEADLINE_NS: 7}


def test_a_part_of_a_request_is_a_view_of_its_rows() -> None:
    array = np.arange(10.0).reshape(5, 2)
    joined = batch_of(Part(request({"x": array}), 1, 3)).concat()["x"]
    assert joined.base is not None
    np.testing.assert_array_equal(joined, array[1:4])


def test_parts_join_in_order_and_outputs_are_cut_back_as_views() -> None:
    batch = batch_of(whole({"x": np.ones((2, 3))}), whole({"x": np.zeros((1, 3))}))
    joined = batch.concat()["x"]
    np.testing.assert_array_equal(joined[:, 0], [1, 1, 0])
    outputs = {"y": np.arange(3.0)[:, None]}
    first, second = batch.split(outputs)
    assert first["y"].tolist() == [[0], [1]]
    assert second["y"].tolist() == [[2]]
    assert second["y"].base is outputs["y"] or second["y"].base is outputs["y"].base


def test_compiled_sizes_are_filled_with_the_last_row_and_the_filling_is_dropped() -> None:
    batch = batch_of(whole({"x": np.array([[1.0], [2.0], [3.0]])}), padded_rows=4)
    assert batch.concat()["x"][:, 0].tolist() == [1, 2, 3, 3]
    (only,) = batch.split({"y": np.arange(4.0)})
    assert only["y"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("buckets", "width"), [((), 3), ((2, 4, 8), 4), ((2,), 3)])
def test_ragged_inputs_are_padded_to_the_bucket_or_the_longest(buckets: tuple[int, ...], width: int) -> None:
    ragged = Ragged(pad={"ids": 9}, buckets=buckets, crop=("tokens",))
    batch = batch_of(
        whole({"ids": np.array([[1, 2, 3]]), "scale": np.array([[0.5]])}),
        whole({"ids": np.array([[4]]), "scale": np.array([[1.5]])}),
        ragged=ragged,
    )
    joined = batch.concat()
    assert joined["ids"].tolist() == [[1, 2, 3] + [9] * (width - 3), [4] + [9] * (width - 1)]
    assert joined["ids"].dtype == np.int64
    assert joined["scale"].tolist() == [[0.5], [1.5]]
    long, short = batch.split({"tokens": np.zeros((2, width, 5)), "pooled": np.zeros((2, 5))})
    assert long["tokens"].shape == (1, 3, 5)
    assert short["tokens"].shape == (1, 1, 5)
    assert short["pooled"].shape == (1, 5)


@pytest.mark.parametrize(("buckets", "width"), [((), 4), ((2, 8), 8)])
def test_what_is_open_and_as_long_as_an_input_was_padded_to_is_cut_to_each_own_length(
    buckets: tuple[int, ...], width: int
) -> None:
    ragged = Ragged(pad={"ids": 0, "mask": 0}, buckets=buckets)
    long, short = (whole({"ids": np.ones((1, size)), "mask": np.ones((1, size))}) for size in (4, 1))
    outputs = {"tokens": np.zeros((2, width, 5)), "boxes": np.zeros((2, 3)), "pooled": np.zeros((2, width))}
    pieces = batch_of(long, short, ragged=ragged).split(outputs, ("tokens", "boxes", "missing"))
    assert [piece["tokens"].shape for piece in pieces] == [(1, 4, 5), (1, 1, 5)]
    assert [piece["boxes"].shape for piece in pieces] == [(1, 3), (1, 3)]  # open, but of another length
    assert [piece["pooled"].shape for piece in pieces] == [(1, width), (1, width)]  # as long by chance, but not open
    (alone,) = batch_of(short, ragged=ragged).split({"tokens": np.zeros((1, bucket_of(1, buckets), 5))}, ("tokens",))
    assert alone["tokens"].shape == (1, 1, 5)
    for whole_ones in batch_of(long, short, ragged=ragged.model_copy(update={"crop": ()})).split(outputs, ("tokens",)):
        assert whole_ones["tokens"].shape == (1, width, 5)


def test_an_output_is_cut_by_the_input_whose_length_it_has() -> None:
    ragged = Ragged(pad={"source": 0, "target": 0})
    parts = [whole({"source": np.ones((1, source)), "target": np.ones((1, target))}) for source, target in ((9, 2), (5, 4))]
    pieces = batch_of(*parts, ragged=ragged).split({"a": np.zeros((2, 9)), "b": np.zeros((2, 4))}, ("a", "b"))
    assert [(piece["a"].shape[1], piece["b"].shape[1]) for piece in pieces] == [(9, 2), (5, 4)]


def test_a_lone_ragged_request_is_padded_to_its_bucket() -> None:
    ragged = Ragged(pad={"ids": 0}, buckets=(4,))
    assert batch_of(whole({"ids": np.array([[7]])}), ragged=ragged).concat()["ids"].tolist() == [[7, 0, 0, 0]]


def test_bytes_are_joined_and_padded() -> None:
    ragged = Ragged(pad={"other": 0})
    text = np.array([[b"a"]], dtype=object)
    batch = batch_of(whole({"t": text}), whole({"t": text}), padded_rows=4, ragged=ragged)
    assert batch.concat()["t"].tolist() == [[b"a"]] * 4


def test_a_model_without_batch_dimension_gets_its_inputs_untouched() -> None:
    inputs = {"x": kept(np.arange(3.0))}
    batch = batch_of(Part(request(inputs), 0, 1), batched=False)
    assert batch.concat() is inputs
    outputs = {"y": np.float32(1.0).reshape(())}
    assert batch.split(outputs) == [outputs]


@pytest.mark.parametrize("output", [np.zeros((1, 2)), np.float32(1).reshape(())])
def test_an_output_with_too_few_rows_is_the_models_fault(output: np.ndarray) -> None:
    batch = batch_of(whole({"x": np.zeros((2, 1))}))
    with pytest.raises(BackendFailed, match=r"output 'y' has shape .*, expected 2 rows"):
        batch.split({"y": output})


def test_a_batch_of_which_nothing_more_is_said_runs_alone_and_leaves_nothing() -> None:
    batch = Batch(parts=[whole({"x": np.ones((2, 1))})], rows=2, padded_rows=2, reason="probe", closed_ns=7)
    assert (batch.group, batch.left_rows, batch.expected_ns, batch.ragged, batch.batched, batch.busy) == (
        None,
        0,
        0,
        None,
        True,
        1,
    )


def test_a_batch_tells_its_times_in_milliseconds() -> None:
    batch = batch_of(whole({"x": np.ones((2, 1))}))
    batch.closed_ns, batch.expected_ns = 9_000_000_500_000, 5_000_000_250_000
    batch.parts[0].request.arrival_ns = 1_000_000_000_000
    assert "waited_ms=8000000.500 expected_ms=5000000.250" in str(batch)


def test_parts_of_requests_join_with_whole_ones_and_the_filling_repeats_the_last_row() -> None:
    large = request({"x": np.arange(10.0)[:, None]})
    batch = batch_of(Part(large, 7, 3), whole({"x": np.array([[20.0], [21.0]])}), Part(large, 0, 1), padded_rows=8)
    assert batch.concat()["x"][:, 0].tolist() == [7, 8, 9, 20, 21, 0, 0, 0]
    assert [piece["y"].tolist() for piece in batch.split({"y": np.arange(8.0)})] == [[0, 1, 2], [3, 4], [5]]


def test_what_needs_no_cutting_is_given_as_it_is() -> None:
    outputs = {"y": np.arange(2.0)}
    (only,) = batch_of(whole({"x": np.ones((2, 1))})).split(outputs)
    assert only is outputs
    ragged = Ragged(pad={"ids": 0}, buckets=(4,))
    full = {"ids": np.array([[1, 2, 3, 4]]), "scale": np.array([[0.5]])}
    joined = batch_of(whole(full), ragged=ragged).concat()
    assert all(np.shares_memory(joined[name], full[name]) for name in full)
    (cut,) = batch_of(whole(full), ragged=Ragged(pad={"ids": 0}, crop=("y",))).split({"y": np.ones((1, 9))})
    assert cut["y"].shape == (1, 4)


def test_texts_of_several_lengths_are_joined_as_they_are() -> None:
    one, other = (np.array([[text]], object) for text in (b"a", b"another"))
    joined = batch_of(whole({"t": one}), whole({"t": other}), padded_rows=4, ragged=Ragged(text=("t",))).concat()["t"]
    assert joined.tolist() == [[b"a"], [b"another"], [b"another"], [b"another"]]


def test_ragged_inputs_keep_their_further_axes_and_their_rows() -> None:
    ragged = Ragged(pad={"x": 0})
    long, short = np.ones((3, 3, 2)), np.full((3, 1, 2), 2.0)
    joined = batch_of(whole({"x": long}), whole({"x": short}), ragged=ragged).concat()["x"]
    assert joined.shape == (6, 3, 2)
    np.testing.assert_array_equal(joined[:3], long)
    np.testing.assert_array_equal(joined[3:, :1], short)
    assert not joined[3:, 1:].any()
    equal = batch_of(whole({"x": long}), whole({"x": long + 1}), ragged=ragged).concat()["x"]
    np.testing.assert_array_equal(equal, np.concatenate([long, long + 1]))
    filled = batch_of(whole({"x": short}), whole({"x": long}), padded_rows=8, ragged=ragged).concat()["x"]
    np.testing.assert_array_equal(filled[3:], np.ones((5, 3, 2)))


def test_the_length_of_a_request_is_its_longest_ragged_input_and_its_bucket_the_next() -> None:
    asked = request({"a": np.zeros((1, 5)), "b": np.zeros((1, 7)), "c": np.zeros((1, 9))})
    assert ragged_length(asked, Ragged(pad={"a": 0, "b": 0, "missing": 0})) == 7
    assert ragged_length(asked, Ragged(pad={"missing": 0})) == 0
    assert ragged_length(asked, None) == 0
    texts = np.array([[b"three", b""], [b"nine more", b"four"]], object)
    assert ragged_length(request({"t": texts}), Ragged(text=("t", "missing"))) == 9
    assert ragged_length(request({"t": texts, "a": np.zeros((2, 12))}), Ragged(pad={"a": 0}, text=("t",))) == 12
    assert ragged_length(request({"t": np.empty((0, 1), object)}), Ragged(text=("t",))) == 0
    assert [bucket_of(length, (4, 8)) for length in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 9]
