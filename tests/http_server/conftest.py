import pytest

from gateway.config import TlsSection
from gateway.process.certificates import Certificates
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificates(authority: Authority) -> Certificates:
    certificate, key = authority.issue("server")
    return Certificates(TlsSection(certificate=str(certificate), key=str(key)))
