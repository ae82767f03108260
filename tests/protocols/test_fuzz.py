"""Some thousands of requests with tensors; `python -m benchmarks.fuzz_tensors` goes through any number."""

from tests.protocols.fuzzing import check


def test_any_bytes_are_a_request_that_the_model_takes_or_an_error_of_ours() -> None:
    for seed in range(6000):
        check(seed)
