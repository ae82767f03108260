"""Requests signed as botocore signs them, sent by the generator's own client to an endpoint that checks each of them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from botocore.credentials import RefreshableCredentials

from gateway.process.credentials import Credentials
from loadtest.cli import main
from loadtest.errors import ExitCode, TargetError, UsageError
from loadtest.lab.answers import answers_of
from loadtest.load.aws_keys import AwsKeys
from loadtest.load.payloads import read_requests
from loadtest.load.signing import Keys, SignedRequests, refusal, signed_headers
from loadtest.load.target import Address
from loadtest.measuring.asked import check
from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, SloSpec
from tests.certificates import Authority
from tests.loadtest.fake_endpoint import ACCESS_KEY, REGION, SECRET_KEY

OWN = Keys(ACCESS_KEY, SECRET_KEY)
SESSION = Keys("ASIAEXAMPLE", SECRET_KEY, "token+/=")
REQUEST = b"POST /endpoints/e/invocations HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def head_of(request: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    opening, *lines = head.decode("latin-1").split("\r\n")
    return opening, dict(line.split(": ", 1) for line in lines), body


def by_botocore(request: bytes, keys: Keys, at: float) -> dict[str, str]:
    """The headers that botocore would send, of a request as it is before it is signed."""
    opening, headers, body = head_of(request)
    _, target, _ = opening.split(" ")
    sent = {name: value for name, value in headers.items() if name != "Content-Length"}  # botocore has none yet
    asked = AWSRequest("POST", f"https://{headers['Host']}{target}", headers=sent, data=body)
    asked.context["timestamp"] = datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")
    signer = SigV4Auth(BotoCredentials(keys.access_key, keys.secret_key, keys.token or None), "sagemaker", REGION)
    signer._modify_request_before_signing(asked)
    text = signer.string_to_sign(asked, signer.canonical_request(asked))
    signer._inject_signature_to_request(asked, signer.signature(text, asked))
    return dict(asked.headers.items())


@pytest.mark.parametrize("keys", [OWN, SESSION])
@pytest.mark.parametrize("at", [0.0, 1_900_000_000.9, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()])
@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST,
        REQUEST.replace(b"Host: h", b"Host: 127.0.0.1:8443"),
        REQUEST.replace(b"/invocations", b"/invocations?b=2&a=%20&a=1"),
        REQUEST.replace(b"/e/", b"/a%20b~c/%C3%BC/"),
        REQUEST.replace(b"/invocations", b"/invocations/"),
        REQUEST.replace(b"Host: h", b"Host: h\r\nX-Amzn-SageMaker-Custom-Attributes: a=1,   b=2\r\nAccept: */*"),
        REQUEST.replace(b"Host: h", b"Host: h\r\nUser-Agent: x\r\nConnection: keep-alive"),
        REQUEST.replace(b"{}", bytes(range(256))),
        REQUEST.replace(b"{}", b""),
    ],
)
def test_the_bytes_are_those_that_botocore_would_send(request_bytes: bytes, at: float, keys: Keys) -> None:
    made = SignedRequests([request_bytes], REGION, lambda: keys, clock=lambda: at)[0]
    opening, headers, body = head_of(made)
    before, own, sent = head_of(request_bytes)
    assert (opening, body) == (before, sent)
    assert {name: headers[name] for name in own} == own
    judged = by_botocore(request_bytes.replace(b"\r\nConnection: keep-alive", b""), keys, at)
    assert {name: headers[name] for name in judged} == judged


def test_each_request_is_signed_with_the_time_and_the_keys_of_the_moment_at_which_it_is_asked_for() -> None:
    now, keys = 1_900_000_000.0, OWN
    requests = SignedRequests([REQUEST, REQUEST + b" "], REGION, lambda: keys, clock=lambda: now)
    for later, own in ((0, OWN), (0.5, OWN), (86_400, OWN), (86_400, SESSION), (86_401, OWN)):
        now, keys = 1_900_000_000.0 + later, own
        assert head_of(requests[0])[1]["Authorization"] == by_botocore(REQUEST, keys, now)["Authorization"]
    assert requests[0] == requests[0]
    assert requests[0:2] == [requests[0], requests[1]]
    assert len(requests) == 2


def test_headers_for_another_client_are_signed_alike() -> None:
    headers = {"Host": "h", "Content-Type": "application/json"}
    found = signed_headers("/endpoints/e/invocations", headers, b"{}", REGION, SESSION)
    stamp = datetime.strptime(found["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert found == by_botocore(REQUEST, SESSION, stamp.timestamp())


def test_no_secret_is_shown() -> None:
    assert SECRET_KEY not in repr(SESSION)
    assert "token" not in repr(SESSION).replace("token=", "")


# What is not let in.


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            '{"message":"Signature expired: 20261124T040000Z is now earlier than 20261124T041000Z '
            '(20261124T041500Z - 5 min.)"}',
            "403: this machine's clock is 0:15:00 behind AWS's, which takes 5 minutes: set it by NTP (Signature expired: ",
        ),
        (
            '{"message":"Signature not yet current: 20261124T043000Z is still later than 20261124T042000Z '
            '(20261124T041500Z + 5 min.)"}',
            "403: this machine's clock is 0:15:00 ahead of AWS's, which takes 5 minutes: set it by NTP (",
        ),
        (
            '{"message":"The security token included in the request is expired"}',
            "403: the session's credentials have expired, and no new ones were to be had: log in again (",
        ),
        ('{"message":"The request signature we calculated does not match"}', "403: AWS computes another signature: "),
        (
            '{"Message":"User x is not authorized to perform"}',
            "403: AWS does not let these credentials in: they need sagemaker:In",
        ),
        ("no JSON", "403: AWS does not let these credentials in: they need sagemaker:InvokeEndpoint (no JSON)"),
    ],
)
def test_a_refusal_says_what_to_do(answer: str, told: str) -> None:
    assert refusal(403, answer).startswith(told)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"sigv4": "Frankfurt"}, "--sigv4 'Frankfurt': expected a region of AWS, such as us-east-1"),
        (
            {"protocol": "rest-json"},
            "by rest-json: expected https://runtime.sagemaker.us-east-1.amazonaws.com/endpoints/NAME/invo",
        ),
        ({"target": "http://h/invocations"}, "--sigv4: 'http://h/invocations' by invocations: expected https://"),
        ({"headers": (("authorization", "x"),)}, "--header 'authorization': --sigv4 signs each request with its own: leave"),
        ({"headers": (("X-Amz-Date", "x"),)}, "--header 'X-Amz-Date': --sigv4 signs"),
        ({"headers": (("X-Amz-Security-Token", "x"),)}, "--header 'X-Amz-Security-Token': --sigv4 signs"),
        ({"payloads": ()}, "--sigv4: an endpoint does not tell what its model takes: give requests with --payload"),
    ],
)
def test_what_cannot_be_signed_is_told_before_anything_is_sent(keys: dict[str, Any], told: str) -> None:
    fine: dict[str, Any] = {"target": "https://h/invocations", "protocol": "invocations", "payloads": ("p",), "sigv4": REGION}
    check(LoadSpec(**fine))
    with pytest.raises(UsageError) as raised:
        check(LoadSpec(**(fine | keys)))
    assert told in str(raised.value)


def test_a_gateways_key_is_no_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    spec = LoadSpec("https://h/invocations", protocol="invocations", payloads=("p",), sigv4=REGION)
    assert Address.of(spec, Credentials(api_key="k")).headers(spec, {"Host": "h"}) == {"Host": "h"}
    options = ["--protocol", "invocations", "--payload", __file__, "--sigv4", REGION, "--api-key-file", __file__]
    assert main(["run", "https://127.0.0.1:1/invocations", *options]) == ExitCode.USAGE
    assert "--api-key-file: --sigv4 signs each request instead: leave one of them out" in capsys.readouterr().err


# Keys that end.


def session_of(number: list[int]) -> RefreshableCredentials:
    """Ends in a minute, and is therefore renewed whenever it is looked at."""

    def metadata() -> dict[str, str]:
        number[0] += 1
        until = datetime.now(UTC) + timedelta(minutes=1)
        return {"access_key": "ASIA", "secret_key": SECRET_KEY, "token": f"t{number[0]}", "expiry_time": until.isoformat()}

    return RefreshableCredentials.create_from_metadata(metadata(), metadata, "test")


def test_a_sessions_keys_are_renewed_before_they_end_and_the_next_request_is_signed_with_the_new_ones() -> None:
    keys = AwsKeys(session_of([0]))
    assert keys.ends
    requests = SignedRequests([REQUEST], REGION, keys.current)
    first = head_of(requests[0])[1]["X-Amz-Security-Token"]

    async def until_renewed() -> None:
        keeping = asyncio.create_task(keys.keep(period_s=0.01))
        async with asyncio.timeout(5):
            while head_of(requests[0])[1]["X-Amz-Security-Token"] == first:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        keeping.cancel()

    asyncio.run(until_renewed())


def test_keys_that_cannot_be_renewed_stay_and_that_is_told() -> None:
    class Broken:
        refresh_needed = True
        asked = 0

        def get_frozen_credentials(self) -> Any:
            self.asked += 1
            if self.asked > 1:
                raise OSError("the identity provider is down")
            return BotoCredentials("A", "S", "T").get_frozen_credentials()

    keys, told = AwsKeys(Broken()), list[str]()

    async def until_told() -> None:
        keeping = asyncio.create_task(keys.keep(period_s=0.01, told=told.append))
        async with asyncio.timeout(5):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        keeping.cancel()

    asyncio.run(until_told())
    assert told[0] == "the identity provider is down"
    assert keys.current() == Keys("A", "S", "T")


def test_without_credentials_it_says_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="no AWS credentials were found: set AWS_PROFILE, or log in with `aws configure`"):
        AwsKeys.find()


# Against an endpoint that checks.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    return (authority.path, *authority.issue("server"))


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@contextmanager
def endpoint(files: tuple[Path, Path, Path], seen: dict[str, Any], **told: Any) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.loadtest.fake_endpoint", str(files[1]), str(files[2]), json.dumps(told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"https://127.0.0.1:{int(process.stdout.readline())}/endpoints/e/invocations"
        finally:
            process.stdin.close()
            seen.update(json.loads(process.stdout.readline()))


@pytest.fixture
def sent(files: tuple[Path, Path, Path], credentials: None, tmp_path: Path) -> Callable[..., RunResult]:
    """Sends a short run to an endpoint of its own. seen: gets what that saw. Other keys: of LoadSpec."""
    payload = tmp_path / "requests.jsonl"
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1]}]}
    payload.write_text("".join(json.dumps(document | {"id": str(number)}) + "\n" for number in range(5)))

    def send(told: dict[str, Any], seen: dict[str, Any] | None = None, **keys: Any) -> RunResult:
        with endpoint(files, {} if seen is None else seen, **told) as url:
            fine: dict[str, Any] = {"protocol": "invocations", "payloads": (str(payload),), "sigv4": REGION, "connections": 8}
            fine["warmup_s"] = 0.0  # all requests count
            spec = LoadSpec(url, **(fine | {"rate_rps": 200.0, "duration_s": 0.5, "timeout_s": 2.0} | keys))
            return uvloop.run(measure(spec, shown=Credentials(ca=str(files[0]))))

    return send


@pytest.mark.slow
def test_every_request_of_a_run_is_signed_right_and_shortly_before_it_is_sent(sent: Callable[..., RunResult]) -> None:
    seen: dict[str, Any] = {}
    result = sent({}, seen, duration_s=1.5)
    assert result.errors == {}
    assert result.succeeded == 300
    assert seen["seen"]["right"] == 300
    assert set(seen["ages"]) <= {"0", "1"}  # whole seconds between signature and arrival
    assert seen["seen"]["computed"] >= 2  # in each second anew


@pytest.mark.slow
def test_what_the_platform_answers_instead_is_counted_by_its_status_with_its_words(sent: Callable[..., RunResult]) -> None:
    others = [400, 424, 429, 503, 530]
    result = sent({"statuses": [200, *others, 200, 200, 200, 200], "delay_ms": 1})
    assert result.errors == {f"http {status}": 10 for status in others}  # of 100 in all
    assert result.succeeded == 50
    assert "Rate exceeded" in result.error_samples["http 400"]
    assert "CLIENT_ERROR_FROM_MODEL" in result.error_samples["http 424"]
    assert "not ready" in result.error_samples["http 429"]


@pytest.mark.slow
def test_a_clock_that_is_wrong_is_told_with_how_much(sent: Callable[..., RunResult]) -> None:
    with pytest.raises(TargetError, match=r"403: this machine's clock is 0:1[45]:\d\d behind AWS's, which takes 5 minutes"):
        sent({"skew_s": 900})


@pytest.mark.slow
def test_a_session_that_has_ended_is_told(sent: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "old")
    with pytest.raises(TargetError, match="403: the session's credentials have expired"):
        sent({"tokens": ["new"]})
    assert sent({"tokens": ["old"]}).errors == {}


@pytest.mark.slow
def test_more_than_can_be_signed_and_sent_makes_the_run_invalid(sent: Callable[..., RunResult]) -> None:
    result = sent({}, rate_rps=2_000_000.0, duration_s=0.1, slo=SloSpec.parse("p99<50ms"), timeout_s=0.5)
    assert not result.valid
    assert result.verdict is None


@pytest.mark.slow
def test_answers_to_compare_are_asked_with_signatures_too(
    files: tuple[Path, Path, Path], credentials: None, tmp_path: Path
) -> None:
    payload = tmp_path / "one.json"
    payload.write_text('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}')
    with endpoint(files, {}) as url:
        spec = LoadSpec(url, protocol="invocations", payloads=(str(payload),), sigv4=REGION)
        address = Address.of(spec, Credentials(ca=str(files[0])))
        found = answers_of(spec, address, "m", read_requests([str(payload)]), seconds=5, stop=threading.Event())
    assert found[0] is not None
    assert found[0]["y"].tolist() == [[0.0]]
