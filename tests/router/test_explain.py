"""`gateway route explain`, asked of a running gateway and of a configuration."""

from pathlib import Path

import pytest

from gateway.cli import main
from gateway.routing.explain import ask
from tests.served.gateway_process import served

TWO = """
models:
  - name: m
    slo: {p99_ms: 200}
    backends:
      - {kind: synthetic, name: dear, fixed_ms: 1, usd_per_hour: 2.0}
      - {kind: synthetic, name: cheap, fixed_ms: 2, usd_per_hour: 0.5, sessions: 2}
      - {kind: synthetic, name: next, usd_per_hour: 1.0, shadow_share: 0.5}
"""


def written(tmp_path: Path, text: str = TWO) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_running_gateway_tells_the_parts_of_every_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(written(tmp_path), "--no-ray") as gateway:
        assert main(["route", "explain", f"http://{gateway.http}", "m", "--rows", "4"]) == 0
        told = ask(f"http://{gateway.http}", "m", "", 4)
        assert main(["route", "explain", f"http://{gateway.http}", "other"]) == 1
        assert main(["route", "explain", f"http://{gateway.http}", "m", "--rows", "0"]) == 2
    assert [lane["role"] for lane in told["lanes"]] == ["regular", "shadow", "regular"]
    assert told["backend"] == "cheap"
    said = capsys.readouterr()
    assert "m version 1, 4 rows, policy cheapest, SLO 200 ms, spill at 100 ms" in said.out
    assert "404" in said.err


def test_without_one_the_configuration_says_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "server: {http_port: 1}\n" + TWO
    assert main(["route", "explain", written(tmp_path, text), "m"]) == 0
    said = capsys.readouterr().out
    assert "no gateway answers at http://127.0.0.1:1" in said
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["cheap", "next", "dear"]
    assert "shadow 50%" in lines[-2]


def test_an_unknown_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "explain", written(tmp_path), "other"]) == 1
    assert "model 'other'" in capsys.readouterr().err
