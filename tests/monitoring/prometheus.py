"""Where the files for Prometheus and Grafana stand, and what they say."""

from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parent.parent.parent
PROMETHEUS: Final = ROOT / "configs" / "prometheus"
RULES: Final = ("recording.yml", "budget.yml", "alerts.yml")


def rules(name: str) -> list[dict[str, Any]]:
    """Of a file: each with `record` or `alert`, and `expr`."""
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
