import numpy as np
import pytest

from backends.base import Tensors
from gateway.batching.batch import Batch, Part
from gateway.config import Ragged
from gateway.errors import BackendFailed
from gateway.types import InferRequest


def request(inputs: Tensors) -> InferRequest:
    return InferRequest("m", "1", "", inputs, next(iter(inputs.values())).shape[0], arrival_ns=0)


def batch_of(*parts: Part, padded_rows: int = 0, ragged: Ragged | None = None, batched: bool = True) -> Batch:
    rows = sum(part.rows for part in parts)
    return Batch(
        list(parts),
        rows=rows,
        padded_rows=padded_rows or rows,
        reason="idle",
        closed_ns=0,
        oldest_ns=0,
        ragged=ragged,
        batched=batched,
    )


def whole(inputs: Tensors) -> Part:
    asked = request(inputs)
    return Part(asked, 0, asked.rows)


def test_one_whole_request_is_not_copied() -> None:
    inputs = {"x": np.arange(6.0).reshape(2, 3)}
    assert batch_of(whole(inputs)).concat() is inputs


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


def test_a_lone_ragged_request_is_padded_to_its_bucket() -> None:
    ragged = Ragged(pad={"ids": 0}, buckets=(4,))
    assert batch_of(whole({"ids": np.array([[7]])}), ragged=ragged).concat()["ids"].tolist() == [[7, 0, 0, 0]]


def test_bytes_are_joined_and_padded() -> None:
    ragged = Ragged(pad={"other": 0})
    text = np.array([[b"a"]], dtype=object)
    batch = batch_of(whole({"t": text}), whole({"t": text}), padded_rows=4, ragged=ragged)
    assert batch.concat()["t"].tolist() == [[b"a"]] * 4


def test_a_model_without_batch_dimension_gets_its_inputs_untouched() -> None:
    inputs = {"x": np.arange(3.0)}
    batch = batch_of(Part(request(inputs), 0, 1), batched=False)
    assert batch.concat() is inputs
    outputs = {"y": np.float32(1.0).reshape(())}
    assert batch.split(outputs) == [outputs]


@pytest.mark.parametrize("output", [np.zeros((1, 2)), np.float32(1).reshape(())])
def test_an_output_with_too_few_rows_is_the_models_fault(output: np.ndarray) -> None:
    batch = batch_of(whole({"x": np.zeros((2, 1))}))
    with pytest.raises(BackendFailed, match=r"output 'y' has shape .*, expected 2 rows"):
        batch.split({"y": output})
