"""Decodes compressed request bodies, for reading only: backends get the bytes as received.

Decides which encodings are supported and how much a body may grow. Invariants: never keeps more than
`max_bytes`, nor more than `max_ratio` times the input (above a floor), whatever the input claims; takes time
in proportion to what goes in and comes out. Input is fed and output is taken in pieces, because the decoders
copy what they have not used at each call.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Final

import brotli
import zstandard

from gateway.errors import BadRequest, BodyTooLarge, UnsupportedMediaType

MAX_RATIO: Final = 100
"""How much a body may grow when decoded. JSON with one repeated message reaches such ratios."""
_RATIO_FLOOR_BYTES: Final = 1 << 20  # bodies that decode to at most this size may have any ratio
_MAX_CODINGS: Final = 3  # real clients use at most one; each coding may cost as much as the limit allows
_MAX_MEMBERS: Final = 2_048  # bgzip makes one of 64 KiB, other writers one in all
_INPUT_BYTES: Final = 1 << 16
_OUTPUT_BYTES: Final = 1 << 18
_MAX_WINDOW_BYTES: Final = 8 << 20  # of zstd over HTTP: RFC 9659


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
        output = bytearray()
        try:
            for piece in _decoded(body, coding):
                output += piece
                if len(output) > limit:
                    break
        except (zlib.error, brotli.error, zstandard.ZstdError, ValueError) as error:
            raise BadRequest(f"the body is not valid {coding}", param="content-encoding") from error
        if len(output) > limit:
            if limit < max_bytes:
                raise BadRequest(
                    f"the decoded body is more than {max_ratio:g} times as large as the compressed one",
                    param="content-encoding",
                )
            raise BodyTooLarge(f"the decoded body is larger than {max_bytes} bytes")
        body = bytes(output)
    return body


def _decoded(body: bytes, coding: str) -> Iterator[bytes]:
    """Return one layer decoded, in pieces."""
    if coding in ("gzip", "x-gzip"):
        return _inflate(body, 16 + zlib.MAX_WBITS, _MAX_MEMBERS)
    if coding == "deflate":
        # RFC 9110 requires zlib; some clients send a raw stream, whose first bytes are no zlib header
        is_zlib = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        return _inflate(body, zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS, 1)
    if coding == "zstd":
        return _unzstd(body)
    if coding == "br":
        return _unbrotli(body)
    raise UnsupportedMediaType(
        "this content encoding is not supported: use gzip, deflate, zstd or br", param="content-encoding"
    )


def _inflate(body: bytes, window_bits: int, max_members: int) -> Iterator[bytes]:
    position = num_members = 0
    while position < len(body):  # a gzip file may have several members
        num_members += 1
        if num_members > max_members:
            raise ValueError("trailing data")
        stream = zlib.decompressobj(window_bits)
        while not stream.eof:
            piece = stream.unconsumed_tail
            if not piece:
                piece = body[position : position + _INPUT_BYTES]
                position += len(piece)
            more = stream.decompress(piece, _OUTPUT_BYTES)
            if not (piece or more):
                raise ValueError("truncated")
            yield more
        position -= len(stream.unused_data)


def _unzstd(body: bytes) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    reader = decompressor.stream_reader(io.BytesIO(body), read_across_frames=True)
    while more := reader.read(_OUTPUT_BYTES):
        yield more


def _unbrotli(body: bytes) -> Iterator[bytes]:
    stream = brotli.Decompressor()
    position = 0
    while not stream.is_finished():
        piece = b""
        if stream.can_accept_more_data():
            piece = body[position : position + _INPUT_BYTES]
            position += len(piece)
        more = stream.process(piece, output_buffer_limit=_OUTPUT_BYTES)
        if not (piece or more):
            raise ValueError("truncated")
        yield more
