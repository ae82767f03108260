"""Some thousands of streams; `python -m benchmarks.fuzz_http1` goes through any number."""

from tests.wire.fuzzing import check_conversation, check_reading


def test_a_stream_is_read_alike_however_it_is_cut() -> None:
    for seed in range(3000):
        check_reading(seed)


def test_whatever_comes_is_answered_in_order_and_leaves_nothing() -> None:
    for seed in range(1500):
        check_conversation(seed)
