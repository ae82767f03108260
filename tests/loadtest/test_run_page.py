from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.cli import main
from loadtest.reports.run_page import render
from loadtest.results import LoadSpec, MachineReport, RunResult, SloSpec, Stall, to_json
from tests.loadtest.made_results import run_result

SPEC = LoadSpec(target="127.0.0.1:9", model="<m>", rate_rps=100, slo=SloSpec.parse("p99<50ms"))


@pytest.fixture
def result() -> RunResult:
    made = run_result(SPEC, succeeded=3000, service_ms=20, errors={"http 503": 30}, verdict="pass")
    cells = tuple((edge * 1_000_000, 100) for edge in range(5, 35))
    return replace(made, latency_histogram=cells, error_samples={"http 503": "<overloaded>"})


def test_the_page_shows_verdict_charts_and_errors(result: RunResult) -> None:
    page = render(result)
    assert "The SLO is kept: p99 under 50 ms" in page
    assert page.count("<svg") == 4
    assert "&lt;overloaded&gt;" in page
    assert "<m>" not in page
    assert "http://" not in page


def test_an_invalid_run_says_so_first(result: RunResult) -> None:
    page = render(replace(result, valid=False, reasons=("send lag p99 9 ms",)))
    assert "INVALID" in page
    assert page.index("send lag p99 9 ms") < page.index("At a glance")
    assert "p99 latency" not in page  # figures that mean nothing are no headline
    assert "goodput" not in page
    assert "SLO PASS" not in page
    assert "The SLO is" not in page


def test_a_run_without_answers_still_has_a_page() -> None:
    page = render(run_result(SPEC, errors={"refused": 40}, verdict="fail"))
    assert "The SLO is missed" in page
    assert "refused" in page


def test_report_takes_a_run(result: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(result))
    assert main(["report", str(path), "--format", "html", "--out", str(tmp_path / "run.html")]) == 0
    assert (tmp_path / "run.html").read_text() == render(result)
    assert main(["report", str(path)]) == 0
    assert "SLO PASS" in capsys.readouterr().out
    assert main(["report", str(path), "--format", "junit"]) == 2


def test_a_run_is_reported_as_wide_as_the_terminal_and_in_its_colours(
    result: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(result))
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["report", str(path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["report", str(path)]) == 0
    assert "\x1b[1;32mPASS" in capsys.readouterr().out


def test_what_the_server_counted_is_told_as_of_all_requests_where_some_were_dropped(
    result: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    told = []
    for warmup_requests in (0, 300):
        (tmp_path / "run.json").write_text(to_json(replace(result, warmup_requests=warmup_requests)))
        main(["report", str(tmp_path / "run.json")])
        told.append(capsys.readouterr().out)
        main(["report", str(tmp_path / "run.json"), "--format", "html"])
        assert ("own statistics, warm-up included" in capsys.readouterr().out) == bool(warmup_requests)
    assert result.server is not None
    assert "(means), " in told[0]
    assert f"(means of the {result.server.requests:,} requests that it counted, warm-up included), " in told[1]


def test_stalls_are_told_with_whose_they_were(result: RunResult) -> None:
    stalls = (Stall(3.0, 220.0, 200.0, 0.0, "machine"), Stall(9.0, 150.0, 0.0, 0.0, "server"))
    machine = MachineReport((0,), (1,), 0.012, 0.0, (("backup", 0.4),), 0.0, 30.0, 12, 0.004, "pass", 0.01, False)
    page = render(replace(result, stalls=stalls, machine=machine))
    assert page.count('class="axis-span"') == 2
    assert "Shaded: stalls, listed below." in page
    assert "Other work had a core that the server wanted for 1.2 % of the time." in page
    assert "Most went to backup (0.40 cores)." in page
    assert "12 requests (0.40 %) were late for that alone: without them the SLO is pass." in page
    assert "Whose stalls" not in render(result)
