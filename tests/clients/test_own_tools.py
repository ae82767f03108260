"""Our own commands before a gateway that speaks TLS and asks for keys: they get in, or say in one sentence why not."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main as gateway
from gateway.process.credentials import VARIABLE, Credentials
from loadtest.cli import main as loadtest
from loadtest.errors import TargetError
from loadtest.lab.launchers.local import Local
from loadtest.lab.launchers.url import Url, get_json, instance_type_of
from loadtest.load import target
from loadtest.measuring.generator import measure
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.spec import read_search_spec
from loadtest.results import LoadSpec, RunResult
from tests.certificates import Authority
from tests.clients.test_locked import KEYS, Locked, locked

pytestmark = pytest.mark.slow

SECRET = "w4tch"
LOAD = ("--rate", "50", "--duration", "0.2", "--connections", "8")  # of which each takes a handshake
COMMANDS = {
    "top": ("top", "URL", "--once", "--seconds", "0.2"),
    "why": ("why", "URL"),
    "route explain": ("route", "explain", "URL", "echo"),
    "predict": ("predict", "URL", "echo", "--input", "INPUT"),
    "loadtest run": ("run", "URL", "--model", "echo", *LOAD),
    "loadtest run, binary": ("run", "URL", "--model", "echo", "--protocol", "rest-binary", *LOAD),
    "loadtest run, gRPC": ("run", "GRPC", "--model", "echo", "--protocol", "grpc", *LOAD),
    "loadtest run, payload": ("run", "URL", "--model", "echo", "--payload", "INPUT", *LOAD),
    "loadtest run, gRPC, payload": ("run", "GRPC", "--model", "echo", "--protocol", "grpc", "--payload", "INPUT", *LOAD),
}
EACH = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    yield from locked(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("tools-mutual")
    yield from locked(folder, client_ca=str(folder / "ca.pem"))


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


class Tool:
    """Types a command before a gateway."""

    def __init__(self, there: Locked, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        body = there.folder / "request.json"
        body.write_text('{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}')
        given = {"URL": f"https://{there.gateway.http}", "GRPC": f"grpcs://{there.gateway.grpc}", "INPUT": str(body)}
        self._main = loadtest if command.startswith("loadtest") else gateway
        self._typed = [given.get(word, word) for word in COMMANDS[command]]
        self._capsys = capsys

    def type(self, *options: object) -> tuple[int, str]:
        """The exit code, and all that was said."""
        code = self._main([*self._typed, *map(str, options)])
        said = self._capsys.readouterr()
        assert SECRET not in said.out + said.err
        return code, " ".join((said.out + said.err).split())


@EACH
def test_a_command_gets_in_by_the_key_of_the_environment_or_of_a_file(
    here: Locked, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = Tool(here, command, capsys)
    file = tmp_path / "key"
    file.write_text(SECRET)
    code, said = tool.type("--ca", here.authority.path, "--api-key-file", file)
    assert code == 0 or "send lag" in said, said  # of a machine that is busy
    monkeypatch.setenv(VARIABLE, SECRET)
    code, said = tool.type("--ca", here.authority.path)
    assert code == 0 or "send lag" in said, said


@EACH
def test_a_command_that_does_not_get_in_says_what_is_missing(
    here: Locked, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool, ca = Tool(here, command, capsys), here.authority.path
    assert_refused(tool.type(), "this machine knows none: name one with --ca")
    other = Authority(tmp_path, "another").path
    assert_refused(tool.type("--ca", other), f"and --ca {other} has none")
    assert_refused(tool.type("--ca", ca), f"401: it asks for a key: put it into the environment's {VARIABLE}, or name its file")
    monkeypatch.setenv(VARIABLE, "old")
    assert_refused(tool.type("--ca", ca), f"401: it does not take the key of {VARIABLE} (the key 'old' expired at 2020-01-31")


@EACH
def test_a_command_shows_its_certificate_or_says_that_one_is_asked_for(
    mutual: Locked, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    tool, ca = Tool(mutual, command, capsys), ("--ca", mutual.authority.path)
    assert_refused(tool.type(*ca), "name one with --cert and --key")
    certificate, key = mutual.authority.issue("client", client=True)
    code, said = tool.type(*ca, "--cert", certificate, "--key", key)
    assert code == 0 or "send lag" in said, said


@pytest.mark.parametrize(
    ("command", "secret", "words"),
    [
        (
            "top",
            "mine",
            "403: the key of GATEWAY_API_KEY is not for this (the key 'mine' is for infer: expected",
        ),
        ("route explain", "mine", "403: the key of GATEWAY_API_KEY is not for this"),
        (
            "predict",
            "few",
            "429: the key of GATEWAY_API_KEY has asked as much as it may (the key 'few' may ask 0.001",
        ),
    ],
)
def test_a_key_for_something_else_or_used_up_is_told(
    here: Locked, command: str, secret: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, secret)
    tool = Tool(here, command, capsys)
    said = [tool.type("--ca", here.authority.path) for _ in range(3)]
    assert_refused(said[-1], words)


@pytest.mark.parametrize("command", ["top", "why", "predict", "loadtest run", "loadtest run, gRPC"])
def test_who_forgets_tls_is_told_of_it(here: Locked, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    tool = Tool(here, command, capsys)
    tool._typed = [word.replace("https:", "http:").replace("grpcs:", "grpc:") for word in tool._typed]
    assert_refused(tool.type(), "speaks TLS")


def test_a_handshake_for_grpc_waits_for_nothing(here: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_ASK_TIMEOUT_S", 60.0)
    wanted = load(here, "grpc")
    begun_s = time.monotonic()
    target.shake_hands(target.Address.of(wanted, shown(here)))
    assert time.monotonic() - begun_s < 30


def assert_refused(ended: tuple[int, str], words: str) -> None:
    code, said = ended
    assert code == 1, said
    assert words in said
    assert "Traceback" not in said


def shown(there: Locked, secret: str = SECRET) -> Credentials:
    return Credentials(ca=str(there.authority.path), api_key=secret)


def wait_until_known(there: Locked) -> None:
    """The file of keys is looked at once a second."""
    until_s = time.monotonic() + 20
    while True:
        try:
            get_json(f"https://{there.gateway.http}/v2", shown(there))
        except TargetError:
            assert time.monotonic() < until_s
        else:
            return


def load(there: Locked, protocol: Any, **changes: Any) -> LoadSpec:
    address = f"grpcs://{there.gateway.grpc}" if protocol == "grpc" else f"https://{there.gateway.http}"
    wanted = {"model": "echo", "rate_rps": 100.0, "duration_s": 0.5, "warmup_s": 0.0, **changes}
    return LoadSpec(address, protocol, **wanted)


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_key_that_is_taken_back_ends_the_run_which_keeps_what_was_measured(
    here: Locked, protocol: str, processes: int
) -> None:
    keys = here.folder / "keys.yaml"
    without = "\n".join(line for line in KEYS.splitlines() if "watcher" not in line)

    async def run() -> RunResult:
        def take_back(progress: object) -> None:
            keys.write_text(without)

        wanted = load(here, protocol, duration_s=30.0, processes=processes)
        return await measure(wanted, shown=shown(here), on_progress=take_back)

    try:
        result = asyncio.run(run())
    finally:
        keys.write_text(KEYS)
        wait_until_known(here)
    assert result.partial
    assert not result.valid
    assert result.window_s < 20
    assert result.succeeded > 0
    assert any("401: it does not take the key of" in reason for reason in result.reasons), result.reasons


@pytest.mark.parametrize("protocol", ["rest-json", "grpc"])
def test_a_limit_is_counted_as_a_refusal_and_named(here: Locked, protocol: str) -> None:
    result = asyncio.run(measure(load(here, protocol), shown=shown(here, "few")))
    kind = "grpc RESOURCE_EXHAUSTED" if protocol == "grpc" else "http 429"
    assert not result.partial
    assert result.errors[kind] >= result.requests - 2
    assert any("they tell of a limit, such as that of a key" in warning for warning in result.warnings)


def test_nothing_that_is_written_holds_the_key(here: Locked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    typed = ["run", f"https://{here.gateway.http}", "--model", "echo", "--rate", "50", "--duration", "0.5"]
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "csv", "log", "openmetrics")]
    loadtest([*typed, *files, "--ca", str(here.authority.path)])
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["csv", "json", "log", "openmetrics"]
    assert not [name for name in written if SECRET in (tmp_path / name).read_text()]


def test_a_null_server_speaks_tls_to_selfcheck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    typed = ["selfcheck", "--rates", "100", "--seconds", "0.3", "--json", "--tls", str(certificate), str(key)]
    assert loadtest([*typed, "--ca", str(authority.path)]) == 0
    protocols = json.loads(capsys.readouterr().out)
    assert [each["protocol"] for each in protocols] == ["rest-json", "grpc"]
    assert all(run["sent_rps"] > 50 for each in protocols for run in each["runs"])


def test_a_server_that_runs_already_is_asked_with_the_key(here: Locked) -> None:
    url = f"https://{here.gateway.http}"
    with pytest.raises(TargetError, match="401: it asks for a key"):
        get_json(f"{url}/v2", Credentials(ca=str(here.authority.path)))
    with pytest.raises(TargetError, match="does not say which instance type"):
        asyncio.run(instance_type_of(url, shown(here)))
    assert Url(shown(here)).start_s == 0


def test_candidates_of_a_locked_gateway_are_locked_as_it_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    (tmp_path / "keys.yaml").write_text(KEYS)
    tls = {"certificate": certificate.name, "key": key.name}
    tensors = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    model = {"name": "m", "inputs": tensors, "outputs": tensors, "backends": [{"kind": "synthetic"}]}
    server = {"tls": tls, "access": {"keys": "keys.yaml"}, "http_port": 9}
    (tmp_path / "gateway.yaml").write_text(json.dumps({"server": server, "models": [model]}))
    candidate = {"backend": "synthetic", "usd_per_hour": 1, "price_source": "made up"}
    spec = {"gateway": "gateway.yaml", "model": "m", "slo": "p99<1s", "launcher": {"kind": "local"}, "candidates": [candidate]}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    (found,) = read_search_spec(tmp_path / "spec.yaml", load_catalogue()).candidates
    assert found.document["server"].keys() == {"tls", "access"}  # its ports are the launcher's choice

    async def asked() -> tuple[Any, RunResult]:
        running = await Local(start_timeout_s=60).start(found)
        try:
            assert running.grpc.startswith("grpcs://")
            mine = Credentials(ca=str(authority.path), api_key=SECRET)
            statistics = await asyncio.to_thread(get_json, f"{running.rest}/v2/models/m/stats", mine)
            wanted = LoadSpec(running.grpc, "grpc", "m", rate_rps=50, duration_s=0.5)
            return statistics, await measure(wanted, shown=mine)
        finally:
            await running.stop()

    statistics, result = asyncio.run(asked())
    assert statistics["model_stats"][0]["name"] == "m"
    assert result.succeeded == result.requests > 0
