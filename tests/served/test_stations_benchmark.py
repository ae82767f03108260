"""What the benchmark of the gateway's stations refuses before it measures."""

import sys

import pytest

from benchmarks import stations


def test_requests_too_few_for_a_chunk_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["stations", ".", "--requests", "1199"])
    with pytest.raises(SystemExit) as ended:
        stations.main()
    assert ended.value.code == 2
    assert "--requests 1199: expected at least 1200" in capsys.readouterr().err
