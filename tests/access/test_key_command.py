"""`gateway key`: its line is what a file of keys takes, and its key is what the file then knows."""

import datetime
from pathlib import Path

import pytest
import yaml

from gateway.access.doors import keys_of
from gateway.access.limits import Limit
from gateway.access.rules import known_key
from gateway.cli import main
from gateway.config import AccessSection


def test_its_line_knows_its_key_and_does_not_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "iris", "--model", "a: b", "--scope", "infer", "--scope", "metrics", "--expires", "2035-01-31"]
    assert main(["key", "team-a", *options, "--requests-per-s", "2.5", "--burst", "7", "--concurrent", "3"]) == 0
    line, secret = capsys.readouterr()
    assert secret.strip() not in line
    assert len(secret.strip()) == len("gwk_") + 43
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{line}")
    assert main(["key", "team-b"]) == 0
    path.write_text(path.read_text() + capsys.readouterr().out)
    keys = keys_of(AccessSection(keys=str(path)), {})
    assert len(keys) == 2
    expires_s = datetime.datetime(2035, 1, 31, tzinfo=datetime.UTC).timestamp()
    key = known_key(secret.strip().encode(), keys, expires_s - 1)
    assert key in keys.values()
    assert (key.name, key.models, key.scopes) == ("team-a", {"iris", "a: b"}, {"infer", "metrics"})  # type: ignore[union-attr]
    assert (key.expires_s, key.limit) == (expires_s, Limit(400_000_000, 7, 3))  # type: ignore[union-attr]


def test_days_are_counted_from_today(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "short", "--expires", "2d"]) == 0
    (entry,) = yaml.safe_load(capsys.readouterr().out)
    left = datetime.date.fromisoformat(entry["expires"]) - datetime.datetime.now(datetime.UTC).date()
    assert left.days in (1, 2)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["a b"], "name"),
        (["a", "--scope", "all"], "scopes"),
        (["a", "--requests-per-s", "0"], "requests_per_s"),
        (["a", "--burst", "3"], "burst"),
        (["a", "--expires", "soon"], "--expires: 'soon': expected a date such as"),
        (["a", "--expires", "2020-01-01"], "as 2020-01-01 (UTC) has begun: expected a later day"),
        (["a", "--expires", "0d"], "--expires: '0d': the key would be none from the start, as "),
    ],
)
def test_what_no_file_would_take_makes_no_key(
    options: list[str], fault: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["key", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert fault in err + caplog.text
