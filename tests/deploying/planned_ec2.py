"""`gateway deploy ec2` as a test types it, and what it plans."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main

ROOT = Path(__file__).parent.parent.parent
IRIS = ROOT / "configs" / "examples" / "iris.yaml"
WHEEL = "serving_gateway-0.1.0-py3-none-any.whl"
TYPE = ("--instance-type", "c7i.large")
BUCKET = "a.bucket"
PLACE = ("--region", "us-east-1", "--subnet", "subnet-0123456789abcdef0", "--bucket", BUCKET)


def files(folder: Path) -> tuple[str, ...]:
    """A wheel of this tree, and a lock that installs nothing, as options."""
    wheel, lock = folder / WHEEL, folder / "requirements.lock"
    if not wheel.exists():
        metadata = "serving_gateway-0.1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            for package in ("gateway", "backends"):
                for path in (ROOT / package).rglob("*"):
                    if path.suffix in (".py", ".yaml", ".html", ".typed") and "configs" not in path.parts:
                        archive.write(path, path.relative_to(ROOT))
            archive.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: serving-gateway\nVersion: 0.1.0\n")
            archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{metadata}/entry_points.txt", "[console_scripts]\ngateway = gateway.__main__:main\n")
            archive.writestr(f"{metadata}/RECORD", "")
    lock.write_text("# nothing\n")
    return ("--wheel", str(wheel), "--lock", str(lock))


def command(tmp_path: Path, *options: str, config: Path = IRIS) -> list[str]:
    return ["deploy", "ec2", str(config), *TYPE, *PLACE, *files(tmp_path), *options]


def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str, config: Path = IRIS) -> list[dict[str, Any]]:
    """Its calls, each as one key and its parameters."""
    code = main(command(tmp_path, *options, config=config))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "model.tar.gz: 0.0 MiB, " in err
    return list(yaml.safe_load(out))


def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str, config: Path = IRIS) -> dict[str, Any]:
    """Parameters by call, of those that are made once."""
    return {name: asked for call in plan(capsys, tmp_path, *options, config=config) for name, asked in call.items()}
