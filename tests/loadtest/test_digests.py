"""By what a result tells that the same was sent."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.load.digests import digests_of
from loadtest.results import LoadSpec

SPEC = LoadSpec("http://here", pattern="poisson", rate_rps=100, seed=1)
INPUTS: list[dict[str, Any]] = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]


def test_files_count_by_what_is_in_them(tmp_path: Path) -> None:
    def told(name: str, text: str) -> dict[str, str]:
        (tmp_path / name).write_text(text)
        return digests_of(replace(SPEC, payloads=(str(tmp_path / name),), pattern=f"trace:file={tmp_path / name}"), ())

    first = told("a.csv", "1\n")
    assert first.keys() == {"headers", "requests", "traces", "arrivals"}
    assert told("b.csv", "1\n") == first
    changed = told("a.csv", "2 \n")
    assert {kind for kind in first if first[kind] != changed[kind]} == {"requests", "traces"}
    assert told("a.bin", "1\n")["requests"] != first["requests"]  # it is sent as another type


def test_traces_count_by_their_arrivals_however_they_are_written(tmp_path: Path) -> None:
    def told(text: str, options: str = "") -> str:
        (tmp_path / "t.csv").write_text(text, encoding="utf-8")
        return digests_of(replace(SPEC, pattern=f" trace:file={tmp_path / 't.csv'}{options}"), INPUTS)["arrivals"]

    first = told("0\n0.1\n0.25\n")
    assert told("\ufefftimestamp\n1\n1.25\n1.1\n") == first
    assert told("x,at\n,2026-11-30T10:00:00Z\n,2026-11-30T10:00:00.1Z\n,2026-11-30T10:00:00.25Z\n", ",column=at") == first
    assert told("0\n0.1\n0.26\n") != first


def test_made_requests_count_by_the_inputs_that_they_are_made_of() -> None:
    elsewhere = replace(SPEC, target="grpc://there", protocol="grpc", model="m", seed=2)
    assert digests_of(SPEC, INPUTS) == digests_of(elsewhere, [{**INPUTS[0], "shape": ["-1", "4"]}])  # as gRPC's JSON tells it
    for other in ({"name": "y"}, {"datatype": "FP16"}, {"shape": [-1, 5]}):
        assert digests_of(SPEC, INPUTS)["requests"] != digests_of(SPEC, [{**INPUTS[0], **other}])["requests"]


@pytest.mark.parametrize(
    ("header", "counts"), [(("Accept", "text/csv"), True), (("X-Pin", "1234"), False), (("Authorization", "b"), False)]
)
def test_of_a_header_that_may_be_a_secret_the_name_alone_counts(header: tuple[str, str], counts: bool) -> None:
    name, _ = header
    told, other, without = (
        digests_of(replace(SPEC, headers=headers), INPUTS)["headers"] for headers in ((header,), ((name.upper(), "a"),), ())
    )
    assert (told != other) == counts
    assert told != without


def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    spec = replace(SPEC, payloads=(str(tmp_path / "pipe.csv"),), pattern=f"trace:file={tmp_path / 'pipe.csv'}")
    assert digests_of(spec, ()).keys() == {"headers"}
