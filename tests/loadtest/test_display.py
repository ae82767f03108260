import errno
import io
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from loadtest.lab.driver import SearchStep
from loadtest.measuring.progress import Progress
from loadtest.reports.display import ERASE, Display
from loadtest.search.events import (
    Agree,
    Agreed,
    Entrant,
    Load,
    Measured,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Question,
    Timing,
)
from loadtest.wording import differences
from tests.loadtest.examples import example_spec

ENTRANT = Entrant("c7i.large synthetic (sessions 2)", "g", 3.6, 2, 8)
QUESTION = Question((ENTRANT,), required=0.99, limit_ms=50, seconds=600)
LOAD = Load(ENTRANT.name, 412.0, 20.0, "peak")
RUN = Measured(ENTRANT.name, "peak", 412.0, "pass", ((1000, 995),), 20.0, p99_ms=48.0)


def told(
    *, terminal: bool = False, paid: bool = False, width: int = 100, name: str = "sessions 2"
) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    return Display(console, QUESTION, {ENTRANT.name: name}, paid=paid), out


def step(experiment: Any, event: Any = None) -> SearchStep:
    return SearchStep(experiment, event, 133.0, 0.13)


@pytest.mark.parametrize(
    ("experiment", "event", "line"),
    [
        (LOAD, RUN, "02:13 peak     sessions 2  412/s  p99 48.0 ms of 50, 99.50 % in the SLO  kept"),
        (LOAD, replace(RUN, verdict="fail"), "02:13 peak     sessions 2  412/s  p99 48.0 ms of 50, 99.50 % in the SLO  missed"),
        (LOAD, replace(RUN, failure="did not start: no [model]"), "02:13 peak     sessions 2  did not start: no [model]"),
        (
            Agree(ENTRANT.name, "c7i.large torch", 5.0),
            Agreed(ENTRANT.name, 0.99987, 300, "cosine", 5.0),
            "02:13 agree    sessions 2  agreement 0.99987 (cosine, 300 inputs)",
        ),
        (
            Agree(ENTRANT.name, "c7i.large torch", 5.0),
            Agreed(ENTRANT.name, failure=f"did not start: {'no memory, ' * 20}end"),
            f"02:13 agree    sessions 2  did not start: {'no memory, ' * 20}end",
        ),
        (Predict(ENTRANT.name), Predicted(ENTRANT.name, 456.0), "02:13 predict  sessions 2  about 456/s"),
        (Predict(ENTRANT.name), Predicted(ENTRANT.name, 0.0), "02:13 predict  sessions 2  keeps the SLO at no rate"),
        (
            Predict(ENTRANT.name),
            Predicted(ENTRANT.name, 0.0, why="one request alone takes 80 ms"),
            "02:13 predict  sessions 2  keeps the SLO at no rate: one request alone takes 80 ms",
        ),
        (
            Predict(ENTRANT.name),
            Predicted(ENTRANT.name, 0.0, why="could not be measured: other work", disturbed=True),
            "02:13 predict  sessions 2  could not be measured: other work",
        ),
        (
            LOAD,
            replace(RUN, verdict="fail", p99_ms=0.0, errors={"http 500": 412}, error_samples={"http 500": "boom"}),
            f"02:13 peak     sessions 2  412/s  412 of {RUN.requests:,} failed: 412 × http 500: boom  missed",
        ),
        (
            Profile(ENTRANT.name, "g", (1, 2), 2, 5.0),
            Profiled("g", (Timing(1, 1, 5.0), Timing(2, 1, 7.5), Timing(2, 2, 9.0)), 0.5, 5.0),
            "02:13 profile  sessions 2  1: 5.00, 2: 7.50 ms by rows",
        ),
    ],
)
def test_every_measurement_is_one_plain_timed_line(experiment: Any, event: Any, line: str) -> None:
    display, out = told()
    display.on_step(step(experiment))
    assert out.getvalue() == ""  # what has only begun is no line
    display.on_step(step(experiment, event))
    assert out.getvalue() == line + "\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_name_is_whole_or_has_its_end_where_its_settings_are(terminal: bool) -> None:
    display, out = told(terminal=terminal, name="c7i.large, synthetic fixed_ms 4, sessions 1, max_rows 8")
    display.on_step(step(Predict(ENTRANT.name), Predicted(ENTRANT.name, 456.0)))
    name = "…ixed_ms 4, sessions 1, max_rows 8" if terminal else "c7i.large, synthetic fixed_ms 4, sessions 1, max_rows 8"
    assert f" predict  {name}  about 456/s" in out.getvalue()


def test_an_invalid_run_is_told_without_figures_that_mean_nothing() -> None:
    display, out = told()
    display.on_step(step(LOAD, replace(RUN, valid=False, p99_ms=0.0, notes=("send lag p99 9 ms is above 0.5 ms",))))
    assert out.getvalue() == "02:13 peak     sessions 2  412/s  not counted: send lag p99 9 ms is above 0.5 ms\n"


def test_a_terminal_sees_rate_p99_verdict_time_and_money_while_it_runs() -> None:
    display, out = told(terminal=True, paid=True, width=140)
    display.on_step(step(LOAD))
    display.on_progress(LOAD, Progress(10.0, 4000, 4000, 0, 410.0, 5.0, 60.0))
    out.truncate(0)
    display.on_progress(LOAD, Progress(11.0, 4400, 4400, 0, 411.0, 5.0, 48.0))
    line = out.getvalue().split(ERASE)[-1]
    assert line == (
        "02:24 peak     sessions 2  411/s, 412/s asked  p99 48.0 ms of 50  kept in 1 of 2 looks  07:36 left  $0.141 spent"
    )


def test_a_server_that_answers_nothing_shows_no_p99_of_nothing() -> None:
    display, out = told(terminal=True)
    display.on_progress(LOAD, Progress(10.0, 4000, 4000, 0, 0.0, 0.0, 0.0))
    assert "0/s, 412/s asked  no answers now  kept in 0 of 0 looks" in out.getvalue()


def test_the_redrawn_line_never_wraps() -> None:
    display, out = told(terminal=True, width=60)
    display.on_progress(LOAD, Progress(10.0, 4000, 4000, 0, 410.0, 5.0, 60.0))
    assert len(out.getvalue().split(ERASE)[-1]) == 59


def test_nothing_is_redrawn_where_there_is_no_terminal() -> None:
    display, out = told()
    display.on_progress(LOAD, Progress(10.0, 4000, 4000, 0, 410.0, 5.0, 60.0))
    display.clear()
    assert out.getvalue() == ""


def test_a_display_has_no_thread() -> None:
    before = threading.active_count()
    display, _ = told(terminal=True)
    display.on_step(step(LOAD))
    display.on_progress(LOAD, Progress(10.0, 4000, 4000, 0, 410.0, 5.0, 60.0))
    assert threading.active_count() == before


def test_candidates_are_called_by_what_differs() -> None:
    spec = example_spec()
    assert differences(spec.candidates)[:2] == ["c7i.large, sessions 1", "c7i.large, sessions 2"]
    assert differences(spec.candidates[:2]) == ["sessions 1", "sessions 2"]
    assert differences(spec.candidates[:1]) == [spec.candidates[0].name]


def test_a_terminal_that_is_gone_is_not_written_to() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    display = Display(Console(file=Gone(), force_terminal=True), QUESTION, {ENTRANT.name: "sessions 2"}, paid=True)
    display.on_step(step(LOAD))
    display.clear()
