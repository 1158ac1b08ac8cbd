"""Servers, the same in every service: own port, TLS, tokens, limits, health, reflection, drain.

`Server` is a thread pool, for a service that moves bulk (one event loop starves appends beside a sampler);
`AioServer` is an event loop, for one that holds many waiting polls.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.config import RpcConfig, SecurityConfig
from paceline.errors import PortTakenError
from paceline.rpc.access import Access
from paceline.rpc.certificates import CertificateFolder
from paceline.rpc.exposure import require_safe_server
from paceline.rpc.interceptors import AioInterceptor, ThreadPoolInterceptor
from paceline.rpc.limits import PeerLimits

SHORT_CALL_THREADS = 16
"""Threads beyond the admitted streams: short calls and health always find one."""

LOOPBACK_ONLY = SecurityConfig()
"""No TLS and no tokens, so that a server listens to its own machine alone."""


class Register(Protocol):
    """Adds servicers to a server: `add_ReplayServiceServicer_to_server`, bound to its servicer, or the like."""

    def __call__(self, server: Any) -> None:
        """Add the servicer to `server`."""


def server_options(config: RpcConfig) -> list[tuple[str, int]]:
    """Server options that agree with `client.channel_options` of the same configuration."""
    return [
        # A port is owned, never shared: two learners on one port would take turns answering.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", round(config.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Half of what the clients use, so that a late ping of theirs is never taken for abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", round(config.keepalive_seconds * 500)),
        ("grpc.max_connection_age_ms", round(config.connection_seconds * 1000)),
        # No call or stream of rows lives longer than that; a snapshot that does is fetched on a connection of its own.
        ("grpc.max_connection_age_grace_ms", round((config.stream_seconds + config.deadline_seconds) * 1000)),
        # Who connects and says nothing holds a place for so long.
        ("grpc.server_handshake_timeout_ms", round(config.deadline_seconds * 1000)),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
    ]


class Server:
    """A thread-pool server. Health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        listen: str,
        config: RpcConfig,
        *,
        services: Sequence[str],
        register: Sequence[Register],
        max_streams: int,
        handlers: Sequence[grpc.GenericRpcHandler] = (),
        security: SecurityConfig = LOOPBACK_ONLY,
    ) -> None:
        """Bind `listen` ("host:port"; port 0 takes any free one).

        Args:
            services: full names, for health and reflection.
            register: one for each servicer.
            max_streams: streams served at once; more get RESOURCE_EXHAUSTED.
            handlers: further method handlers, such as those with their own (de)serialisers.
            security: TLS and tokens, which a server that listens to other machines must have.

        Raises:
            ConfigError: the address is open to other machines without them, or their files are wrong.
            PortTakenError: the port is not free.
        """
        require_safe_server(listen, security)
        self.draining = threading.Event()
        self._config, self._services = config, services
        self._server = grpc.server(
            ThreadPoolExecutor(max_streams + SHORT_CALL_THREADS, thread_name_prefix="rpc"),
            interceptors=[ThreadPoolInterceptor(Access(security), PeerLimits(config), max_streams)],
            options=server_options(config),
        )
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME, health.SERVICE_NAME], self._server)
        # Handlers that were added first win, so those with their own (de)serialisers come before the plain ones.
        self._server.add_generic_rpc_handlers(tuple(handlers))
        for add in register:
            add(self._server)
        self.port: int = _bind(self._server, listen, security)
        self.set_serving(False)

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set what health says, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            self._health.set(service, status)

    def set_ready(self, ready: bool) -> None:
        """Set what health says for each service, and leave the whole server's as it is.

        Services speak for readiness, the server ("") for liveness: a store that is away makes a service not ready, and
        must not have its process restarted.
        """
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            self._health.set(service, status)

    def stop(self) -> None:
        """Drain: health off, new calls refused, calls in progress finish within `drain_seconds`, then are cancelled."""
        self.draining.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(self._config.drain_seconds).wait()


class AioServer:
    """An event-loop server; make and use it within the loop. Health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        listen: str,
        config: RpcConfig,
        *,
        services: Sequence[str],
        register: Sequence[Register],
        security: SecurityConfig = LOOPBACK_ONLY,
    ) -> None:
        """Bind `listen`. Raises ConfigError and PortTakenError, as `Server`."""
        require_safe_server(listen, security)
        self._config, self._services = config, services
        self._server = grpc.aio.server(
            interceptors=[AioInterceptor(Access(security), PeerLimits(config))], options=server_options(config)
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*services, reflection.SERVICE_NAME, health.SERVICE_NAME], self._server)
        for add in register:
            add(self._server)
        self.port: int = _bind(self._server, listen, security)

    async def start(self) -> None:
        """Begin to answer."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set what health says, for the whole server and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self) -> None:
        """Drain, as `Server.stop`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._config.drain_seconds)


def _bind(server: Any, listen: str, security: SecurityConfig) -> int:
    """Take the port at every address of the host that this machine has, or at none. Raises PortTakenError."""
    credentials = None
    if security.certificates is not None:
        folder = CertificateFolder(security.certificates, needs_own=True)
        credentials = folder.server_credentials(client_certificates=security.client_certificates)
    host, _, port_text = listen.rpartition(":")
    port = 0
    try:
        for address in _addresses_of(host):
            at = f"{address}:{port or port_text}"
            port = int(server.add_insecure_port(at) if credentials is None else server.add_secure_port(at, credentials))
            if port == 0:
                break
    except (RuntimeError, OSError) as error:
        raise _port_taken(listen) from error
    if port == 0:
        raise _port_taken(listen)
    return port


def _port_taken(listen: str) -> PortTakenError:
    return PortTakenError(
        f"cannot listen on {listen}: the port is taken or the host is not this machine's; "
        "stop what holds it, or set another listen address"
    )


def _addresses_of(host: str) -> list[str]:
    """The addresses behind a host's name, as gRPC writes them; a host that is an address is left as it is.

    gRPC is content with one of them: of two servers at one port of `localhost` each would get some of the clients.
    """
    literal = host.strip("[]")
    try:
        ipaddress.ip_address(literal.partition("%")[0])
        return [host]
    except ValueError:
        found = socket.getaddrinfo(literal, None, type=socket.SOCK_STREAM)
    addresses = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)  # at any port
        except OSError:
            continue  # such as ::1 of a container without IPv6
        addresses.append(f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0]))
    if not addresses:
        raise OSError(f"{host} has no address of this machine")
    return addresses
