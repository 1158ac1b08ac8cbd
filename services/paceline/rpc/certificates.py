"""Certificates of a service: read from files, judged before a peer has to, and read again when they are renewed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from paceline.errors import ConfigError
from paceline.rpc.watched import Contents, WatchedFiles

CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
"""Files of a folder of certificates, named as in a Kubernetes TLS secret."""

_MEND = "`paceline certs FOLDER` makes such folders, `--renew` renews their certificates"


@dataclass(frozen=True)
class Certificates:
    """What one side of a TLS connection has."""

    authorities: bytes
    """PEM of the certificates that sign those of peers."""
    chain: bytes | None
    """PEM of its own certificate and of what leads to the authority; None: it shows none."""
    key: bytes | None
    """PEM of the private key of that."""


class CertificateFolder:
    """The certificates of a folder, as they are now."""

    def __init__(self, folder: Path, *, needs_own: bool) -> None:
        """`needs_own`: a certificate of its own must be there; otherwise it may be. Raises ConfigError."""
        self.path, self._needs_own = folder, needs_own
        self._files = WatchedFiles(folder, (CERTIFICATE, KEY, AUTHORITIES), self._judge)

    def current(self) -> Certificates:
        """The certificates of now; the very same object as long as the files are the same."""
        return self._files.current()

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """What a server serves TLS with; each handshake uses the files as they are then."""
        used = self.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            newest = self.current()
            if newest is used:
                return None
            used = newest
            return configure(newest)

        def configure(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(certificates.key, certificates.chain)], certificates.authorities if client_certificates else None
            )

        return grpc.dynamic_ssl_server_credentials(configure(used), fetch, client_certificates)

    def _judge(self, contents: Contents) -> Certificates:
        required = {AUTHORITIES, CERTIFICATE, KEY} if self._needs_own or CERTIFICATE in contents else {AUTHORITIES}
        if missing := sorted(required - contents.keys()):
            raise ConfigError(
                f"{self.path} has no {', '.join(missing)}: expected {', '.join(sorted(required))}; {_MEND}"
            )
        self._load(AUTHORITIES, contents)
        if CERTIFICATE not in contents:
            return Certificates(contents[AUTHORITIES], None, None)
        own = self._load(CERTIFICATE, contents)[0]
        try:
            key = load_pem_private_key(contents[KEY], None)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path / KEY} is no private key: expected a PEM file without a passphrase; {_MEND}"
            ) from error
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
            raise ConfigError(
                f"{self.path / KEY} is not the key of {CERTIFICATE} beside it: expected the two of one pair"
            )
        if own.not_valid_after_utc <= datetime.now(UTC):
            raise ConfigError(
                f"{self.path / CERTIFICATE} expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: expected one that "
                f"is valid now; {_MEND}"
            )
        return Certificates(contents[AUTHORITIES], contents[CERTIFICATE], contents[KEY])

    def _load(self, name: str, contents: Contents) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(contents[name])
        except ValueError as error:
            raise ConfigError(f"{self.path / name} is no certificate: {error}; expected a PEM file; {_MEND}") from error
