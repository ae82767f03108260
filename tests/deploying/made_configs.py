"""Configurations that a test has written."""

from pathlib import Path
from typing import Any

import yaml

SYNTHETIC: dict[str, Any] = {"name": "m", "max_rows": 8, "backends": [{"kind": "synthetic"}]}


def written(tmp_path: Path, *models: dict[str, Any], **sections: Any) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"models": [*models] or [SYNTHETIC], **sections}))
    return path
