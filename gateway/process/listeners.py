"""Listening sockets, and the servers that accept from them.

Decision: a listener owns its listening sockets and gives each server a duplicate. So a server can be replaced
without a moment in which nothing listens: a rotated certificate is a new server on the same socket,
connections in the kernel's queue go to whichever server accepts next, and open ones are not touched. The
socket may be a TCP socket of our own, a Unix socket, or one inherited from the service manager.

Knows nothing of HTTP: the protocol factory handles connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

BACKLOG = 2048
LAST_HANDSHAKE_TIMEOUT_S = 2.0

_ADVICE = {
    errno.EADDRINUSE: "Stop the process that listens there, or choose another port",
    errno.EADDRNOTAVAIL: "This machine has no such address: choose another host",
    errno.EACCES: "Permission is missing: choose another path, or a port above 1023",
    errno.ENOENT: "The folder does not exist: create it, or choose another path",
}

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class CannotListen(OSError):
    """The message says which address is not available, why, and what to do."""


@contextlib.contextmanager
def explained(option: str, place: str) -> Iterator[None]:
    """Turn any OSError into CannotListen, which names the address and the option that chose it."""
    try:
        yield
    except OSError as error:
        advice = "Choose another host" if isinstance(error, socket.gaierror) else "Choose another address"
        advice = _ADVICE.get(error.errno or 0, advice)
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {place}: {reason}. {advice} in `{option}`.") from error


class Listener:
    """Accepts connections from its sockets, until `stop_accepting`."""

    def __init__(
        self, factory: ProtocolFactory, sockets: list[socket.socket], *, own_path: Path | None = None
    ) -> None:
        """`own_path`: the file of a Unix socket that we must remove."""
        self._factory, self._sockets, self._own_path = factory, sockets, own_path
        self._servers: list[asyncio.AbstractServer] = []
        self._tls: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        """The TCP port, 0 on a Unix socket."""
        address = self._sockets[0].getsockname()
        return int(address[1]) if isinstance(address, tuple) else 0

    async def serve(self, tls: ssl.SSLContext | None) -> None:
        """Accept with this context from now on. Raises OSError; the old servers then continue."""
        servers: list[asyncio.AbstractServer] = []
        try:
            for sock in self._sockets:
                servers.append(await self._serve_one(sock.dup(), tls))  # noqa: PERF401 - the list is needed if one fails
        except BaseException:
            _close(servers)
            raise
        if not self._sockets:  # stopped in the meantime
            _close(servers)
            return
        _close(self._servers)
        self._servers, self._tls = servers, tls

    async def _serve_one(self, sock: socket.socket, tls: ssl.SSLContext | None) -> asyncio.AbstractServer:
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._factory, sock=sock, ssl=tls, backlog=BACKLOG)
        return await loop.create_server(self._factory, sock=sock, ssl=tls, backlog=BACKLOG)

    async def stop_accepting(self) -> None:
        """Close the listening sockets; connections continue. Idempotent.

        Closing would reset the connections in the kernel's queue, although their clients see them as
        connected, so these are accepted first.
        """
        _close(self._servers)
        self._servers = []
        waiting: list[socket.socket] = []
        for sock in self._sockets:
            waiting += _accept_all(sock)
            sock.close()
        self._sockets = []
        if self._own_path is not None:
            self._own_path.unlink(missing_ok=True)
            self._own_path = None
        await asyncio.gather(*map(self._take_in, waiting), return_exceptions=True)

    async def _take_in(self, connection: socket.socket) -> None:
        timeout_s = None if self._tls is None else LAST_HANDSHAKE_TIMEOUT_S
        await asyncio.get_running_loop().connect_accepted_socket(
            self._factory, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
        )


def _accept_all(sock: socket.socket) -> list[socket.socket]:
    """Accept every connection in this socket's queue, without waiting for more."""
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(found) < BACKLOG:
            connection, _ = sock.accept()
            connection.setblocking(False)
            found.append(connection)
    return found


def _close(servers: list[asyncio.AbstractServer]) -> None:
    for server in servers:
        server.close()


async def open_tcp_sockets(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Open a listening socket for each address of `host`. Raises OSError; nothing is left open."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and sockets:  # the same free port for all addresses
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(_listen(family, address, reuse_port=reuse_port))
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen(family: int, address: tuple[object, ...], *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # `::` must not include `0.0.0.0`, which has its own socket
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def open_unix_socket(path: Path) -> socket.socket:
    """Listen on a path. A socket file left by an earlier run is replaced, but not one that is in use.

    Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(path)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path) -> None:
    """Remove a socket file that no process listens on."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # a busy process listens there
