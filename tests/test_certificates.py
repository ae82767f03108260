"""Certificates that have expired, or are not valid yet: they are used, and that is told, counted and alerted on."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from gateway.config import TlsSection, parse_config
from gateway.configuring.check import check
from gateway.ingress import Ingress
from gateway.process.certificates import HTTP, Certificates
from gateway.process.x509 import certificates
from tests.certificates import Authority


def section(folder: Path, **more: str) -> TlsSection:
    return TlsSection(certificate=str(folder / "server.pem"), key=str(folder / "server.key"), **more)


@pytest.mark.parametrize("years", [1, 40], ids=["with a year of two digits", "of four"])  # from 2050 on
def test_a_certificate_is_read_as_others_read_it(tmp_path: Path, years: int) -> None:
    authority = Authority(tmp_path)
    path, _ = authority.issue("server", lasts=timedelta(days=365 * years))
    both = path.read_bytes() + authority.path.read_bytes()
    read = [(each.not_valid_before_utc, each.not_valid_after_utc) for each in x509.load_pem_x509_certificates(both)]
    assert [(each.begins, each.ends) for each in certificates(both)] == read
    assert (read[0][1].year >= 2050) == (years == 40)
    assert [each.names for each in certificates(both)] == [("localhost", "127.0.0.1"), ()]


def test_an_expired_certificate_is_told_at_start_and_when_it_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    path, _ = authority.issue("server", expired=True)
    now_ns = 0
    shown = Certificates(section(tmp_path), lambda: now_ns)
    before = shown.context(HTTP)
    assert isinstance(before, ssl.SSLContext)
    (told,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    on = f"{x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    assert told.startswith(f"server.tls.certificate: '{path}': it has expired, on {on}: clients refuse this server: put ")
    for expired, warnings in ((True, 2), (False, 2)):
        authority.issue("server", expired=expired)
        now_ns += 1_000_000_000
        assert shown.context(HTTP) is not before
        assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings


def test_each_of_a_file_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, old = Authority(tmp_path), Authority(tmp_path, "old")
    authority.issue("server")
    expired, _ = old.issue("of-before", expired=True)
    both = tmp_path / "both.pem"
    both.write_bytes(authority.path.read_bytes() + expired.read_bytes())
    expiry_s = Certificates(section(tmp_path, client_ca=str(both))).expiry_s()
    (told,) = caplog.messages
    assert f"server.tls.client_ca: '{both}': certificate 2 of it has expired" in told
    assert expiry_s["client_ca"] < datetime.now(UTC).timestamp() < expiry_s["certificate"]


def test_a_certificate_of_the_future_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Authority(tmp_path).issue("server")
    Certificates(section(tmp_path), wall_s=lambda: 0.0)
    (told,) = caplog.messages
    assert "it is not valid before 20" in told
    assert "is this machine's clock right?" in told


def test_what_cannot_be_read_keeps_nobody_from_starting(tmp_path: Path) -> None:
    """OpenSSL has taken the file, and may know more of it."""
    assert list(certificates(b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\nno more")) == []
    assert Authority(tmp_path).issue("server", host="x" * 60)
    path = tmp_path / "server.pem"
    path.write_text(path.read_text().replace("BEGIN CERTIFICATE", "BEGIN X509 CERTIFICATE").replace("END C", "END X509 C"))
    assert set(Certificates(section(tmp_path)).expiry_s()) == {"certificate"}


def test_gateway_check_tells_it_and_finds_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Authority(tmp_path).issue("server", expired=True)
    path = tmp_path / "gateway.yaml"
    tls = "{certificate: server.pem, key: server.key}"
    path.write_text(f"server: {{tls: {tls}}}\nmodels: [{{name: m, backends: [{{kind: synthetic}}]}}]\n")
    assert check(path).faults == ()
    assert "it has expired" in caplog.text


def test_when_they_expire_is_a_metric(tmp_path: Path) -> None:
    path, key = Authority(tmp_path).issue("server")
    ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    server = {"tls": {"certificate": str(path), "key": str(key)}, "http_port": 0, "grpc_port": None}
    config = parse_config({"server": server, "models": [{"name": "m", "backends": [{"kind": "synthetic"}]}]}, source="test")

    async def run() -> bytes:
        ingress = Ingress(config, run_dir=tmp_path)
        await ingress.start()
        try:
            return ingress.metrics.expose()[1]
        finally:
            await ingress.drain()

    lines = asyncio.run(run()).decode().splitlines()
    (line,) = (line for line in lines if line.startswith("gateway_certificate_expiry_timestamp_seconds{"))
    assert 'file="certificate"' in line
    assert float(line.rpartition(" ")[2]) == ends


def test_a_client_that_speaks_tls_to_ports_without_it_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def told() -> list[str]:
        server = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0}
        ingress = Ingress(
            parse_config({"server": server, "models": [{"name": "m", "backends": [{"kind": "synthetic"}]}]}, source="test"),
            run_dir=tmp_path,
        )
        ports = await ingress.start()
        caplog.set_level("INFO")
        for port in ports:
            for _ in range(20):
                with pytest.raises((OSError, ssl.SSLError)):
                    await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context())
        await ingress.drain()
        return [record.message for record in caplog.records if "this port speaks no TLS" in record.message]

    said = asyncio.run(told())
    assert sum("over grpc" in each for each in said) == sum("over rest" in each for each in said) == 10
