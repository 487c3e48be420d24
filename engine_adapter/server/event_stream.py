"""Sends answers: JSON at once, or server-sent events.

Decides when the response head is sent: with the first event, so that an earlier failure still gets a proper
status and the gateway can try another backend. A later error is sent in-band and the connection is closed
without the final chunk, because a clean end would look like a complete answer. It does not know what events
mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from engine_adapter.server.errors import ApiError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers events
}


def event(data: object, name: str | None = None) -> bytes:
    """Encode one event; `name` is the `event:` line of the dialects that have one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(document: object, status: int = 200) -> web.Response:
    """A whole answer as JSON."""
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


DONE = b"data: [DONE]\n\n"


async def send_stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send events until they end. An `ApiError` before the first event is raised; later it is sent in-band.

    The generator is always closed before this returns, which frees what it holds in the engine.
    """
    response = web.StreamResponse(headers=HEADERS)
    try:
        async with contextlib.aclosing(events):
            async for data in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
        await response.write_eof()
    except ApiError as error:
        if not response.prepared:
            raise
        name = b"event: error\n" if request.path.startswith("/v1/messages") else b""
        with contextlib.suppress(ConnectionError):
            await response.write(name + b"data: " + error.body(request.path) + b"\n\n")
        _cut(request)
    except ConnectionError:
        # A write may detect the disconnect before the server cancels this handler.
        _cut(request)
    return response


def _cut(request: web.Request) -> None:
    """Close the connection without the final chunk, so that the answer is recognised as incomplete."""
    if request.transport is not None:
        request.transport.close()
