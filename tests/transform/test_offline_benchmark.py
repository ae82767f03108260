"""The benchmark of `gateway batch`, with a few rows."""

import sys
from pathlib import Path

import pytest

from benchmarks import offline
from tests.transform.test_batch import configuration


def test_the_benchmark_compares_the_gateway_with_the_bare_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, "total")
    monkeypatch.setattr(sys, "argv", ["offline", str(config), "total", "--rows", "20", "--rounds", "2"])
    offline.main()
    printed = capsys.readouterr().out
    assert "round 2: bare " in printed
    assert "median ratio " in printed
