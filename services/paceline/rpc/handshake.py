"""Why client and server do not agree on TLS, in words: gRPC itself says no more than that a socket was closed.

Found out by a handshake of one's own, after a call has failed and never before one.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from paceline.rpc.certificates import AUTHORITIES, CERTIFICATE, KEY

PROBE_SECONDS = 2.0
"""Each step of a probe ends by then."""


_REFUSED_OURS = ("ALERT", "CERTIFICATE_REQUIRED")


def explain(address: str, folder: Path | None) -> str | None:
    """Why no connection to `address` comes about; None where TLS is not the reason, or where it works now.

    Args:
        folder: the certificates of the client; None: it speaks without TLS.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), PROBE_SECONDS) as connection:
            connection.settimeout(PROBE_SECONDS)
            return (
                _explain_plain(address, connection) if folder is None else _explain(address, host, connection, folder)
            )
    except OSError:
        return None  # nobody listens there, or answers


def _explain_plain(address: str, connection: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connection).close()
    except OSError:
        return None
    return (
        f"the server at {address} speaks TLS and this client does not: set security.certificates to a folder with "
        f"{AUTHORITIES}, {CERTIFICATE} and {KEY}"
    )


def _explain(address: str, host: str, connection: socket.socket, folder: Path) -> str | None:
    own = folder / CERTIFICATE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(folder / AUTHORITIES)
    if own.exists():
        context.load_cert_chain(own, folder / KEY)
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            # What the server thinks of our certificate comes after the handshake.
            if secured.recv(1):
                return None
            problem = ""
    except ssl.SSLCertVerificationError as error:
        return _explain_theirs(address, error, folder / AUTHORITIES)
    except ssl.SSLError as error:
        if not any(word in str(error).upper() for word in _REFUSED_OURS):
            return (
                f"the server at {address} does not speak TLS ({error.reason}) and this client does: set "
                "security.certificates at the server, or nowhere"
            )
        problem = f" ({error.reason})"
    except TimeoutError:
        return None
    except ConnectionError:
        problem = ""
    if own.exists():
        return (
            f"the server at {address} refuses our certificate {own}{problem}: expected one that is valid now and "
            f"signed by a certificate of the server's {AUTHORITIES}"
        )
    return (
        f"the server at {address} wants a certificate of each client{problem}, and there is no {own}: put the "
        f"client's {CERTIFICATE} and {KEY} there, or set security.client_certificates=false at the server"
    )


def _explain_theirs(address: str, error: ssl.SSLCertVerificationError, authorities: Path) -> str:
    start = f"the certificate of the server at {address}"
    match error.verify_code:
        case 10:
            return f"{start} has expired: renew {CERTIFICATE} at the server (`paceline certs --renew`)"
        case 9:
            return f"{start} is not valid yet: set the clocks of both machines, or renew {CERTIFICATE} at the server"
        case 62 | 64:
            return (
                f"{start} is for another name: expected the one in its address; issue it with that name "
                "(`paceline certs FOLDER --renew --host NAME`)"
            )
    return (
        f"{start} is signed by none of {authorities} ({error.verify_message}): expected the {AUTHORITIES} of the "
        "authority that signed it, the same for the whole run"
    )
