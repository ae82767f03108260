"""What both programs have in common on the command line. What each command says of its own is tested with the command."""

import argparse
import contextlib
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import gateway.cli
import loadtest.cli
from gateway.process import completion
from gateway.process.command_line import FAULTY, UNREAD
from loadtest.errors import EXIT_CODES
from loadtest.reports.consoles import meanwhile, results

ROOT = Path(__file__).parent.parent

slow = pytest.mark.slow


@dataclass(frozen=True)
class Program:
    """exit_codes: each with what it means. table: the document that has them."""

    name: str
    parser: Callable[[], argparse.ArgumentParser]
    exit_codes: Mapping[int, str]
    table: str

    def __call__(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", f"{self.name}.cli", *arguments]
        environment = os.environ | variables
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


GATEWAY = Program("gateway", gateway.cli.parser, gateway.cli.EXIT_CODES, "docs/deploy.md")
LOADTEST = Program("loadtest", loadtest.cli.parser, EXIT_CODES, "docs/loadtest.md")
both = pytest.mark.parametrize("program", [GATEWAY, LOADTEST], ids=lambda program: program.name)


@pytest.mark.parametrize("address", ["grpcs://127.0.0.1:1", "grpc://127.0.0.1:1", "ftp://127.0.0.1:1"])
@pytest.mark.parametrize("command", ["top ADDRESS", "why ADDRESS", "route explain ADDRESS m", "predict ADDRESS m --input FILE"])
def test_an_address_of_another_scheme_is_no_file(
    command: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text('{"x": [1]}')
    typed = command.replace("ADDRESS", address).replace("FILE", str(tmp_path / "in.json"))
    assert gateway.cli.main(typed.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{address}: expected the address of a ")
    assert told.endswith("HTTP port, such as http://127.0.0.1:8000\n")


@slow
@both
def test_it_tells_its_version(program: Program) -> None:
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"{program.name} {gateway.__version__}\n")


def helps(command: argparse.ArgumentParser) -> Iterator[str]:
    yield command.format_help()
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from helps(child)


@both
def test_every_help_has_examples_that_can_be_typed(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    own = [told for told in helps(program.parser()) if "usage: gateway route [" not in told]  # which only has `explain`
    assert len(own) >= 6
    for told in own:
        examples = re.findall(rf"^  ({program.name} .*)$", told.partition("\nexamples:\n")[2], re.MULTILINE)
        assert examples, told
        for example in examples:
            words = shlex.split(example)
            assert all((ROOT / word).exists() for word in words if word.startswith("configs/"))
            with contextlib.suppress(SystemExit):  # --help
                program.parser().parse_args(words[1:])
    assert "error" not in capsys.readouterr().err


@both
def test_every_command_says_as_much_and_in_the_format_that_is_asked_for(program: Program) -> None:
    for told in list(helps(program.parser())):
        if "COMMAND" not in told.partition("\n\n")[0]:
            assert all(option in told for option in ("--quiet", "--log-level", "--log-format")), told


@both
def test_a_path_of_a_variable_that_is_not_set_is_no_folder(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    command = {"loadtest": ["recommend", "spec.yaml", "--out", ""], "gateway": ["package", "model", "--out", ""]}[program.name]
    with pytest.raises(SystemExit) as ended:
        program.parser().parse_args(command)
    assert ended.value.code == 2
    assert "argument --out: '': expected a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("gateway serve --port 8000 area.py", "--port: unknown option; did you mean `--http-port`?"),
        ("gateway serve --htp-port=8000 area.py", "--htp-port: unknown option; did you mean `--http-port`?"),
        ("gateway serve area.py other.py", "other.py: one argument too many"),
        ("gateway route explain m.yaml m -x", "-x: unknown option"),
        ("gateway check a.yaml -", "-: one argument too many"),
        ("gateway check --load a.yaml -- --load", "--load: one argument too many"),
        ("gateway check --laod a.yaml b.yaml -- --foo", "--laod: unknown option; did you mean `--load`?"),
        ("loadtest run --modle m 127.0.0.1:1", "--modle: unknown option; did you mean `--model`?"),
        ("loadtest recommend a.yaml b.yaml", "b.yaml: one argument too many"),
    ],
)
def test_what_a_command_does_not_take_is_told_with_its_own_usage(
    typed: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *command = typed.split()
    with pytest.raises(SystemExit) as ended:
        {"gateway": GATEWAY, "loadtest": LOADTEST}[name].parser().parse_args(command)
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.partition(": error: ")
    own = " ".join(typed.split()[: 3 if command[0] == "route" else 2])
    assert usage.startswith(f"usage: {own} ")
    assert error == f"{told}\n"


@pytest.mark.parametrize(
    "typed",
    [
        ("gateway", "CONFIG", "check"),
        ("gateway", "CONFIG", "compile"),
        ("gateway", "CONFIG", "package"),
        ("gateway", "MODEL|CONFIG", "serve"),
        ("gateway", "TARGET|CONFIG", "predict", "", "m", "--input", "x.json"),
        ("gateway", "MODEL", "predict", "x.yaml", "", "--input", "x.json"),
        ("gateway", "--input", "predict", "x.yaml", "m", "--input", ""),
        ("gateway", "OUTPUT", "batch", "x.yaml", "m", "in.csv", ""),
        ("gateway", "CONFIG|URL", "route", "explain", "", "m"),
        ("gateway", "URL", "top", "127.0.0.1:8000", ""),
        ("gateway", "FILE|URL", "why"),
        ("loadtest", "target", "run", "", "--model", "m", "--rate", "1"),
        ("loadtest", "RUN", "reap"),
    ],
    ids=" ".join,
)
def test_a_variable_that_is_not_set_is_no_argument(typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name, field, *command = typed
    program = {"gateway": GATEWAY, "loadtest": LOADTEST}[name]
    with pytest.raises(SystemExit) as ended:
        program.parser().parse_args(command if "" in command else [*command, ""])
    assert ended.value.code == 2
    assert f"argument {field}: '': expected a value: a variable that is not set may stand there" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check -", "serve -", "package -", "predict 127.0.0.1:1 m --input -"])
def test_a_standard_input_that_is_closed_is_told(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert gateway.cli.main(command.split()) == 2
    assert re.search(r"-: (cannot be read: )?standard input is closed(, |: )expected a ", capsys.readouterr().err)


@both
def test_the_exit_codes_stand_in_the_help_and_in_the_document(program: Program) -> None:
    told = program.parser().format_help()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / program.table).read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == program.exit_codes
    assert all(f"\n  {code:<4} {meaning}" in told for code, meaning in program.exit_codes.items())


@slow
@both
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_is_told_how_to_complete_it(program: Program, shell: str) -> None:
    done = program("--print-completion", shell)
    assert done.returncode == 0
    assert "--log-format" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


@slow
@both
def test_in_json_the_reason_why_it_ends_is_an_object(program: Program, tmp_path: Path) -> None:
    command = {"gateway": "check", "loadtest": "report"}[program.name]
    done = program(command, "--log-format", "json", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    said = json.loads(done.stderr)
    assert said["level"] == "ERROR"
    assert f"{tmp_path}/none.yaml: cannot be read" in said["message"]


@slow
@both
def test_a_reader_that_has_seen_enough_is_no_error(program: Program, tmp_path: Path) -> None:
    many = tmp_path / "many.yaml"
    many.write_text("models: [" + ", ".join(f"{{name: m{i}, backends: [{{kind: synthetic}}]}}" for i in range(2000)) + "]")
    arguments = {"gateway": ["check", str(many)], "loadtest": ["prices", "list", "--json"]}[program.name]
    command = [sys.executable, "-m", f"{program.name}.cli", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == UNREAD


@slow
def test_a_table_whose_reader_has_gone_is_no_slo_that_was_missed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        command = [sys.executable, "-m", "loadtest.cli", "prices", "list"]
        done = subprocess.run(command, cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (UNREAD, b"")


@slow
@both
def test_results_that_cannot_be_written_are_told(program: Program) -> None:
    listing = {"gateway": ["examples"], "loadtest": ["prices", "list"]}[program.name]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (listing, ["--help"]):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", f"{program.name}.cli", *arguments]
            done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == {"gateway": 1, "loadtest": 2}[program.name]
        assert done.stderr == f"{program.name}: [Errno 28] No space left on device: 'standard output'\n"


@slow
@both
def test_a_fault_that_cannot_be_told_has_its_exit_code(program: Program) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", f"{program.name}.cli", "no_command"]
        assert subprocess.run(command, cwd=ROOT, env=buffered, stderr=full, check=False).returncode == FAULTY


@slow
def test_a_closed_standard_output_takes_what_is_printed() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "gateway.cli", "examples"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@slow
@both
def test_a_folder_that_was_removed_is_told(program: Program, tmp_path: Path) -> None:
    arguments = {"gateway": ["check", "x.yaml"], "loadtest": ["recommend", "x.yaml"]}[program.name]
    away = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path)]
    command = [*away, sys.executable, "-m", f"{program.name}.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == {"gateway": 1, "loadtest": 2}[program.name]
    assert (
        done.stderr
        == f"{program.name}: the folder that this was started in was removed: expected one that is there: cd to it\n"
    )


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_what_is_told_meanwhile_raises_where_its_reader_has_gone() -> None:
    told = meanwhile(argparse.Namespace(quiet=False, log_format="text"))
    with contextlib.redirect_stderr(Gone()), pytest.raises(BrokenPipeError):
        told.print("a step")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_what_is_told_has_a_hundred_columns_without_a_terminal(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", term)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        told = results(), meanwhile(argparse.Namespace(quiet=False, log_format="text"))
    assert [console.width for console in told] == [100, 100]


COLOUR = re.compile(r"\x1b\[[\d;]*3\d")
SAY = """
from argparse import Namespace
from loadtest.reports.consoles import meanwhile, results
for console in (results(), meanwhile(Namespace(quiet=False, log_format="text"))):
    console.print("kept", style="green")
"""


def in_terminal(**variables: str) -> str:
    """What is written to a terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", **variables}
    with subprocess.Popen([sys.executable, "-c", SAY], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as output:
            while more := output.read(65536):
                told += more
    return told.decode()


@slow
def test_only_a_terminal_gets_colours_and_not_where_no_color_is_set() -> None:
    assert len(COLOUR.findall(in_terminal())) == 2
    assert in_terminal(NO_COLOR="1") == "kept\r\nkept\r\n"
    piped = subprocess.run([sys.executable, "-c", SAY], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert (piped.stdout, piped.stderr) == ("kept\n", "kept\n")


@slow
def test_what_completes_is_what_shtab_knows_without_importing_it() -> None:
    import shtab

    assert list(completion.SHELLS) == shtab.SUPPORTED_SHELLS
    assert completion.FILES == shtab.FILE
    code = "import sys, gateway.cli; gateway.cli.parser('serve'); sys.exit('shtab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
