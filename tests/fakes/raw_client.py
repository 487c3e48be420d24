"""A client on a raw socket: sends exactly these bytes and tells exactly what came back, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import Self


@dataclass(slots=True, kw_only=True)
class RawResponse:
    """One answer as it came over the wire."""

    status: int
    reason: str
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes  # without transfer coding
    chunks: list[bytes]  # the chunks as framed, empty when not chunked
    is_complete: bool  # ended as its framing says
    num_interim: int = 0  # 1xx answers before it

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None


class RawClient:
    """`async with RawClient(port) as client: await client.send(...); await client.read_response()`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def half_close(self) -> None:
        """Send FIN and go on reading."""
        self.writer.write_eof()

    async def leave(self) -> None:
        """Close the socket, as a client that ends does."""
        self.writer.close()
        await self.writer.wait_closed()

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def read_head(self) -> tuple[int, str, list[tuple[str, str]]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        _, status, reason = (status_line + " ").split(" ", 2)
        pairs = (line.partition(":") for line in lines if line)
        return int(status), reason.strip(), [(name.lower(), value.strip()) for name, _, value in pairs]

    async def read_response(self, *, method: str = "POST", timeout_s: float = 10.0) -> RawResponse:
        """The next final answer; interim ones are counted. A cut body comes back as `is_complete=False`."""
        async with asyncio.timeout(timeout_s):
            num_interim = 0
            status, reason, headers = await self.read_head()
            while status < 200:
                num_interim += 1
                status, reason, headers = await self.read_head()
            chunks, body, is_complete = await self._read_body(status, dict(headers), method)
        return RawResponse(
            status=status,
            reason=reason,
            headers=headers,
            body=body,
            chunks=chunks,
            is_complete=is_complete,
            num_interim=num_interim,
        )

    async def read_to_end(self, timeout_s: float = 10.0) -> bytes:
        """Everything up to the end of the connection, however it ends."""
        pieces: list[bytes] = []
        async with asyncio.timeout(timeout_s):
            try:
                while piece := await self.reader.read(65_536):
                    pieces.append(piece)
            except ConnectionError:
                pass
        return b"".join(pieces)

    async def read_chunk(self) -> bytes:
        """One chunk of a chunked body; b"" for the last one."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def _read_body(
        self, status: int, fields: dict[str, str], method: str
    ) -> tuple[list[bytes], bytes, bool]:
        if method == "HEAD" or status in (204, 304):
            return [], b"", True
        if "content-length" in fields:
            return await self._read_sized(int(fields["content-length"]))
        if fields.get("transfer-encoding") == "chunked":
            return await self._read_chunks()
        try:
            return [], await self.reader.read(), True
        except ConnectionError:
            return [], b"", False

    async def _read_sized(self, size: int) -> tuple[list[bytes], bytes, bool]:
        try:
            return [], await self.reader.readexactly(size), True
        except asyncio.IncompleteReadError as exc:
            return [], exc.partial, False
        except ConnectionError:
            return [], b"", False

    async def _read_chunks(self) -> tuple[list[bytes], bytes, bool]:
        chunks: list[bytes] = []
        try:
            while data := await self.read_chunk():
                chunks.append(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            return chunks, b"".join(chunks), False
        return chunks, b"".join(chunks), True


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """One POST as bytes, with Host and Content-Length."""
    fields = "".join(f"{header}\r\n" for header in headers)
    head = f"POST {path} HTTP/{version}\r\nHost: test\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
