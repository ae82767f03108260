"""The commands of a search on SageMaker or EC2 where there is no account."""

from pathlib import Path

import pytest
import yaml

from loadtest.cli import main
from tests.loadtest.examples import changed
from tests.loadtest.fake_aws import BUCKET, IMAGE, ROLE
from tests.loadtest.fake_ec2 import kit

LAUNCHER = {"kind": "sagemaker", "role_arn": ROLE, "bucket": BUCKET, "images": [{"uri": IMAGE}], "parallel": 3}


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_a_plan_says_what_it_costs_at_most_and_who_is_refused_without_an_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = [{"instances": ["c5.large", "c5.xlarge", "c7g.large"], "backend": {"kind": "synthetic"}}]
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(changed(launcher=LAUNCHER, candidates=candidates, budget={"minutes": 60, "usd": 5})))
    assert main(["plan", str(spec)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Costs at most $0.31." in told  # an hour of c5.large at $0.102 and of c5.xlarge at $0.204
    assert "refused: c7g.large synthetic: architecture: arm64, and amd64 is all there is" in told
    assert main(["recommend", str(spec), "--max-usd", "-1"]) == 2
    assert main(["reap", "not-a-run"]) == 2


def ec2(tmp_path: Path, **launcher: object) -> Path:
    place = {"kind": "ec2", "subnet": "subnet-0123456789abcdef0", "bucket": BUCKET, **kit(tmp_path / "kit")}
    candidates = [{"instances": ["c5.large", "c7a.xlarge", "g5.xlarge"], "backend": {"kind": "synthetic"}}]
    candidates += [{"instances": ["c5.xlarge"], "backend": {"kind": "torch", "model": "m.pt2"}}]
    (tmp_path / "m.pt2").write_bytes(b"a model")
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        yaml.safe_dump(
            changed(
                launcher=place | launcher,
                candidates=candidates,
                budget={"minutes": 60, "usd": 5},
                slo={"p99_ms": 50, "min_agreement": None},
            )
        )
    )
    return spec


def test_a_plan_of_ec2_counts_the_generator_and_names_the_basis_of_its_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ec2(tmp_path)
    assert main(["plan", str(spec)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "launcher ec2" in told
    assert "prices, ec2: aws/karpenter-provider-aws@1d927085d" in told
    assert "A load generator beside them costs $0.1785 an hour, on demand." in told
    assert "Costs at most $1.18." in told  # an hour of g5.xlarge at $1.006 and of the generator
    assert "refused: c5.xlarge torch: launcher.locks: requirements-cpu.lock installs no torch" in told
    spec = ec2(tmp_path, spot=True)
    assert main(["plan", str(spec)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "spot, estimated" in told
    assert "c5.large synthetic 0.03485" in told  # 59 % below $0.085
