"""`gateway check` finds what the listeners would refuse at start."""

from pathlib import Path

import pytest

from gateway.configuring.check import check
from tests.certificates import Authority

MODELS = "models: [{name: m, backends: [{kind: synthetic}]}]"


def faults(folder: Path, server: str) -> list[tuple[str, str]]:
    path = folder / "gateway.yaml"
    path.write_text(f"server: {server}\n{MODELS}\n")
    return [(fault.path, fault.found) for fault in check(path).faults]


def test_certificates_are_looked_at(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server")
    authority.issue("another")
    assert faults(tmp_path, "{tls: {certificate: server.pem, key: server.key, client_ca: ca.pem}}") == []
    for keys, at, found in (
        ("certificate: absent.pem, key: server.key", "server.tls.certificate", "cannot be read"),
        ("certificate: server.pem, key: another.key", "server.tls.key", "it is not the key of the certificate in '"),
        (
            "certificate: server.pem, key: server.key, client_ca: server.key",
            "server.tls.client_ca",
            "server.key': it holds no cert",
        ),
    ):
        ((told_at, told),) = faults(tmp_path, f"{{tls: {{{keys}}}}}")
        assert told_at == at
        assert found in told


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "cannot be read"), ("keys: [{name: a, hash: gwk_the-key-itself}]", "keys[0].hash"), ("keys: []", "")],
)
def test_a_file_of_keys_is_looked_at(tmp_path: Path, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / "keys.yaml").write_text(text)
    told = faults(tmp_path, "{access: {keys: keys.yaml}}")
    assert [at for at, _ in told] == (["server.access.keys"] if found else [])
    assert all(found in words and "gwk_" not in words for _, words in told)


def test_keys_are_to_be_somewhere(tmp_path: Path) -> None:
    ((at, _found),) = faults(tmp_path, "{access: {}}")
    assert at == "server.access.keys"
