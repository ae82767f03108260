"""The parts of benchmarks/gpu.py that decide and tell: configurations, the search for the highest rate, the table; and what its
servers have cost.
"""

from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.gpu import CLOSE, MOST_TRIES, NAMES, SHARE, Figure, bracket, next_rate, table
from benchmarks.gpu_servers import BUCKETS, GATEWAY, TRITON, configuration
from benchmarks.processor_time import cpu_between
from gateway.config import load_config


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["ort", "torch"])
def test_what_the_gateway_is_given_is_a_configuration(name: str, device: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(configuration(name, device, 2, 20.0)))
    (model,) = load_config(file).models
    (backend,) = model.backends
    assert model.slo is not None
    assert (backend.sessions, backend.options()["device"], model.slo.p99_ms) == (2, device, 20.0)


def test_lengths_are_few_where_each_is_recorded_or_compiled() -> None:
    given = {name: configuration(name, "cuda", 2)["models"][0]["ragged"].get("buckets") for name in GATEWAY}
    few = {name for name in GATEWAY if name.endswith(("graphs", "compile"))}
    assert {name for name, buckets in given.items() if buckets == list(BUCKETS)} == few
    assert set(NAMES) == {*GATEWAY, *TRITON}


@pytest.mark.parametrize("limit", [40.0, 130.0, 500.0, 900.0, 1090.0])
def test_the_search_ends_near_the_highest_rate_that_is_kept(limit: float) -> None:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, 500.0, 1100.0)) is not None:
        tried.append((rate, rate <= limit))
    low, high = bracket(tried, 1100.0)
    assert low <= limit < high
    assert len(tried) <= MOST_TRIES
    assert high - low <= 600 / 2 ** (MOST_TRIES - 1) or high / low <= CLOSE


def test_the_table_has_medians_and_the_highest_rate_below_one_that_was_missed() -> None:
    closed = [Figure("ort", "closed", number, 8, rps, 1.0, 4.0, 0, 9.0, 2.0) for number, rps in enumerate((90, 100, 300), 1)]
    kept = {50.0: SHARE, 60.0: 0.5, 70.0: 1.0}
    opened = [Figure("ort", "open", 1, rate, rate, 1.0, 4.0, 0, 9.0, 2.0, share) for rate, share in kept.items()]
    assert table([*closed, *opened]).splitlines()[2:] == ["| ort | 100, 4.0 | 50 |"]


def test_the_time_of_a_process_that_ended_meanwhile_is_not_taken_off() -> None:
    here, parent = psutil.Process(), psutil.Process().parent()
    assert parent is not None
    assert cpu_between({here: 1.0}, {here: 3.5, parent: 0.5}) == 3.0
    with pytest.raises(RuntimeError, match="ended while its processor time was measured"):
        cpu_between({here: 1.0, parent: 7.0}, {here: 3.5})
