"""README's configuration is valid, and all links lead somewhere. The commands: test_documented_commands."""

import re
from pathlib import Path

from gateway.config import load_config
from tests.served.documents import ROOT, block


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    (tmp_path / "readme.yaml").write_text(block(ROOT / "README.md", "yaml"))
    load_config(tmp_path / "readme.yaml")


def test_every_link_leads_somewhere() -> None:
    for name in ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            if not target.startswith("http"):
                assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
