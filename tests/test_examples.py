"""`gateway examples`: what comes along to begin with."""

import json
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.commands.examples import bundled

ROOT = Path(__file__).parent.parent


def test_every_configuration_there_is_comes_along_with_a_line_on_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "reference"
    assert len(lines) == len([*(ROOT / "configs").rglob("*.yaml")])
    assert "iris             A class of your own, with nothing but numpy: irises by four measurements." in lines
    assert main(["examples", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == list(bundled())


def test_an_example_is_written_with_all_that_it_names_where_the_documents_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", "minilm-local", "reference", "--out", str(tmp_path)]) == 0
    below = (
        "loadtests/minilm-local.yaml",
        "loadtests/sentences.txt",
        "examples/minilm.yaml",
        "examples/minilm.py",
        "gateway.yaml",
    )
    for path in below:
        assert (tmp_path / "configs" / path).read_bytes() == (ROOT / "configs" / path).read_bytes()
    told = capsys.readouterr().out
    assert f"to type, in {tmp_path}:" in told
    assert "  loadtest recommend configs/loadtests/minilm-local.yaml\n" in told


def test_what_is_there_already_stays_and_another_file_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write = ["examples", "linear", "--out", str(tmp_path)]
    assert main(write) == 0
    assert main(write) == 0
    own = tmp_path / "configs" / "examples" / "linear.py"
    own.write_text("mine")
    (tmp_path / "configs" / "examples" / "linear.yaml").unlink()
    assert main(write) == 2
    assert f"--out: {own}: exists, and is another file: name another DIR, or remove it" in capsys.readouterr().err
    assert own.read_text() == "mine"
    assert not (tmp_path / "configs" / "examples" / "linear.yaml").exists()


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", "minilm", "irs", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "NAME: no example 'irs'; did you mean 'iris'? examples: 'reference', " in said
    assert not [*tmp_path.iterdir()]
