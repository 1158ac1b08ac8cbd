"""Who can reach an address: without TLS and tokens, only this machine may."""

from __future__ import annotations

import ipaddress

from paceline.config import SecurityConfig
from paceline.errors import ConfigError
from paceline.telemetry import get_logger


def is_loopback(address: str) -> bool:
    """Whether "host:port" is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_safe_server(listen: str, security: SecurityConfig) -> None:
    """Refuse to listen to other machines without TLS and tokens; say so once where either is off.

    Raises:
        ConfigError: names the address and what is missing.
    """
    missing = _missing(security)
    if not missing:
        return
    if not is_loopback(listen) and not security.allow_insecure:
        raise ConfigError(
            f"listen address {listen} is open to other machines, and {' and '.join(missing)} not set: expected TLS and "
            "tokens, or a loopback address such as 127.0.0.1:50051; make both by `paceline certs FOLDER`, or, in a "
            "network where every peer is trusted, set security.allow_insecure=true"
        )
    get_logger().warning(
        "security_off",
        listen=listen,
        reason=f"{' and '.join(missing)} not set",
        meaning="any process of this machine is admitted"
        if is_loopback(listen)
        else "ANY PEER OF THE NETWORK IS ADMITTED",
    )


def require_safe_client(address: str, security: SecurityConfig) -> None:
    """Refuse to send a token over a network without TLS. Raises ConfigError."""
    unsafe = security.tokens is not None and security.certificates is None and not is_loopback(address)
    if unsafe and not security.allow_insecure:
        raise ConfigError(
            f"security.tokens is set and security.certificates is not: a token would go to {address} for everybody to "
            "read; expected both, or security.allow_insecure=true"
        )


def _missing(security: SecurityConfig) -> list[str]:
    names = ("certificates", "tokens")
    return [f"security.{name}" for name in names if getattr(security, name) is None]
