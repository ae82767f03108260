import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gateway.config import load_config
from loadtest.cli import main, parser
from loadtest.commands.recommend import asked_with
from loadtest.errors import ExitCode
from loadtest.lab.journal import Journal
from loadtest.lab.recommender import Lab
from loadtest.reports.recommendation import to_json
from loadtest.search.events import Paid, Profiled, Question
from tests.loadtest.examples import DOCUMENT, changed, example_recommendation
from tests.loadtest.test_spec_agreement import requests_file


def write(folder: Path, **keys: Any) -> str:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(changed(**keys)))
    return str(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"slo": {"p99_ms": None}}, "SLO: p99_ms: expected a number, got None"),
        ({"launcher": {"kind": "local"}}, "c7i.large is not measured by running on this machine"),
        ({"price": "sagemakr"}, "price: 'sagemakr'"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "recommend"])
def test_a_bad_spec_ends_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, keys: dict[str, Any], message: str
) -> None:
    before = set(psutil.Process().children())  # other tests' libraries may keep helpers of their own
    assert main([command, write(tmp_path, **keys)]) == 2
    assert message in capsys.readouterr().err
    assert set(psutil.Process().children()) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_file_that_cannot_be_written_ends_a_search_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "absent" / "runs.om"
    assert main(["recommend", write(tmp_path), "--out", str(tmp_path / "out"), "--openmetrics", str(bad)]) == 2
    assert f"--openmetrics {bad}: cannot be written: No such file or directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_search_begins_anew_or_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["recommend", "spec.yaml", "--fresh", "--resume"])
    assert "argument --resume: not allowed with argument --fresh" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_is_not_gone_on_with_for_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = tmp_path / "own.py", tmp_path / "out"
    code.write_text("raise RuntimeError('no such weights')\n")
    backend = {"kind": "python", "model": f"{code}:Own"}
    candidates = [{"backend": backend, "usd_per_hour": 0.1, "price_source": "mine"}]
    spec = write(tmp_path, candidates=candidates, launcher={"kind": "local"}, budget={"minutes": 1})

    assert main(["recommend", spec, "--out", str(out)]) == ExitCode.MISSED
    assert main(["recommend", spec, "--out", str(out), "--resume"]) == ExitCode.MISSED
    code.write_text("raise RuntimeError('no such file')\n")
    assert main(["recommend", spec, "--out", str(out), "--resume"]) == ExitCode.USAGE
    assert "belongs to another question" in capsys.readouterr().err


def test_a_plan_names_candidates_prices_and_time_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(tmp_path), "--budget-minutes", "12"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "c8g.large synthetic (sessions 2)" in told
    assert "4 candidates share 2 profiles of 30 s, up to 4 where some do not start; up to 4 see real load at first, " in told
    assert "2 up to their peak, and others where" in told
    assert "12 minutes" in told
    assert "Costs nothing" in told
    on = {"instances": ["c7i.large"], "backend": {"kind": "synthetic", "fixed_ms": 4}}
    apart = [{**on, "settings": {"sessions": [most], "max_rows": [8 // most]}} for most in (1, 2)]
    assert main(["plan", write(tmp_path, candidates=apart)]) == 0
    assert "2 candidates share 2 profiles of" in " ".join(capsys.readouterr().out.split())  # none has the size of both
    assert main(["plan", write(tmp_path, candidates=[on])]) == 0
    assert "1 profile of 30 s; up to 1 see real load at first, 1 up to their peak. A start" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_a_plan_tells_of_the_comparison_of_answers_and_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = {"kind": "synthetic", "fixed_ms": 4, "row_ms": 1}
    exact, fast = (
        {"instances": ["c7i.large"], "backend": {**backend, "name": output, "output": output}} for output in ("echo", "sum")
    )

    def planned(minutes: str, **keys: Any) -> str:
        assert main(["plan", write(tmp_path, **keys), "--budget-minutes", minutes]) == 0
        return " ".join(capsys.readouterr().out.split())

    files = {"files": [requests_file(tmp_path, 300)]}
    assert (
        "First the answers of 2 kinds of candidates are compared with those of c7i.large echo: for seconds on a quiet machine, "
        "at most 24 s each, and 50% of the time in all."
    ) in planned("2", candidates=[exact, fast], payload=files)
    wide = {**exact, "settings": {"sessions": [1, 2]}}
    told = "at most 60 s each, and 50% of the time in all; more where one does not start."
    assert told in planned("45", candidates=[wide, fast], payload=files)
    answered = {"files": [requests_file(tmp_path, 301, expected=True)]}
    assert "1 kind of candidates are compared with the expected answers:" in planned("2", candidates=[exact], payload=answered)
    assert "compared" not in planned("2", candidates=[exact], payload=files)


def test_what_asked_a_question_asks_it_again() -> None:
    options = ["--target-rps", "500", "--instances", "my types.yaml", "--ca", "ca.pem", "--cert", "c.pem"]
    options += ["--key", "k.pem", "--api-key-file", "own key", "--out", "some where", "--openmetrics", "runs.om"]
    begins = [["recommend", "spec.yaml", *more] for more in ([], options)]
    for argv in begins:
        asked = parser().parse_args([*argv, "--budget-minutes", "5", "--max-usd", "2.5", "--fresh"])
        again = parser().parse_args(["recommend", "spec.yaml", *asked_with(asked)])
        assert vars(again) == vars(parser().parse_args(argv))


def test_a_report_is_told_again_in_another_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(example_recommendation()))
    assert main(["report", str(path)]) == 0
    assert "PROVEN: A is the cheapest" in capsys.readouterr().out
    assert main(["report", str(path), "--format", "md", "--out", str(tmp_path / "report.md")]) == 0
    assert (tmp_path / "report.md").read_text().startswith("### What is the cheapest way to serve adder")
    assert main(["report", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    ("options", "measured", "told"),
    [
        ([], False, "interrupted before anything was measured"),
        ([], True, "interrupted: what was measured is kept in {out}; the same command goes on from there"),
        (
            ["--fresh"],
            True,
            "interrupted: what was measured is kept in {out}; the same command without --fresh goes on from there",
        ),
    ],
)
def test_an_interruption_tells_what_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    measured: bool,
    told: str,
) -> None:
    async def search(question: Question, lab: Lab, journal: Journal, **how: Any) -> None:
        if measured:
            journal.append(Profiled(question.entrants[0].group))
        journal.append(Paid(0.5))
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr("loadtest.lab.driver.run_search", search)
    out = tmp_path / "out"
    assert main(["recommend", write(tmp_path), "--out", str(out), *options]) == 128 + signal.SIGINT
    assert told.format(out=out) in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_search_ends_cleanly_and_can_be_resumed(tmp_path: Path) -> None:
    candidates = [{"instances": ["c7i.large"], "backend": {"kind": "synthetic"}}]
    spec = write(tmp_path, candidates=candidates, launcher={"kind": "local", "stands_for": {"c7i.large": [0]}})
    command = [sys.executable, "-m", "loadtest.cli", "recommend", spec, "--out", str(tmp_path / "results")]
    command += ["--budget-minutes", "0.4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " predict " in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert "; the same command goes on from there" in " ".join(rest.split())
    assert "Traceback" not in rest
    journal = (tmp_path / "results" / "journal.jsonl").read_text()
    assert '"profiled"' in journal
    assert '"predicted"' in journal


@pytest.mark.slow
def test_real_candidates_are_measured_every_file_is_written_and_the_report_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What is found depends on the machine, which may be too busy for a valid run: that is for benchmarks/recommend.py.
    folder = tmp_path / "results"
    spec = write(
        tmp_path,
        model={**DOCUMENT["model"], "max_rows": 1},  # a profile of one size, which takes a busy machine seconds, too
        slo={"p99_ms": 200},
        candidates=[{"instances": ["c7i.large"], "backend": {"kind": "synthetic", "fixed_ms": 2, "row_ms": 1}}],
        launcher={"kind": "local", "stands_for": {"c7i.large": [0]}},
    )
    before = set(psutil.Process().children())
    said_as = ["--json", "--log-format", "json", "--openmetrics", str(tmp_path / "runs.om")]
    code = main(["recommend", spec, "--out", str(folder), "--budget-minutes", "0.12", *said_as])
    assert code in (0, 1, 3)
    assert set(psutil.Process().children()) <= before
    found = json.loads((folder / "report.json").read_text())
    told = capsys.readouterr()
    assert json.loads(told.out) == found
    assert any(" profile " in json.loads(line)["message"] for line in told.err.splitlines())
    assert found["candidates"][0]["timings"]
    assert found["seconds_spent"] < 0.12 * 60 + 20
    assert (folder / "report.html").stat().st_size > 5000
    kept, seen = sorted((folder / "runs").glob("*.json")), (tmp_path / "runs.om").read_text()
    assert all(f'run="results {path.stem}"' in seen for path in kept)
    assert ('candidate="c7i.large synthetic"' in seen) == bool(kept)
    if found["winner"]:
        load_config(folder / "gateway.yaml")
