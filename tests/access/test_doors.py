"""Keys of files and of the environment, read again when they change; and every path and call behind them."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import gateway
from gateway.access.doors import Doors
from gateway.access.rules import INFER, ApiKey, digest_of
from gateway.config import AccessSection, ServerSection
from gateway.errors import ConfigError, Limited, Unauthenticated
from gateway.process.watched_files import WatchedFiles

KEYS = {
    "all": "{}",
    "mine": "{models: [mine]}",
    "slow": "{requests_per_s: 0.001}",
    "one": "{concurrent: 1}",
    "old": "{expires: 2020-02-03}",
    "scraper": "{scopes: [metrics]}",
    "watcher": "{scopes: [status]}",
    "admin": "{scopes: [admin]}",
}


def lines(keys: Mapping[str, str]) -> str:
    entries = [
        f"- {{name: {name}, hash: 'sha256:{digest_of(name.encode()).hex()}', {more.strip('{}')}}}"
        for name, more in keys.items()
    ]
    return "\n".join(["keys:", *entries, ""])


@dataclass
class Visits:
    headers: Mapping[bytes, bytes]
    key: Any = field(default=None)


def visitor(name: str) -> Visits:
    return Visits({b"authorization": b"Bearer " + name.encode()})


class Time:
    """now_ns: two seconds later at each look; wall_s: as it is set."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.wall_s = 0.0

    def monotonic(self) -> int:
        self.now_ns += 2_000_000_000
        return self.now_ns


def doors(section: AccessSection, time: Time, environment: Mapping[str, str] | None = None) -> Doors:
    return Doors(section, environment or {}, None, time.monotonic, lambda: time.wall_s)


def test_a_key_counts_from_when_it_is_written_until_it_is_taken_back_or_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.process.watched_files")
    path, time = tmp_path / "keys.yaml", Time()
    path.write_text(lines({"a": "{}"}))
    asked = doors(AccessSection(keys=str(path)), time)
    a, b = visitor("a"), visitor("b")
    asked.meet(a)
    asked.meet(b)
    asked.check(a, INFER, "m")
    with pytest.raises(Unauthenticated):
        asked.check(b, INFER, "m")
    path.write_text(lines({"b": "{expires: 1970-01-02}"}))

    asyncio.run(looking(asked, lambda: bool(caplog.records)))  # nobody asks meanwhile
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="none that is known"):  # in the middle of a stream, say
            asked.check(a, INFER, "m")
    asked.check(b, INFER, "m")  # in one that was there before its key
    time.wall_s = 86_400.0
    with pytest.raises(Unauthenticated, match="expired"):
        asked.check(b, INFER, "m")
    time.wall_s = 0.0
    asked.check(b, INFER, "m")


async def looking(asked: Doors, until: Callable[[], bool]) -> None:
    """A file is read on a thread, and counts in a turn of the loop behind that."""
    task = asyncio.create_task(asked.keep_looking(0.001))
    async with asyncio.timeout(30):
        while not until():  # noqa: ASYNC110  # what is waited for is a file, no event
            await asyncio.sleep(0.001)
    task.cancel()


@pytest.mark.parametrize("text", ["keys: [{name: a, hash: gwk_the-key-itself}]", "keys:", "", None], ids=str)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None) -> None:
    path, time = tmp_path / "keys.yaml", Time()
    path.write_text(lines({"a": "{}"}))
    asked = doors(AccessSection(keys=str(path)), time)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    rounds = 0

    def told() -> bool:
        nonlocal rounds
        a = visitor("a")
        asked.meet(a)
        asked.check(a, INFER, "m")
        rounds += bool(caplog.records)
        return rounds == 5

    asyncio.run(looking(asked, told))
    (record,) = caplog.records
    assert "keys.yaml" in record.message
    assert "gwk_" not in record.message


def test_a_file_of_keys_is_read_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 of them take seconds, in which others are answered."""
    path = tmp_path / "keys.yaml"
    path.write_text(lines({"a": "{}"}))
    asked = doors(AccessSection(keys=str(path)), Time())
    path.write_text(lines({f"key-{number}": "{}" for number in range(20)}))
    pauses: list[int] = []
    monkeypatch.setattr("gateway.documents.reader.pause", lambda: pauses.append(threading.get_ident()))
    who = visitor("key-1")

    def known() -> bool:
        asked.meet(who)
        return isinstance(who.key, ApiKey)

    asyncio.run(looking(asked, known))
    assert len(pauses) > 10
    assert threading.get_ident() not in pauses


def test_files_that_may_be_read_again_are(tmp_path: Path) -> None:
    """Nothing of a file but its rights has changed."""
    path, fault = tmp_path / "file", [ConfigError("not yet")]

    def make() -> int:
        if path.stat().st_mode & 0o777 == 0o600:
            raise fault[0]
        return path.stat().st_mode & 0o777

    path.touch(0o644)
    watched = WatchedFiles([str(path)], make, name="files", clock=Time().monotonic)
    path.chmod(0o600)
    assert [watched.current() for _ in range(5)] == [0o644] * 5
    path.chmod(0o640)
    assert watched.current() == 0o640


def test_keys_may_be_in_the_environment_as_well(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(lines({"a": "{}"}))
    section = AccessSection(keys=str(path), keys_variable="KEYS")
    asked = doors(section, Time(), {"KEYS": lines({"b": "{}"})})
    for name in ("a", "b"):
        who = visitor(name)
        asked.meet(who)
        asked.check(who, INFER, "m")
    with pytest.raises(ConfigError, match="the environment has no such variable"):
        doors(section, Time())
    with pytest.raises(ConfigError, match="in the file and in the environment"):
        doors(section, Time(), {"KEYS": lines({"a": "{}"})})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("keys: [{name: a, hash: 'sha256:12'}]", r"keys\[0\]\.hash: .*`gateway key`"),
        ("keys: [{name: 'a b', hash: 'sha256:" + "0" * 64 + "'}]", r"keys\[0\]\.name"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', scopes: [everything]}]", r"keys\[0\]\.scopes"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', expires: soon}]", r"keys\[0\]\.expires: .*a date such as"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', expires: 0001-01-01T00:00:00+23:59}]", r"a date such as"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', expires: 9999-12-31T23:59:59-23:59}]", r"a date such as"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', burst: 3}]", r"keys\[0\]\.burst"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', requests_per_s: 1.0e-320}]", r"keys\[0\]\.requests_per_s"),
        ("keys: [{name: a, hash: 'sha256:" + "0" * 64 + "', requests_per_s: 0.0001, burst: 1000000}]", r"at most 100000"),
        (lines({"a": "{}"}) + lines({"a": "{}"}).partition("\n")[2], "another key has it too"),
    ],
)
def test_what_is_wrong_in_a_file_of_keys_is_told_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        doors(AccessSection(keys=str(path)), Time())


def test_limits_are_told_with_when_to_try_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(lines(KEYS))
    asked = doors(AccessSection(keys=str(path)), Time())
    slow, one, free = visitor("slow"), visitor("one"), visitor("all")
    for who in (slow, one, free):
        asked.meet(who)
    assert asked.enter(free) is None
    asked.enter(slow)
    with pytest.raises(Limited, match=r"'slow' may ask 0\.001 requests/s") as refused:
        asked.enter(slow)
    assert 900 < (refused.value.retry_after_s or 0) <= 1000
    leave = asked.enter(one)
    with pytest.raises(Limited, match="'one' has 1 requests in flight"):
        asked.enter(one)
    assert leave is not None
    leave()
    assert asked.enter(one) is not None


# all of it, behind a gateway's listeners

INPUT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
TENSORS = {
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 1]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 1]}],
}
FAST = {**TENSORS, "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}]}


def configuration(path: Path, **access: Any) -> dict[str, Any]:
    path.write_text(lines(KEYS))
    return {
        "server": {"access": {"keys": str(path), **access}, "model_control": True, "status_page": True},
        "models": [{"name": "mine", **FAST}, {"name": "other", **FAST}],
    }


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateway.TestClient]:
    with gateway.TestClient(configuration(tmp_path_factory.mktemp("access") / "keys.yaml")) as client:
        yield client


def bearer(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {name}"}


M, N = "/v2/models/mine", "/v2/models/other"
# method and path -> who may ask it, of those below
REST = {
    ("GET", "/ping"): {None, "all", "mine", "old", "scraper", "watcher", "admin"},
    ("GET", "/v2/health/live"): {None, "all", "mine", "old", "scraper", "watcher", "admin"},
    ("GET", "/v2/health/ready"): {None, "all", "mine", "old", "scraper", "watcher", "admin"},
    ("GET", "/v2"): {"all", "mine", "admin"},
    ("GET", "/"): {"all", "admin"},
    ("GET", "/v2/models"): {"all", "admin"},
    ("GET", "/openapi.json"): {"all", "admin"},
    ("POST", "/v2/repository/index"): {"all", "admin"},
    ("GET", "/v2/models/stats"): {"all", "admin"},
    ("GET", M): {"all", "mine", "admin"},
    ("GET", f"{M}/ready"): {"all", "mine", "admin"},
    ("GET", f"{M}/config"): {"all", "mine", "admin"},
    ("GET", f"{M}/stats"): {"all", "mine", "admin"},
    ("POST", f"{M}/infer"): {"all", "mine", "admin"},
    ("GET", N): {"all", "admin"},
    ("GET", f"{N}/versions/1/stats"): {"all", "admin"},
    ("POST", f"{N}/infer"): {"all", "admin"},
    ("POST", f"{N}/versions/1/infer"): {"all", "admin"},
    ("GET", "/metrics"): {"scraper", "admin"},
    ("GET", "/v2/status"): {"watcher", "admin"},
    ("GET", f"{M}/route"): {"watcher", "admin"},
    ("GET", f"{M}/why"): {"watcher", "admin"},
    ("POST", "/v2/repository/models/mine/load"): {"admin"},
    ("GET", "/v2/systemsharedmemory/status"): {"admin"},
    ("POST", "/v2/systemsharedmemory/unregister"): {"admin"},
    ("POST", "/v2/systemsharedmemory/region/r/unregister"): {"admin"},
    ("GET", "/v2/cudasharedmemory/status"): {"admin"},
    ("GET", "/v1/models"): {"all", "admin"},
    ("GET", "/v1/models/mine"): {"all", "mine", "admin"},
    ("GET", "/v1/models/other/versions/1"): {"all", "admin"},
}


@pytest.mark.parametrize("asked", REST, ids=" ".join)
def test_each_path_is_for_whose_key_allows_it(client: gateway.TestClient, asked: tuple[str, str]) -> None:
    method, path = asked
    for name in (None, "all", "mine", "old", "scraper", "watcher", "admin"):
        answer = client.request(method, path, json=INPUT if path.endswith("infer") else None, headers=bearer(name))
        if name in REST[asked]:
            assert answer.status_code == 200, (name, answer.text)
        else:
            assert answer.status_code == (401 if name in (None, "old") else 403), (name, answer.text)
            assert answer.json()["error"]
            assert (answer.headers["WWW-Authenticate"] == "Bearer") == (answer.status_code == 401)


def test_invocations_are_for_whose_key_is_for_the_model(client: gateway.TestClient) -> None:
    for name, model, status in (
        ("mine", "mine", 200), ("mine", "other", 403), ("all", "other", 200), ("scraper", "mine", 403), (None, "mine", 401),
        ("mine", "", 400),
    ):  # fmt: skip
        target = {"X-Amzn-SageMaker-Target-Model": model} if model else {}
        answer = client.post("/invocations", json=INPUT, headers=bearer(name) | target)
        assert answer.status_code == status, (name, model, answer.text)
        assert model == "other" or "other" not in answer.text


def test_what_does_not_exist_names_no_model_to_whom_it_is_none_of_business(client: gateway.TestClient) -> None:
    for path in ("/v2/models/mine/versions/x", "/v2/models/nobody", "/nowhere", "/v2/models/mine/versions/9"):
        for name in (None, "mine"):
            answer = client.get(path, headers=bearer(name))
            assert answer.status_code in ((401,) if name is None else (403, 404)), answer.text
            assert "other" not in answer.text
    assert "other" in client.post("/v2/models/nobody/infer", json=INPUT, headers=bearer("all")).text


@pytest.mark.slow
def test_a_key_that_was_taken_out_is_refused_though_nobody_has_asked_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, read_again = tmp_path / "keys.yaml", threading.Event()
    caplog.set_level("INFO", "gateway.process.watched_files")
    caplog.handler.addFilter(lambda record: "read again" not in record.getMessage() or not read_again.set())
    with gateway.TestClient(configuration(path)) as client:
        assert client.post(f"{M}/infer", json=INPUT, headers=bearer("all")).status_code == 200
        path.write_text(lines({"mine": "{}"}))
        assert read_again.wait(30)
        assert client.post(f"{M}/infer", json=INPUT, headers=bearer("all")).status_code == 401


def test_a_key_may_come_in_a_header_of_its_own(client: gateway.TestClient) -> None:
    assert client.post(f"{M}/infer", json=INPUT, headers={"X-Api-Key": "mine"}).status_code == 200
    assert client.post(f"{M}/infer", json=INPUT, headers={"X-Api-Key": "nobody"}).status_code == 401


def test_who_asks_too_much_is_told_when_to_come_again(client: gateway.TestClient) -> None:
    answers = [client.post(f"{M}/infer", json=INPUT, headers=bearer("slow")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert 900 < int(answers[1].headers["Retry-After"]) <= 1000
    for _ in range(3):  # one after the other is one at a time
        assert client.post(f"{M}/infer", json=INPUT, headers=bearer("one")).status_code == 200
    for _ in range(3):  # so are those that fail
        assert client.post(f"{M}/infer", json={}, headers=bearer("one")).status_code == 400


def test_what_is_open_needs_no_key_and_the_rest_does(tmp_path: Path) -> None:
    config = configuration(tmp_path / "keys.yaml", open=["infer", "status"])
    with gateway.TestClient(config) as client:
        assert client.post(f"{M}/infer", json=INPUT).status_code == 200
        assert client.get("/v2/models").status_code == 200
        page = client.get("/", headers={"Accept": "text/html"})
        assert page.headers["Content-Type"].startswith("text/html")
        assert client.get("/v2/status").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.post("/v2/repository/models/mine/load").status_code == 401


@pytest.mark.parametrize(("opened", "trusts"), [((), False), (("status",), True)])
def test_on_loopback_what_is_open_is_guarded_from_pages_as_where_there_are_no_keys(opened: Any, trusts: bool) -> None:
    access = {"keys": "keys.yaml", "open": opened}
    for host, expected in ("127.0.0.1", trusts), ("0.0.0.0", False):
        assert ServerSection.model_validate({"host": host, "access": access}).trusts_all_here == expected


def metadata(name: str | None) -> tuple[tuple[str, str], ...]:
    return () if name is None else (("authorization", f"Bearer {name}"),)


def infer_request(model: str) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 1])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[bytes(4)])


EVERYBODY = {None, "all", "mine", "old", "scraper", "admin"}
GRPC = {
    "live": (lambda stub: stub.ServerLive, pb.ServerLiveRequest(), EVERYBODY),
    "ready": (lambda stub: stub.ServerReady, pb.ServerReadyRequest(), EVERYBODY),
    "server": (lambda stub: stub.ServerMetadata, pb.ServerMetadataRequest(), {"all", "mine", "admin"}),
    "mine": (lambda stub: stub.ModelMetadata, pb.ModelMetadataRequest(name="mine"), {"all", "mine", "admin"}),
    "other": (lambda stub: stub.ModelMetadata, pb.ModelMetadataRequest(name="other"), {"all", "admin"}),
    "other's configuration": (lambda stub: stub.ModelConfig, pb.ModelConfigRequest(name="other"), {"all", "admin"}),
    "statistics": (lambda stub: stub.ModelStatistics, pb.ModelStatisticsRequest(name="mine"), {"all", "mine", "admin"}),
    "all statistics": (lambda stub: stub.ModelStatistics, pb.ModelStatisticsRequest(), {"all", "admin"}),
    "index": (lambda stub: stub.RepositoryIndex, pb.RepositoryIndexRequest(), {"all", "admin"}),
    "load": (lambda stub: stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="mine"), {"admin"}),
    "regions": (lambda stub: stub.SystemSharedMemoryStatus, pb.SystemSharedMemoryStatusRequest(), {"admin"}),
    "infer mine": (lambda stub: stub.ModelInfer, infer_request("mine"), {"all", "mine", "admin"}),
    "infer other": (lambda stub: stub.ModelInfer, infer_request("other"), {"all", "admin"}),
}


@pytest.mark.parametrize("call", GRPC)
def test_each_call_is_for_whose_key_allows_it(client: gateway.TestClient, call: str) -> None:
    find, message, allowed = GRPC[call]
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    for name in (None, "all", "mine", "old", "scraper", "admin"):
        if name in allowed:
            find(stub)(message, metadata=metadata(name))
        else:
            with pytest.raises(grpc.RpcError) as refused:
                find(stub)(message, metadata=metadata(name))
            code = grpc.StatusCode.UNAUTHENTICATED if name in (None, "old") else grpc.StatusCode.PERMISSION_DENIED
            assert refused.value.code() is code, (name, refused.value.details())


OPEN_PATHS = {"/ping", "/execution-parameters", "/v2/health/live", "/v2/health/ready"}
OPEN_CALLS = {"ServerLive", "ServerReady", "Check", "Watch"}


def paths(client: gateway.TestClient) -> set[str]:
    """All that the listener has, in its tables and in its own description."""
    routes: Any = client._rest.handler.__self__  # type: ignore[attr-defined]  # it is a method of theirs
    found = {f"/v2/{path}".rstrip("/") for path in routes._server_actions}
    for of in ("mine", "mine/versions/1", "nobody"):
        found |= {f"/v2/models/{of}/{path}".rstrip("/") for path in routes._model_actions}
    found |= {f"/v2/repository/models/mine/{verb}" for verb in routes._control_actions}
    found |= {f"/v2/{kind}/region/r/{verb}" for kind, verbs in routes._region_actions.items() for verb in verbs}
    described = client.get("/openapi.json", headers=bearer("admin")).json()["paths"]
    found |= {re.sub(r"\{[^}]*\}", "mine", path) for path in described}
    return found | {"/openapi.json", "/metrics", "/v1/models", "/v1/models/", "/v1/models/mine:predict", "/nowhere", "/v2/x"}


def test_no_path_is_open_by_omission(client: gateway.TestClient) -> None:
    asked = paths(client)
    assert len(asked) > 60
    for path in sorted(asked - OPEN_PATHS):
        for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"):
            for key, statuses in ((None, {401}), ("old", {401}), ("scraper", {200, 405} if path == "/metrics" else {403, 404})):
                status = client.request(method, path, headers=bearer(key)).status_code
                if path == "/" and method not in ("GET", "HEAD"):  # where only those ask for anything
                    statuses = {405}
                assert status in statuses, (method, path, key, status)


def test_what_needs_no_key_is_told() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "security.md").read_text()
    (row,) = re.findall(r"^\| (.*) \| nothing \|$", text, re.MULTILINE)
    assert set(re.findall(r"`(/[^`]*)`", row)) == OPEN_PATHS


def test_no_call_is_open_by_omission(client: gateway.TestClient) -> None:
    calls = client._hosted.ingress.grpc_listener()._calls
    assert len(calls) > 20
    for path in map(bytes.decode, calls):
        ask = client.channel.stream_stream(path)
        if path.rpartition("/")[2] in OPEN_CALLS:
            continue
        for key, code in (
            (None, grpc.StatusCode.UNAUTHENTICATED),
            ("old", grpc.StatusCode.UNAUTHENTICATED),
            ("scraper", grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(iter([b""]), metadata=metadata(key)))
            assert refused.value.code() is code, (path, key)


def test_health_is_open_over_grpc(client: gateway.TestClient) -> None:
    assert health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest()).status


def test_each_request_of_a_stream_is_looked_at(client: gateway.TestClient) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    asked = (infer_request("mine"), infer_request("other"), infer_request("mine"), infer_request("nobody"))
    answers = list(stub.ModelStreamInfer(iter(asked), metadata=metadata("mine")))
    assert [bool(answer.error_message) for answer in answers] == [False, True, False, True]
    assert "not for model 'other'" in answers[1].error_message
    assert "not for model 'nobody'" in answers[3].error_message
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.ModelStreamInfer(iter(asked)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_limits_over_grpc_say_when_to_come_again(tmp_path: Path) -> None:
    with gateway.TestClient(configuration(tmp_path / "keys.yaml")) as client:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelInfer
        infer(infer_request("mine"), metadata=metadata("slow"))
        with pytest.raises(grpc.RpcError) as refused:
            infer(infer_request("mine"), metadata=metadata("slow"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 900 < float(dict(refused.value.trailing_metadata())["retry-after"]) <= 1000


def test_no_key_is_ever_logged(client: gateway.TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        for name in ("gwk_never-told", "mine"):
            client.post(f"{N}/infer", json=INPUT, headers=bearer(name))
    assert caplog.records
    assert "gwk_never-told" not in caplog.text


def test_who_has_left_is_no_longer_in_flight(tmp_path: Path) -> None:
    """So a key's requests are counted down however they end."""
    path = tmp_path / "keys.yaml"
    config = configuration(path)
    config["models"] += [{"name": "hangs", **TENSORS, "backends": [{"kind": "synthetic", "fixed_ms": 300, "row_ms": 0}]}]
    with gateway.TestClient(config) as client:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelInfer
        begun = infer.future(infer_request("hangs"), metadata=metadata("one"))
        with pytest.raises(grpc.RpcError) as refused:
            infer(infer_request("mine"), metadata=metadata("one"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        begun.cancel()
        infer(infer_request("hangs"), metadata=metadata("all"))  # behind the run that nobody waits for any more
        infer(infer_request("mine"), metadata=metadata("one"))


@pytest.mark.parametrize(
    "text",
    [
        "KEY: {models: [m]}",
        "keys: [KEY: {models: [m]}]",
        "keys: [{KEY: 1, KEY: 2}]",
        "keys: [*KEY]",
        "keys: [{name: a, hash: KEY, models: KEY, scopes: KEY}]",
        "keys: [{name: KEY, hash: 'sha256:0000000000000000000000000000000000000000000000000000000000000000'}]",
    ],
)
def test_no_key_is_told_wherever_it_stands(tmp_path: Path, text: str) -> None:
    key = "gwk_" + "Ab-_" * 10
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("KEY", key))
    with pytest.raises(ConfigError) as refused:
        Doors(AccessSection(keys=str(path)), {})
    assert "Ab-_" not in refused.value.message
