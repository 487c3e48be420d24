"""Reading a request body: within a size, within a time, in constant-factor memory.

Decisions: the size limit holds for the bytes as received and is checked before the first byte is read where
the length is declared; `100 Continue` is sent only for a body we are willing to read; a body must not
stall, nor trickle. At its peak a body is in memory twice (the pieces and their join).
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from gateway.downstream.connection import CONTINUE
from gateway.downstream.settings import DownstreamSettings
from gateway.errors import BadRequest, BodyTooLarge, ExpectationFailed, RequestTimeout


async def read_body(request: web.BaseRequest, settings: DownstreamSettings) -> bytes:
    """The whole body as received (transfer coding removed, content coding kept).

    Raises BodyTooLarge, RequestTimeout, BadRequest or ExpectationFailed; the rest of the body has then
    not been read, so the answer must close the connection.
    """
    limit_bytes = settings.max_body_bytes
    declared_bytes = request.content_length
    if declared_bytes is not None and declared_bytes > limit_bytes:
        raise _too_large(limit_bytes)
    content = request.content
    if content.is_eof():  # all of it came with the head: the usual case
        body = content.read_nowait()
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body
    _answer_expectation(request)
    return await _read_pieces(request, settings)


async def _read_pieces(request: web.BaseRequest, settings: DownstreamSettings) -> bytes:
    """Read what is still to come, piece by piece."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(settings.body_idle_timeout_s):
                piece = await request.content.readany()
        except TimeoutError as exc:
            raise RequestTimeout(
                f"no byte of the request body for {settings.body_idle_timeout_s:g} s"
            ) from exc
        except web.RequestPayloadError as exc:
            raise BadRequest("the request body is not framed correctly") from exc
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        elapsed_s = loop.time() - started_s
        allowed_s = settings.body_idle_timeout_s
        if elapsed_s > allowed_s and num_bytes < settings.body_min_bytes_per_s * elapsed_s:
            raise RequestTimeout(
                f"the request body comes at less than {settings.body_min_bytes_per_s} bytes/s"
            )


def _answer_expectation(request: web.BaseRequest) -> None:
    """Invite the body of a client that waits for it (RFC 9110, 10.1.1)."""
    expectation = request.headers.get("Expect")
    if expectation is None or request.version < HttpVersion11:
        return
    if expectation.lower() != "100-continue":
        raise ExpectationFailed("the only expectation this server can meet is 100-continue")
    if request.transport is not None:
        request.transport.write(CONTINUE)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than the limit of {limit_bytes} bytes (max_body_bytes)")
