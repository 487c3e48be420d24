"""A TCP proxy on loopback that makes the network between two parties as bad as a test needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class TcpProxy:
    """Forwards to one address. The public attributes may be changed at any time and hold from then on."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)  # of connections accepted from now on
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0  # before each piece from the client is passed on
        self.is_silent = False  # pieces from the client are lost; connections stay open
        self.cut_after: int | None = None  # the n-th piece from clients cuts its connection instead
        self.is_cutting_late = False  # that piece is passed on first: done there, unknown here
        self.garbage: bytes | None = None  # answered to each piece in place of the target
        self.num_open = 0
        self.num_accepted = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        self.num_accepted += 1
        self.num_open += 1
        try:
            target_in, target_out = await asyncio.open_connection(*self.target)
            back = asyncio.create_task(self._pump_back(target_in, client_out))
            try:
                await self._pump_forth(client_in, target_out, client_out)
            finally:
                back.cancel()
                target_out.close()
        except (OSError, asyncio.CancelledError):
            pass  # the connection ends; so does its half of the test
        finally:
            client_out.close()
            self.num_open -= 1
            self._pumps.discard(task)

    async def _pump_forth(
        self,
        client_in: asyncio.StreamReader,
        target_out: asyncio.StreamWriter,
        client_out: asyncio.StreamWriter,
    ) -> None:
        while piece := await client_in.read(65536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.is_silent:
                continue
            if self.garbage is not None:
                client_out.write(self.garbage)
                continue
            if self.cut_after is not None:
                self.cut_after -= 1
                if self.cut_after < 0:
                    if self.is_cutting_late:
                        target_out.write(piece)
                        await target_out.drain()
                    self.cut_after = None
                    return
            target_out.write(piece)
            await target_out.drain()

    async def _pump_back(self, target_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await target_in.read(65536):
                client_out.write(piece)
                await client_out.drain()
        client_out.close()


@contextlib.asynccontextmanager
async def tcp_proxy(host: str, port: int) -> AsyncIterator[TcpProxy]:
    """A started proxy."""
    proxy = TcpProxy(host, port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
