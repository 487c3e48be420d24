"""A scripted engine on a raw socket: records what it received, answers with exactly the bytes it is told.

Each request takes the next behaviour of the script, or the default one (an OpenAI-shaped answer, streamed
when asked). A behaviour is an async function of a `Turn`; it may write anything, wait for a gate, reset
the connection, or leave it. Nothing here sleeps: tests decide when a gate opens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True, kw_only=True)
class ReceivedRequest:
    """One request as it came over the wire."""

    connection_id: int
    method: str
    target: str
    head: bytes  # from the request line to the empty line
    headers: list[tuple[str, str]]  # names in lower case, in order
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> dict[str, Any]:
        loaded = json.loads(self.body)
        assert isinstance(loaded, dict)
        return loaded


@dataclass(slots=True)
class Turn:
    """One request being answered: what a behaviour works with."""

    backend: FakeBackend
    request: ReceivedRequest
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    keeps_open: bool = True

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def wait_closed_by_peer(self) -> None:
        """Until the gateway closes (or resets) this connection; recorded as a cancel."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass
        self.keeps_open = False
        self.backend.record_cancel()

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        self.keeps_open = False

    def close(self) -> None:
        """Close with FIN."""
        self.writer.close()
        self.keeps_open = False


Behaviour = Callable[[Turn], Awaitable[None]]


@dataclass(slots=True)
class FakeBackend:
    """`async with FakeBackend() as backend:` then `backend.base_url`."""

    default: Behaviour = field(default_factory=lambda: openai_answer())
    model: str = "fake-model"
    requests: list[ReceivedRequest] = field(default_factory=list)
    num_connections: int = 0
    num_cancelled: int = 0
    is_dead: bool = False  # accepts, then resets before it reads
    is_frozen: bool = False  # accepts and never reads: a stopped process
    ssl: object = None
    unix_path: str | None = None
    _script: deque[Behaviour] = field(default_factory=deque)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        if self.unix_path is not None:
            self._server = await asyncio.start_unix_server(self._on_connection, self.unix_path)
        else:
            self._server = await asyncio.start_server(
                self._on_connection, "127.0.0.1", port, ssl=self.ssl, backlog=2048
            )

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        assert self._server is not None
        self._server.close()
        self.cut_all()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def base_url(self) -> str:
        if self.unix_path is not None:
            return f"unix:{self.unix_path}"
        return f"{'https' if self.ssl else 'http'}://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._writers)

    def script(self, *behaviours: Behaviour) -> None:
        """The next requests take these, one each."""
        self._script.extend(behaviours)

    def cut_all(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    def record_cancel(self) -> None:
        self.num_cancelled += 1
        self._notify()

    async def wait_until(self, condition: Callable[[FakeBackend], bool], timeout_s: float = 5.0) -> None:
        """Until `condition` holds; it is looked at again after each connection, request, cancel or close."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        connection_id = self.num_connections
        self._notify()
        try:
            if self.is_dead:
                Turn(self, _NO_REQUEST, reader, writer).reset()
                return
            while not self.is_frozen and await self._serve_one(connection_id, reader, writer):
                pass
            if self.is_frozen:
                await asyncio.Event().wait()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()
            self._notify()

    async def _serve_one(
        self, connection_id: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        request = await self.read_request(connection_id, reader)
        return await self.answer(Turn(self, request, reader, writer))

    async def read_request(self, connection_id: int, reader: asyncio.StreamReader) -> ReceivedRequest:
        return await _read_request(connection_id, reader)

    async def answer(self, turn: Turn) -> bool:
        """Record the request and let the script answer it. Returns whether the connection stays."""
        self.requests.append(turn.request)
        self._notify()
        behaviour = self._script.popleft() if self._script else self.default
        await behaviour(turn)
        return turn.keeps_open


_NO_REQUEST = ReceivedRequest(connection_id=0, method="", target="", head=b"", headers=[], body=b"")


async def _read_request(connection_id: int, reader: asyncio.StreamReader) -> ReceivedRequest:
    head = await reader.readuntil(b"\r\n\r\n")
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers = [
        (name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines if line)
    ]
    method, target, _ = request_line.split(" ")
    fields = dict(headers)
    body = b""
    if "content-length" in fields:
        body = await reader.readexactly(int(fields["content-length"]))
    elif fields.get("transfer-encoding") == "chunked":
        body = await _read_chunked(reader)
    return ReceivedRequest(
        connection_id=connection_id, method=method, target=target, head=head, headers=headers, body=body
    )


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readuntil(b"\r\n")
    return b"".join(pieces)


# -- behaviours


def respond(
    body: bytes = b"{}",
    *,
    status: int = 200,
    reason: str = "OK",
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),),
    keep_alive: bool = True,
) -> Behaviour:
    """A complete answer with `content-length`."""

    async def behave(turn: Turn) -> None:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers)
        close = "" if keep_alive else "connection: close\r\n"
        head = f"HTTP/1.1 {status} {reason}\r\n{fields}{close}content-length: {len(body)}\r\n\r\n".encode()
        await turn.send(head + (b"" if turn.request.method == "HEAD" else body))
        if not keep_alive:
            turn.close()

    return behave


def raw(data: bytes, then: str = "keep") -> Behaviour:
    """Exactly these bytes, then `keep` the connection, `close` it, `reset` it, or `wait` for the peer."""

    async def behave(turn: Turn) -> None:
        if data:
            await turn.send(data)
        if then == "close":
            turn.close()
        elif then == "reset":
            turn.reset()
        elif then == "wait":
            await turn.wait_closed_by_peer()

    return behave


def hang() -> Behaviour:
    """Never answer; note when the gateway gives up."""
    return raw(b"", then="wait")


def reset() -> Behaviour:
    """Read the request, then reset without a byte."""
    return raw(b"", then="reset")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes, gates: dict[int, asyncio.Event] | None = None, then: str = "end") -> Behaviour:
    """An event stream, one chunk and one write per event; event i waits for `gates[i]`.

    `then`: `end` properly, `close` or `reset` without the last chunk, `wait` for the gateway to give up.
    """

    async def behave(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        for index, event in enumerate(events):
            if gates is not None and index in gates:
                await gates[index].wait()
            await turn.send(chunk(event))
        if then == "end":
            await turn.send(b"0\r\n\r\n")
        else:
            await raw(b"", then)(turn)

    return behave


def openai_answer(text: str = "Hello", *, cached_tokens: int = 0) -> Behaviour:
    """What an engine answers to `/v1/chat/completions`, streamed when the request asks for it."""

    async def behave(turn: Turn) -> None:
        if turn.request.method == "GET":
            models = {"object": "list", "data": [{"id": turn.backend.model, "object": "model"}]}
            await respond(json.dumps(models).encode())(turn)
            return
        is_stream = turn.request.json.get("stream") is True
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if is_stream:
            await stream(*chat_events(text, usage, turn.backend.model))(turn)
        else:
            await respond(json.dumps(chat_body(text, usage, turn.backend.model)).encode())(turn)

    return behave


def chat_body(text: str, usage: dict[str, object], model: str) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }


def chat_events(text: str, usage: dict[str, object], model: str) -> list[bytes]:
    """Role, one event per word, finish reason, usage, [DONE]."""

    def event(choices: list[dict[str, object]], extra: dict[str, object]) -> bytes:
        payload = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": model,
            "choices": choices,
            **extra,
        }
        return b"data: " + json.dumps(payload).encode() + b"\n\n"

    def delta(content: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
        return {"index": 0, "delta": content, "finish_reason": finish_reason}

    events = [event([delta({"role": "assistant", "content": ""})], {})]
    events += [event([delta({"content": word})], {}) for word in text.split()]
    events.append(event([delta({}, "stop")], {}))
    events.append(event([], {"usage": usage}))
    events.append(b"data: [DONE]\n\n")
    return events
