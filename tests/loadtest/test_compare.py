import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from loadtest.cli import main
from loadtest.errors import ExitCode, UsageError
from loadtest.results import Block, GeneratorReport, Interval, LoadSpec, Percentiles, RunResult, SloSpec, to_json
from loadtest.verdict.comparison import compare, junit, markdown
from loadtest.verdict.decision import CONFIDENCE
from tests.file_limit import no_file_longer_than

SPEC = LoadSpec("http://base", rate_rps=100, slo=SloSpec.parse("p99<50ms"))


def made(levels_ms: np.ndarray, *, spec: LoadSpec = SPEC, met: float = 1.0, valid: bool = True) -> RunResult:
    """A result whose blocks have these medians; p99 is three times as high."""
    blocks = tuple(
        Block(index, index * 1.0, 1.0, 200, round(200 * met), 0, level, 3 * level, 1.2 * level, warmup=index < 2)
        for index, level in enumerate(levels_ms.tolist())
    )
    middle = float(np.median(levels_ms))
    latency = Percentiles(len(blocks) * 200, 1.2 * middle, middle, middle, middle, 3 * middle, 3 * middle, 4 * middle)
    return RunResult(
        spec=spec, started_at="", ended_at="", window_s=20, warmup_s=2, warmup_requests=400, steady=True, asked_rps=100,
        sent_rps=100, requests=4000, succeeded=4000, excluded=0, succeeded_rps=100, goodput_rps=100 * met, latency=latency,
        service=latency, latency_histogram=(), errors={}, error_samples={},
        attainment=Interval(met, met, met, CONFIDENCE), objectives=(), verdict="pass", requests_needed=0, blocks=blocks,
        generator=GeneratorReport(0, 0, 0.5, 0, 0, 1, 0.1, 1), server=None, valid=valid, reasons=() if valid else ("too slow",),
        warnings=(), partial=False,
    )  # fmt: skip


def levels(seed: int = 0, blocks: int = 22) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(2, 0.5, blocks)


def test_a_result_is_the_same_as_itself() -> None:
    comparison = compare(made(levels()), made(levels()))
    assert (comparison.verdict, comparison.paired, comparison.blocks) == ("same", True, 20)


def test_no_name_in_a_result_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(made(levels(), spec=replace(SPEC, label="\x1b[2Jlabel")), warnings=("\x9bso",))
    (tmp_path / "run.json").write_text(to_json(result))
    assert main(["report", str(tmp_path / "run.json")]) == ExitCode.MET
    said = capsys.readouterr().out
    assert all(map(str.isprintable, said.split("\n")))
    assert said.startswith("·[2Jlabel · http://base")
    assert "note: ·so" in said


def test_pairing_finds_a_change_that_is_smaller_than_the_traffics_own_variation() -> None:
    noise = np.random.default_rng(1).normal(1, 0.01, 22)
    slower = made(levels() * 1.10 * noise)
    assert compare(made(levels()), slower).verdict == "regression"
    assert compare(slower, made(levels())).verdict == "improvement"
    unpaired = compare(made(levels()), replace(slower, spec=replace(SPEC, seed=1)))
    assert (unpaired.paired, unpaired.verdict) == (False, "undecided")
    assert any("not paired" in note for note in unpaired.notes)


def test_a_change_within_the_tolerance_is_the_same() -> None:
    assert compare(made(levels()), made(levels() * 1.03)).verdict == "same"
    assert compare(made(levels()), made(levels() * 1.03), tolerance=0.01).verdict == "regression"


def test_the_interval_holds_the_true_change() -> None:
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        change = compare(made(levels(seed)), made(levels(seed) * 1.1 * rng.lognormal(0, 0.1, 22))).metrics[0]
        assert change.lower is not None
        assert change.upper is not None
        covered += change.lower <= 0.1 <= change.upper
    assert covered >= 190  # 95 % for four metrics together


def test_fewer_requests_in_time_are_a_regression() -> None:
    comparison = compare(made(levels()), made(levels(), met=0.97))
    assert comparison.verdict == "regression"
    assert [metric.name for metric in comparison.metrics if metric.verdict == "regression"] == ["attainment"]


def test_too_few_blocks_leave_it_undecided() -> None:
    assert compare(made(levels(blocks=5)), made(levels(blocks=5) * 2)).verdict == "undecided"


def test_different_loads_are_not_compared() -> None:
    with pytest.raises(UsageError, match=r"rate_rps 100 and 200"):
        compare(made(levels()), made(levels(), spec=replace(SPEC, rate_rps=200)))


@pytest.mark.parametrize(
    ("factor", "valid", "code"),
    [(1.0, True, ExitCode.MET), (1.5, True, ExitCode.REGRESSION), (0.5, True, ExitCode.MET), (1.0, False, ExitCode.INVALID)],
)
def test_the_exit_code_tells_ci(tmp_path: Path, factor: float, valid: bool, code: ExitCode) -> None:
    (tmp_path / "base.json").write_text(to_json(made(levels())))
    (tmp_path / "new.json").write_text(to_json(made(levels() * factor, valid=valid)))
    outputs = [
        "--junit",
        str(tmp_path / "junit.xml"),
        "--markdown",
        str(tmp_path / "out.md"),
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main(["compare", str(tmp_path / "base.json"), str(tmp_path / "new.json"), *outputs]) == code


def test_a_missing_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == ExitCode.USAGE
    assert "a.json" in capsys.readouterr().err


def test_markdown_and_junit_name_what_regressed() -> None:
    base, new = made(levels()), made(levels() * 1.5)
    comparison = compare(base, new)
    assert "| latency p50 (ms) |" in markdown(comparison, base, new)
    assert "regression" in markdown(comparison, base, new).splitlines()[0]
    suite = ElementTree.fromstring(junit(comparison))
    assert suite.get("failures") == "3"
    assert [case.get("name") for case in suite if case.find("failure") is not None] == [
        "latency p50 (ms)",
        "latency p99 (ms)",
        "latency mean (ms)",
    ]


def saved(folder: Path, *results: RunResult) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(to_json(result))
    return [str(path) for path in paths]


def test_the_terminal_shows_every_metric_the_notes_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = saved(tmp_path, made(levels()), made(levels() * 1.5, spec=replace(SPEC, connections=7)))
    assert main(["compare", *files]) == ExitCode.REGRESSION
    told = capsys.readouterr().out
    assert "latency p50" in told
    assert "attainment" in told
    assert "note: connections differs" in told
    assert told.splitlines()[-1] == "regression"


def test_files_are_written_where_asked_and_only_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = saved(tmp_path, made(levels()), made(levels() * 1.5))
    asked = {"--junit": tmp_path / "out.xml", "--markdown": tmp_path / "out.md", "--json": tmp_path / "out.json"}
    for option, path in asked.items():
        main(["compare", *files, option, str(path)])
        assert [other.exists() for other in asked.values()] == [other == path for other in asked.values()]
        assert "latency p50 (ms)" in path.read_text()
        assert "latency p50" in capsys.readouterr().out
        path.unlink()
    main(["compare", *files, "--json", str(asked["--json"])])
    assert json.loads(asked["--json"].read_text())["verdict"] == "regression"
    capsys.readouterr()
    main(["compare", *files, "--markdown", "-"])
    told = capsys.readouterr().out
    assert told.startswith("### loadtest: regression")
    assert told.rstrip().endswith("|")  # and no table beside it


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = saved(tmp_path, made(levels()), made(levels() * 1.5))
    asked = ["--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml"), "--markdown", str(tmp_path / "out.md")]
    with no_file_longer_than(1_000):  # the JSON is longer, and JUnit and Markdown are not
        assert main(["compare", *files, *asked]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "regression"
    assert "out.json: cannot be written" in err
    assert not (tmp_path / "out.json").exists()
    assert (tmp_path / "out.md").read_text().startswith("### loadtest: regression")
    for option in ("--json", "--junit", "--markdown"):
        assert main(["compare", *files, option, str(tmp_path / "absent" / "x")]) == ExitCode.USAGE
        told = capsys.readouterr()
        assert told.err.startswith(f"loadtest: {option} {tmp_path}/absent/x: cannot be written")
        assert told.out == ""


@pytest.mark.parametrize("option", ["--tolerance", "--share-tolerance"])
@pytest.mark.parametrize("value", ["-0.1", "nan", "inf"])
def test_a_negative_tolerance_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    files = saved(tmp_path, made(levels()), made(levels()))
    assert main(["compare", *files, f"{option}={value}"]) == ExitCode.USAGE
    assert f"{option} {value}: expected a number of at least 0" in capsys.readouterr().err
    assert main(["compare", *files, f"{option}=0"]) == ExitCode.MET


def test_an_invalid_run_says_which_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for results in ((made(levels()), made(levels(), valid=False)), (made(levels(), valid=False), made(levels()))):
        files = saved(tmp_path, *results)
        assert main(["compare", *files]) == ExitCode.INVALID
        told = " ".join(capsys.readouterr().err.split())
        assert "INVALID" in told
        assert "too slow" in told


def test_help_explains_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "95 % interval excludes zero and its estimate is beyond the tolerance. Exit code 4 is a regression." in told
    for option in ("--tolerance SHARE", "--share-tolerance SHARE", "--json [FILE]", "--markdown FILE", "--junit FILE"):
        assert option in told
