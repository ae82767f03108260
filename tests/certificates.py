"""Authorities and certificates for tests, made when they are asked for: no private key is kept."""

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; writes them, and its own, into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        built = _builder(self._name, self._name, self._key).add_extension(constraints, critical=True)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        built = built.add_extension(usage, critical=True).add_extension(own, critical=False)
        certificate = built.sign(self._key, hashes.SHA256())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, client: bool = False, expired: bool = False, lasts: datetime.timedelta = _DAY, host: str = ""
    ) -> tuple[Path, Path]:
        """The files of a certificate and its key. client: it is a client's, else the server's, for a host; "": this one."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        this = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names = x509.SubjectAlternativeName([x509.DNSName(host)] if host else this)
        builder = _builder(_name(name), self._name, key, until=-_DAY / 2 if expired else lasts)
        built = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())  # later Pythons ask for it
        built = built.add_extension(names, critical=False).add_extension(signer, critical=False)
        certificate = built.sign(self._key, hashes.SHA256())
        paths = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        for path, content in zip(paths, (certificate.public_bytes(serialization.Encoding.PEM), private), strict=True):
            draft = path.with_suffix(".draft")  # as whoever renews one does
            draft.write_bytes(content)
            draft.replace(path)
        return paths

    def trusted(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Of a client that trusts it. shown: the client's own certificate and key."""
        context = ssl.create_default_context(cafile=str(self.path))
        if shown is not None:
            context.load_cert_chain(*shown)
        return context


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, until: datetime.timedelta = _DAY) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now - _DAY).not_valid_after(now + until)
