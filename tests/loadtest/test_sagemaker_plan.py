"""The commands of a search on SageMaker where there is no account."""

from pathlib import Path

import pytest
import yaml

from loadtest.cli import main
from tests.loadtest.examples import changed
from tests.loadtest.fake_aws import BUCKET, IMAGE, ROLE

LAUNCHER = {"kind": "sagemaker", "role_arn": ROLE, "bucket": BUCKET, "images": [{"uri": IMAGE}], "parallel": 3}


def test_a_plan_says_what_it_costs_at_most_and_who_is_refused_without_an_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    candidates = [{"instances": ["c5.large", "c5.xlarge", "c7g.large"], "backend": {"kind": "synthetic"}}]
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(changed(launcher=LAUNCHER, candidates=candidates, budget={"minutes": 60, "usd": 5})))
    assert main(["plan", str(spec)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Costs at most $0.31." in told  # an hour of c5.large at $0.102 and of c5.xlarge at $0.204
    assert "refused: c7g.large synthetic: architecture: arm64, and amd64 is all there is" in told
    assert main(["recommend", str(spec), "--max-usd", "-1"]) == 2
    assert main(["reap", "not-a-run"]) == 2
