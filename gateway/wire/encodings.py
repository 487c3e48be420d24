"""Decodes compressed request bodies, for reading only: backends get the bytes as received.

Decides which encodings are supported and how much a body may grow. Invariant: never produces more than
`max_bytes`, nor more than `max_ratio` times the input (above a floor), whatever the input claims. gzip and
deflate come with Python; zstd and br need the packages `zstandard` and `brotli`.
"""

from __future__ import annotations

import importlib
import io
import zlib
from typing import Any, Final

from gateway.errors import BadRequest, BodyTooLarge, UnsupportedMediaType

MAX_RATIO: Final = 100
"""How much a body may grow when decoded. JSON with one repeated message reaches such ratios."""
_RATIO_FLOOR_BYTES: Final = 1 << 20  # bodies that decode to at most this size may have any ratio
_MAX_CODINGS: Final = 3  # real clients use at most one; each coding may cost as much as the limit allows
_CHUNK_BYTES: Final = 1 << 16


def decode_body(body: bytes, encoding: str, *, max_bytes: int, max_ratio: float = MAX_RATIO) -> bytes:
    """Return the decoded body.

    Raises BadRequest (invalid data, or growth beyond the ratio), BodyTooLarge, UnsupportedMediaType
    (unsupported encoding).
    """
    limit = min(max_bytes, max(_RATIO_FLOOR_BYTES, int(len(body) * max_ratio)))
    named = [token.strip().lower() for token in encoding.split(",")]
    codings = [token for token in named if token not in ("", "identity")]
    if len(codings) > _MAX_CODINGS:
        raise BadRequest(f"the body has more than {_MAX_CODINGS} content encodings", param="content-encoding")
    for coding in reversed(codings):
        try:
            body = _decode(body, coding, limit)
        except (zlib.error, EOFError, ValueError) as error:
            raise BadRequest(f"the body is not valid {coding}", param="content-encoding") from error
        if len(body) > limit:
            if limit < max_bytes:
                raise BadRequest(
                    f"the decoded body is more than {max_ratio:g} times as large as the compressed one",
                    param="content-encoding",
                )
            raise BodyTooLarge(f"the decoded body is larger than {max_bytes} bytes")
    return body


def _decode(body: bytes, coding: str, limit: int) -> bytes:
    """Decode one layer. Returns up to `limit` + 1 bytes; the extra byte means that the limit is exceeded."""
    if coding in ("gzip", "x-gzip"):
        return _inflate(body, 16 + zlib.MAX_WBITS, limit)
    if coding == "deflate":
        # RFC 9110 requires zlib; some clients send a raw stream, whose first bytes are no zlib header
        is_zlib = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS, limit)
    if coding == "zstd":
        return _unzstd(body, limit)
    if coding == "br":
        return _unbrotli(body, limit)
    raise UnsupportedMediaType("this content encoding is not supported", param="content-encoding")


def _inflate(body: bytes, window_bits: int, limit: int) -> bytes:
    output = bytearray()
    rest = body
    while rest:  # a gzip file may have several members
        stream = zlib.decompressobj(window_bits)
        output += stream.decompress(rest, limit + 1 - len(output))
        if len(output) > limit:
            break
        if not stream.eof:
            raise ValueError("truncated")
        rest = stream.unused_data
        if window_bits < 16 and rest:
            raise ValueError("trailing data")
    return bytes(output)


def _unzstd(body: bytes, limit: int) -> bytes:
    zstandard = _optional("zstandard", "zstd")
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        io.BytesIO(body), read_across_frames=True
    )
    try:
        return bytes(reader.read(limit + 1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _unbrotli(body: bytes, limit: int) -> bytes:
    brotli = _optional("brotli", "br")
    stream = brotli.Decompressor()
    output = bytearray()
    try:
        output += stream.process(body, output_buffer_limit=_CHUNK_BYTES)
        while len(output) <= limit and not stream.is_finished():
            more = stream.process(b"", output_buffer_limit=_CHUNK_BYTES)
            if not more:
                raise ValueError("truncated")
            output += more
    except brotli.error as error:
        raise ValueError(str(error)) from error
    return bytes(output[: limit + 1])


def _optional(module: str, coding: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{coding} is not supported: the gateway does not have the package {module}"
        raise UnsupportedMediaType(message, param="content-encoding") from error
