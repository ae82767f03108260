"""What --json writes to standard output: one document, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.cli import main
from loadtest.commands import outputs
from loadtest.errors import ExitCode
from loadtest.measuring.generator_limit import null_server
from loadtest.reports.recommendation import read, to_json
from loadtest.results import LoadSpec, read_run
from loadtest.results import to_json as run_to_json
from tests.loadtest.examples import DOCUMENT, changed, example_recommendation
from tests.loadtest.made_results import run_result
from tests.loadtest.test_spec_agreement import requests_file


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments]) == code
    return json.loads(capsys.readouterr().out)


def spec(folder: Path, **keys: Any) -> str:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(changed(**keys)))
    return str(path)


def result(folder: Path) -> str:
    path = folder / "r.json"
    path.write_text(run_to_json(run_result(replace(LoadSpec("http://nowhere", model="m"), rate_rps=100), succeeded=4000)))
    return str(path)


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = printed(capsys, "plan", spec(tmp_path), "--budget-minutes", "12", "--json")
    assert (plan["model"], plan["minutes"], plan["profiles"], plan["max_usd"]) == ("adder", 12, 2, None)
    assert len(plan["candidates"]) == 4
    first = plan["candidates"][0]
    assert first["name"] == "c7i.large synthetic (sessions 1)"
    assert (first["usd_per_hour"], first["price_basis"]) == (0.08925, "ec2")
    assert first["price_source"]


@pytest.mark.slow
def test_prices_unknown_ones_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ("--cache", str(tmp_path / "none.json"), "--json")
    listed = printed(capsys, "prices", "list", "inf2", *cache)
    assert listed["region"] == "us-east-1"
    by_type = {instance["type"]: instance for instance in listed["instances"]}
    assert by_type["inf2.xlarge"]["prices"]["ec2"]["usd_per_hour"] == 0.7582
    assert by_type["inf2.xlarge"]["accelerator"]["name"] == "inferentia2"
    assert all(name.startswith("inf2.") for name in by_type)
    shown = printed(capsys, "prices", "show", "ml.g7.2xlarge", *cache)
    assert [instance["type"] for instance in shown["instances"]] == ["g7.2xlarge"]
    assert shown["instances"][0]["prices"]["spot"] is None
    assert shown["instances"][0]["prices"]["ec2"]["source"]


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [result(tmp_path)] * 2
    assert printed(capsys, "compare", *files, "--json")["verdict"] == "same"
    assert main(["compare", *files, "--json", "--markdown", "-"]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert "--json and --markdown: standard output takes one of them" in told.err


@pytest.mark.parametrize(
    ("asked", "two"),
    [
        ("run http://x --json new --csv new", "--json and --csv"),
        ("run http://x --json new --log link", "--json and --log"),
        ("run http://x --json q --log q.live", "--log q.live"),  # which may be another run's
        ("run http://x --openmetrics r.json --payload r.json", "--payload and --openmetrics"),
        ("run http://x --json folder/new --payload folder", "--payload and --json"),
        ("run http://x --json key.pem --cert r.json --key key.pem", "--key and --json"),
        ("run http://x --csv r.json --api-key-file r.json", "--api-key-file and --csv"),
        ("run http://x --pattern constant:rate=1;trace:file=r.json --log r.json", "--pattern and --log"),
        ("run http://x --pattern constant:rate=1;trace:file=q.live --json q", "--pattern and FILE.live"),
        ("run http://x --json - --log -", "--json and --log"),
        ("compare r.json r.json --markdown new --junit new", "--markdown and --junit"),
        ("compare r.json new --json ./r.json", "BASE and --json"),
        ("compare new r.json --json r.json", "NEW and --json"),
        ("recover r.json --json r.json", "FILE.live and --json"),
        ("report r.json --out r.json", "FILE and --out"),
        ("recommend spec.yaml --openmetrics spec.yaml", "SPEC and --openmetrics"),
        ("recommend spec.yaml --out . --openmetrics report.json", "--openmetrics and --out"),
        ("recommend spec.yaml --openmetrics own.yaml", "gateway and --openmetrics"),
        ("recommend spec.yaml --openmetrics keys", "gateway and --openmetrics"),
        ("recommend spec.yaml --openmetrics r.json --ca r.json", "--ca and --openmetrics"),
        ("recommend spec.yaml --openmetrics own.py", "candidates and --openmetrics"),
        ("recommend spec.yaml --openmetrics folder/runs.om", "payload.files and --openmetrics"),
        ("recommend spec.yaml --out folder", "payload.files and --out"),
        ("recommend spec.yaml --openmetrics asked.jsonl", "agreement.requests and --openmetrics"),
    ],
)
def test_a_file_that_the_command_has_already_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, two: str
) -> None:
    backend = {"kind": "python", "model": "own.py:Own"}
    keys = {"gateway": "own.yaml", "model": "adder", "candidates": [{"instances": ["c7i.large"], "backend": backend}]}
    asked_of_all = {"payload": {"files": ["folder"]}, "agreement": {"requests": ["asked.jsonl"]}}
    result(tmp_path), spec(tmp_path, **keys, **asked_of_all)
    gateway = {"server": {"access": {"keys": "keys"}}, "models": [{**DOCUMENT["model"], "backends": [{"kind": "synthetic"}]}]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(gateway))
    (tmp_path / "folder").mkdir()
    for name in ("asked.jsonl", "folder/one.jsonl"):
        Path(requests_file(tmp_path, 1)).rename(tmp_path / name)
    for name in ("own.py", "keys", "key.pem"):
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("new")
    monkeypatch.chdir(tmp_path)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    kept = files()
    assert main(asked.split()) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"loadtest: {two}: ")
    assert files() == kept


def test_the_file_that_standard_output_goes_to_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout, file = tmp_path / "stdout", result(tmp_path)
    stdout.symlink_to(file)
    monkeypatch.setattr(outputs, "_PRINTED", stdout)
    assert main(["run", "http://x", "--json", file, "--log", "-"]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("loadtest: --json and --log: both are ")


def test_a_device_takes_several(tmp_path: Path) -> None:
    files = [result(tmp_path)] * 2
    assert main(["compare", *files, "--json", "/dev/null", "--junit", "/dev/null", "--quiet"]) == ExitCode.MET


@pytest.mark.parametrize("options", [["--json"], ["--format", "json"]])
def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(example_recommendation()))
    assert printed(capsys, "report", str(path), *options)["winner"] == read(path).winner


@pytest.mark.slow
def test_a_run_and_beside_a_file_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with null_server() as server:
        run = ["run", f"127.0.0.1:{server.http_port}", "--model", "null", "--duration", "0.3", "--warmup", "0"]
        assert printed(capsys, *run, "--json")["succeeded"] > 0
        assert main([*run, "--json", str(tmp_path / "r.json")]) == ExitCode.MET
        assert "goodput" in capsys.readouterr().out
        assert read_run(tmp_path / "r.json").succeeded > 0
        assert main([*run, "--json", str(tmp_path / "r.json"), "--quiet"]) == ExitCode.MET
        assert capsys.readouterr() == ("", "")
        assert main(["run", "--json", *run[1:]]) == ExitCode.USAGE
        assert f"--json took '127.0.0.1:{server.http_port}' as its FILE: put --json last" in capsys.readouterr().err


@pytest.mark.slow
def test_what_this_machine_can_offer(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "selfcheck", "--seconds", "0.1", "--rates", "200", "--protocol", "grpc", "--json")
    assert [(entry["protocol"], len(entry["runs"])) for entry in found] == [("grpc", 1)]
