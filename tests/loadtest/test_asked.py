"""What is asked of a run is used, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.cli import parser
from loadtest.commands.run import _asked
from loadtest.errors import UsageError
from loadtest.load.patterns import left_out
from loadtest.measuring.asked import check_shapes
from loadtest.results import LoadSpec


def asked(*options: str) -> LoadSpec:
    return _asked(parser().parse_args(["run", "http://x", *options]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rate", "5", "--until-decided"], "--until-decided: there is nothing to decide without an SLO"),
        (["--slo", "p99<1s", "--until-decided"], "--until-decided: users:count=10 is judged at its end alone"),
        (["--slo", "p99<1s", "--until-decided", "--pattern", "ramp:from=1,to=9"], "--until-decided: ramp:from=1,to=9"),
        (["--rate", "5", "--pattern", "users:count=3"], "--rate 5: the pattern users:count=3 has its own, or none"),
        (["--rate", "5", "--pattern", "ramp:from=1,to=9"], "--rate 5: the pattern ramp"),
        (["--rate", "5", "--pattern", "stairs:to=9;constant:rate=3"], "--rate 5: the pattern stairs"),
        (["--pattern", "users:count=3,rate=5"], "pattern users: rate=5 changes nothing"),
        (["--pattern", "ramp:to=3,rate=5"], "pattern ramp: rate=5 changes nothing"),
        (["--pattern", "constant:rate=5,duration=9", "--duration", "5"], "--duration 5: the pattern constant"),
        (["--payload", "a.json", "--values", "x=1:2"], "--values x=1:2: requests of --payload"),
        (["--payload", "a.json", "--length", "64"], "--length 64: requests of --payload"),
        (
            ["--payload", "a.csv", "--content-type", "a/b", "--header", "content-type:c/d", "--protocol", "invocations"],
            "--content-type a/b: --header has one of its own",
        ),
        (["--payload", "a.json", "--content-type", "text/csv"], "--content-type text/csv: it is of --payload by --protocol"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(*options)


@pytest.mark.parametrize(
    "option",
    ["--sigv4", "--slo", "--header", "--payload", "--model", "--version", "--pattern", "--rows", "--length", "--values",
     "--content-type"],
)  # fmt: skip
def test_an_option_of_a_variable_that_is_not_set_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option} '': expected |^an SLO needs at least one objective"):
        asked("--rate", "5", option, "")


def test_a_label_of_nothing_is_none() -> None:
    assert asked("--rate", "5", "--label", "").label == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--rate", "5", "--slo", "p99<1s", "--until-decided", "--pattern", "burst"],
        ["--rate", "5", "--pattern", "ramp:from=1"],
        ["--rate", "5", "--pattern", "constant:rate=3,duration=9;poisson", "--duration", "5"],
        ["--pattern", "constant:rate=5,duration=9"],
        ["--payload", "a.csv", "--content-type", "text/csv", "--protocol", "invocations"],
    ],
)
def test_an_option_that_is_used_is_not(options: list[str]) -> None:
    asked(*options)


@pytest.mark.parametrize(
    ("spec", "shapes", "words"),
    [
        ({"rows": "8"}, [[1, 16]], r"--rows 8: the first dimension of every input is fixed \(x0 \[1, 16\]\)"),
        ({"rows": "1-8"}, [[8, 16], [4]], "--rows 1-8"),
        ({"length": "64"}, [[-1, 16]], r"--length 64: every dimension but the first is fixed"),
    ],
)
def test_rows_and_lengths_that_no_input_has_a_place_for_are_refused(
    spec: dict[str, Any], shapes: list[list[int]], words: str
) -> None:
    inputs = [{"name": f"x{number}", "shape": shape} for number, shape in enumerate(shapes)]
    with pytest.raises(UsageError, match=words):
        check_shapes(LoadSpec("x", **spec), inputs)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [({}, [[1, 16]]), ({"rows": "8"}, [[4, 16], ["-1", 2]]), ({"rows": "8"}, [[8]]), ({"length": "64"}, [[1, 16], [1, -1]])],
)
def test_rows_and_lengths_that_some_input_takes_are_not(spec: dict[str, Any], shapes: list[list[Any]]) -> None:
    check_shapes(LoadSpec("x", **spec), [{"name": f"x{number}", "shape": shape} for number, shape in enumerate(shapes)])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp\n" + "\n".join(map(str, np.arange(0, 60, 0.5))))
    return f"trace:file={path}"


def test_a_trace_is_replayed_whole_unless_a_duration_is_given(trace: str, tmp_path: Path) -> None:
    assert asked("--pattern", trace).duration_s == 60
    assert asked("--pattern", trace, "--rate", "7").duration_s == 60
    assert asked("--pattern", trace, "--duration", "9").duration_s == 9
    assert asked("--pattern", f"{trace},duration=9").duration_s == 30  # the phase's own counts
    assert asked("--pattern", f"{trace};poisson:rate=1").duration_s == 30
    spec = tmp_path / "spec.json"
    spec.write_text(f'{{"target": "http://x", "pattern": "{trace}"}}')
    assert _asked(parser().parse_args(["run", "--spec", str(spec)])).duration_s == 60
    spec.write_text(f'{{"target": "http://x", "pattern": "{trace}", "duration_s": 20}}')
    assert _asked(parser().parse_args(["run", "--spec", str(spec)])).duration_s == 20


def test_what_is_left_out_of_a_trace_is_told(trace: str) -> None:
    assert left_out(trace, 60) == ()
    (words,) = left_out(trace, 9)
    assert words.endswith("lasts 59.5 s: 102 of its 120 arrivals, those from 9 s on, were left out")
    assert left_out("poisson", 9) == ()


def test_a_trace_that_does_not_fill_its_phase_is_told(trace: str) -> None:
    (words,) = left_out(f"{trace};poisson:duration=5", 90)
    assert words.endswith("lasts 60 s: nothing was sent in the 30 s behind it, whatever rate was asked")
