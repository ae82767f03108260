"""Which batches are recorded; the recording itself is under the contract where there is a GPU."""

from backends.cuda_graphs import MOST_GRAPHS, recorded_rows


def test_few_sizes_hold_every_batch_and_pad_it_by_less_than_as_much_again() -> None:
    for max_rows in range(1, 513):
        sizes = recorded_rows(max_rows)
        assert sizes[-1] == max_rows
        assert len(sizes) * 8 <= MOST_GRAPHS  # with eight lengths
        for rows in range(1, max_rows + 1):
            padded = next(size for size in sizes if size >= rows)
            assert padded < (1.5 * rows if rows > 16 else 2 * rows) or rows == 1


def test_a_model_without_batches_pads_none() -> None:
    assert recorded_rows(0) == ()
