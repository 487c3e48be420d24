"""How answers leave: JSON at once, or server-sent events over one HTTP response.

Decides when the response head goes out: with the first event, so that whatever fails before it still gets
a proper status and another backend may be tried. After it, an error is told in-band and the connection is
cut, because a clean end would look like a complete answer. It does not know what events mean.
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
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


def event(data: object, name: str | None = None) -> bytes:
    """One event; `name` is the `event:` line of the dialects that have one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(document: object, status: int = 200) -> web.Response:
    """A whole answer as JSON."""
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


DONE = b"data: [DONE]\n\n"


async def send_stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send events until they end. An `ApiError` before the first one is raised, later it goes in-band.

    The generator is closed before this returns, however it returns: what it holds in the engine is free then.
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
        # A write may notice that the client has gone before the server cancels this handler.
        _cut(request)
    return response


def _cut(request: web.Request) -> None:
    """End the connection without the chunked terminator: the answer is incomplete and must look so."""
    if request.transport is not None:
        request.transport.close()
