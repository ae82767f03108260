"""The parts of benchmarks/sagemaker.py that judge: what it reads, counts and compares."""

import socket
import threading

import pytest

from benchmarks.sagemaker import Figure, asking, logged, medians, pins, ratio, received, replaced

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def figure(server: str, rps: float, p99_ms: float = 1.0, errors: int = 0) -> Figure:
    return Figure("linear", server, "instances", 64, 10, rps, 0.5, p99_ms, errors, 100.0)


def test_every_request_of_a_load_counts_whatever_its_status() -> None:
    lines = "1000\t200\t1000\n1500\t503\t2500\n2000\t-1\t2000\n"
    took_s, (p50, p99), errors = logged(lines, 3)
    assert (took_s, p50, errors) == (0.003, 2.0, 2)
    assert p99 == pytest.approx(2.49)
    with pytest.raises(SystemExit, match="of 3 requests, sent 4"):
        logged(lines, 4)


def test_bytes_of_bodies_are_those_that_h2load_tells() -> None:
    text = "status codes: 0 2xx\ntraffic: 1.34KB (1372) total, 876B (876) headers (space savings 0.00%), 316B (316) data\n"
    assert received(text) == 316
    with pytest.raises(SystemExit, match="tells no bytes"):
        received("status codes: 0 2xx\n")


def test_medians_and_ratios_are_of_rounds() -> None:
    figures = [figure("gateway", rps, errors=1) for rps in (600.0, 800.0, 100.0)]
    figures += [figure("aws", rps) for rps in (10.0, 10.0, 10.0)]
    ours, theirs = ("linear", "gateway", "instances", 64), ("linear", "aws", "instances", 64)
    found = medians(figures)
    assert (found[ours].rps, found[ours].errors, found[ours].requests) == (600.0, 3, 30)
    assert ratio(figures, ours, theirs, "rps") == 60.0


def test_the_peer_is_what_was_read_or_the_run_ends() -> None:
    pinned = ["awscli==1", "ray[serve]==2", "fastapi==3", "httpx==4", "uvicorn[standard]==5", "boto3==6", "pyyaml==7"]
    assert pins(pinned) == pinned[1:]
    with pytest.raises(SystemExit, match="expected each of"):
        pins(pinned[:-1])
    assert replaced("port=8080 port=8080", {"8080": "1"}) == "port=1 port=1"
    with pytest.raises(SystemExit, match="has no '9090'"):
        replaced("port=8080", {"9090": "1"})


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([OK, OK.replace(b"200", b"503"), b""], {"answered": 2, "other": 1, "lost": 1}),
        ([OK, OK[:-1]], {"answered": 1, "other": 0, "lost": 1}),
        ([OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")], {"answered": 1, "other": 0}),
    ],
)
def test_a_request_that_was_sent_and_not_answered_is_lost(answers: list[bytes], expected: dict[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as sent:
                for answer in answers:
                    while sent.readline().strip():
                        pass
                    sent.read(2)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        assert asking(port, b"[]", threading.Semaphore(0)) == expected
        server.join()
    assert asking(port, b"[]", threading.Semaphore(0)) is None
