"""Makes the files that secure a run: an authority, certificates and tokens of each service, the password of Redis."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import string
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import ConfigError
from paceline.rpc.certificates import AUTHORITIES, CERTIFICATE, KEY
from paceline.rpc.tokens import COLLECTOR, READER, ROLES

AUTHORITY_KEY = "ca.key"
AUTHORITY_DAYS = 3650

SERVICES: dict[str, tuple[str, ...]] = {
    "replay": ROLES,
    "learner": ROLES,
    "relay": ROLES,
    "collector": (COLLECTOR,),
    "evaluator": (READER,),
    "redis": (),
}
"""Each service that gets a certificate, and the tokens that it needs: servers those of all roles, to compare with."""

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from so long ago, for hosts whose clocks are late."""

_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._*")

_REDIS_COMMANDS = (
    "+ping +info +time +select +multi +exec +get +set +unlink +strlen +rename +hget +hset +hsetnx +hdel +hgetall +hlen "
    "+hincrby +hscan +xadd +xtrim +xrange +xlen +mget +eval +evalsha +scan +config|get"
)
"""What `replay.link` documents."""


def issue(folder: Path, *, hosts: Sequence[str] = (), days: int, renew: bool = False) -> list[str]:
    """Make what is missing in `folder`, and say what was made, a line each.

    Args:
        hosts: further names or addresses that every certificate is good for.
        days: how long new certificates are valid, though never longer than their authority.
        renew: make the certificates of the services anew, keys included, even where they are there.

    Raises:
        ConfigError: a host is neither a name nor an address, or the authority there is damaged or has expired.
    """
    made: list[str] = []
    names = [_general_name(host) for host in hosts]
    authority, key = _open_authority(folder / "ca", made)
    tokens: dict[str, str] = {}
    for service, roles in SERVICES.items():
        place = folder / service
        _make_folder(place)
        is_whole = all((place / name).exists() for name in (CERTIFICATE, KEY, AUTHORITIES))
        if renew or not is_whole:
            _issue_certificate(place, service, authority, key, names, days)
            made.append(f"{place}: certificate for {', '.join([service, f'*.{service}', *_LOCAL_HOSTS, *hosts])}")
        if roles:
            _make_folder(place / "tokens")
        for role in roles:
            path = place / "tokens" / role
            if not path.exists():
                token = tokens.get(role) or _find_token(folder, role) or secrets.token_urlsafe(32)
                tokens[role] = token
                _write(path, f"{token}\n".encode(), secret=True)
                made.append(f"{path}: token")
    password = folder / "redis" / "password"
    if not password.exists():
        _write(password, f"{secrets.token_urlsafe(32)}\n".encode(), secret=True)
        made.append(f"{password}: password of Redis")
    rules = _redis_rules(password.read_text(encoding="ascii").strip())
    path = folder / "redis" / "users.acl"
    if not path.exists() or path.read_text(encoding="ascii") != rules:
        # Only a hash of the password, which is too long to be guessed: Redis may run as another user.
        _write(path, rules.encode(), secret=False)
        made.append(f"{path}: what Redis lets that password do")
    return made or [f"{folder}: everything is there already; --renew makes new certificates"]


def _open_authority(folder: Path, made: list[str]) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_path, key_path = folder / AUTHORITIES, folder / AUTHORITY_KEY
    if not certificate_path.exists() and not key_path.exists():
        _make_folder(folder)
        key, name = ec.generate_private_key(ec.SECP256R1()), _name("Paceline development CA")
        certificate = (
            _builder(name, name, key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(key_path, _key_bytes(key), secret=True)
        _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), secret=False)
        made.append(f"{folder}: certificate authority; keep {AUTHORITY_KEY} to yourself")
        return certificate, key
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = _as_curve_key(serialization.load_pem_private_key(key_path.read_bytes(), None))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder} is no certificate authority of `paceline certs`: {error}; expected {AUTHORITIES} and "
            f"{AUTHORITY_KEY} of one pair; choose another folder, or remove it to begin anew"
        ) from error
    if certificate.public_key() != key.public_key() or certificate.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(
            f"the authority in {folder} has expired, or its two files are no pair: expected {AUTHORITIES} and "
            f"{AUTHORITY_KEY} as they were made together; remove the folder and all certificates to begin anew"
        )
    return certificate, key


def _issue_certificate(
    folder: Path,
    service: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[x509.GeneralName],
    days: int,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(service), x509.DNSName(f"*.{service}"), *map(_general_name, _LOCAL_HOSTS), *hosts]
    builder = _builder(_name(f"paceline {service}"), authority.subject, key, days, authority.not_valid_after_utc)
    certificate = (
        builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _write(folder / AUTHORITIES, authority.public_bytes(serialization.Encoding.PEM), secret=False)
    _write(folder / KEY, _key_bytes(key), secret=True)
    _write(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), secret=False)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _redis_rules(password: str) -> str:
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default on #{digest} resetchannels ~paceline:* {_REDIS_COMMANDS}\n"


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or host.strip(".") != host or not set(host) <= _NAME_CHARACTERS:
            raise ValueError("not a host name")
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"--host {host!r}: expected a host name, such as replay.example.org or *.example.org, or an IP address"
        ) from error


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _as_curve_key(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"its key is a {type(key).__name__}")
    return key


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _find_token(folder: Path, role: str) -> str | None:
    """A token of this role that a service has already."""
    for service in SERVICES:
        path = folder / service / "tokens" / role
        if path.exists():
            return path.read_text(encoding="ascii").strip()
    return None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; expected a folder that this user may write"
        ) from error


def _write(path: Path, data: bytes, *, secret: bool) -> None:
    """Replace a file at once, so that a service that watches it never reads half of one."""
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; expected a folder that this user may write"
        ) from error
