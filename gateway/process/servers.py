"""The two listeners of one gateway, for clients and for operators: their addresses, their certificates, and
the order in which they close.

The admin listener stays open until the last answer to a client has ended, so that operators can watch the
shutdown. An inherited socket replaces the configured address. Knows nothing of requests.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from gateway.config.config import Config, ConfigError
from gateway.downstream.server import ClientServer
from gateway.downstream.tls import ListenerTls, make_server_context
from gateway.process.listeners import Listener, explained, open_tcp_sockets, open_unix_socket

CLEANUP_TIMEOUT_S = 1.0
"""How long connections may take to close after every request has ended."""
MAX_ADMIN_LINE_BYTES = 64 * 1024
"""Limit of a request line of the admin API: a query may contain a long, escaped session id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """The TLS context of each listener; None is plain HTTP."""

    data: ssl.SSLContext | None
    admin: ssl.SSLContext | None


def read_contexts(config: Config) -> Contexts:
    """Read the certificate files. Raises ConfigError with the path of the option."""
    return Contexts(
        data=_context_of("listen.tls", config.listen.tls), admin=_context_of("admin.tls", config.admin.tls)
    )


def _context_of(path: str, settings: ListenerTls | None) -> ssl.SSLContext | None:
    if settings is None:
        return None
    try:
        return make_server_context(settings)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Servers:
    """Opens and closes the listeners, and replaces their certificates."""

    def __init__(self, sockets: Mapping[str, socket.socket]) -> None:
        """`sockets`: inherited ones, under `data` and `admin`."""
        self._inherited = dict(sockets)
        self._runner: web.AppRunner | None = None
        self._server: ClientServer | None = None
        self._data: Listener | None = None
        self._admin: Listener | None = None

    @property
    def is_open(self) -> bool:
        """Whether the data listener was ever opened."""
        return self._data is not None

    async def open_data(self, server: ClientServer, config: Config, contexts: Contexts) -> int:
        """Listen for clients; return the port, 0 on a Unix socket. Raises CannotListen."""
        self._server = server
        place, own_path = config.listen, None
        if "data" in self._inherited:
            sockets = [self._inherited.pop("data")]
        elif place.unix_path is not None:
            own_path = Path(place.unix_path)
            with explained("listen.unix_path", place.unix_path):
                sockets = [open_unix_socket(own_path)]
        else:
            with explained("listen", _place(place.host, place.port)):
                sockets = await open_tcp_sockets(place.host, place.port, reuse_port=config.workers > 1)
        self._data = Listener(server, sockets, own_path=own_path)
        await self._data.serve(contexts.data)
        return self._data.port

    async def open_admin(self, application: web.Application, config: Config, contexts: Contexts) -> int:
        """Listen for operators; return the port. Raises CannotListen."""
        place = config.admin
        if "admin" in self._inherited:
            sockets = [self._inherited.pop("admin")]
        else:
            with explained("admin", _place(place.host, place.port)):
                sockets = await open_tcp_sockets(place.host, place.port, reuse_port=False)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            max_line_size=MAX_ADMIN_LINE_BYTES,
            shutdown_timeout=CLEANUP_TIMEOUT_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._admin = Listener(self._runner.server, sockets)
        await self._admin.serve(contexts.admin)
        return self._admin.port

    async def use(self, contexts: Contexts) -> None:
        """Use these certificates for new connections. Raises OSError."""
        if self._data is not None:
            await self._data.serve(contexts.data)
        if self._admin is not None:
            await self._admin.serve(contexts.admin)

    def leave(self) -> None:
        """Close each connection after its current answer from now on."""
        if self._server is not None:
            self._server.leave()

    async def stop_accepting_clients(self) -> None:
        """Idempotent."""
        if self._data is not None:
            await self._data.stop_accepting()

    async def close(self) -> None:
        """Close everything. Idempotent."""
        for listener in (self._data, self._admin):
            if listener is not None:
                await listener.stop_accepting()
        if self._server is not None:
            await self._server.close(grace_s=CLEANUP_TIMEOUT_S)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for sock in self._inherited.values():  # never used
            sock.close()
