"""Compressed bodies: opened for reading within limits, and harmless where they cannot be."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest, BodyTooLarge, GatewayError, UnsupportedMediaType
from gateway.values import KeySource, RequestFacts
from gateway.wire.encodings import decode_body

Parse = Callable[..., RequestFacts]

TEXT = json.dumps({"model": "m", "session_id": "abc", "messages": []}).encode()


def raw_deflate(data: bytes) -> bytes:
    """Deflate without the zlib wrapper, as some clients send it."""
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("x-gzip", gzip.compress(TEXT)),
        ("GZIP", gzip.compress(TEXT)),
        ("gzip", gzip.compress(TEXT[:10]) + gzip.compress(TEXT[10:])),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
        ("identity", TEXT),
        ("", TEXT),
        ("deflate, gzip", gzip.compress(zlib.compress(TEXT))),
    ],
    ids=["gzip", "x-gzip", "upper", "members", "zlib", "raw-deflate", "identity", "none", "two-layers"],
)
def test_known_encodings_are_opened(parse: Parse, encoding: str, body: bytes) -> None:
    """The facts of a compressed request are those of the plain one."""
    assert decode_body(body, encoding, max_bytes=1000) == TEXT
    assert parse(body, content_encoding=encoding) == parse(TEXT)


@pytest.mark.parametrize("name", ["zstandard", "brotli"])
def test_optional_encodings_are_opened_where_their_package_is(parse: Parse, name: str) -> None:
    """zstd (Codex) and br work as gzip does once the package is installed, limits included."""
    module = pytest.importorskip(name)
    encoding, compress = {
        "zstandard": ("zstd", lambda data: module.ZstdCompressor().compress(data)),
        "brotli": ("br", lambda data: module.compress(data)),
    }[name]
    assert decode_body(compress(TEXT), encoding, max_bytes=1000) == TEXT
    assert parse(compress(TEXT), content_encoding=encoding) == parse(TEXT)
    with pytest.raises(BodyTooLarge):
        decode_body(compress(bytes(2_000_000)), encoding, max_bytes=1_000_000)
    with pytest.raises(BadRequest):
        parse(compress(TEXT)[:-4], content_encoding=encoding)
    with pytest.raises(BadRequest):
        decode_body(b"no such data", encoding, max_bytes=1000)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b""),
        ("gzip", TEXT),
        ("gzip", gzip.compress(TEXT)[:-1]),
        ("gzip", gzip.compress(TEXT)[:12]),
        ("gzip", gzip.compress(TEXT) + b"trailing"),
        ("deflate", zlib.compress(TEXT)[:-1]),
        ("deflate", zlib.compress(TEXT) + b"x"),
        ("gzip, gzip", gzip.compress(TEXT)),
    ],
    ids=["empty", "plain", "cut", "cut-early", "gzip-tail", "zlib-cut", "zlib-tail", "one-layer-only"],
)
def test_broken_data_is_a_bad_request(parse: Parse, encoding: str, body: bytes) -> None:
    """Truncated, foreign or trailing data is the client's fault, never ours."""
    with pytest.raises(BadRequest):
        parse(body, content_encoding=encoding)


def test_growth_is_bounded_in_size_and_ratio() -> None:
    """A bomb is stopped at the limit, whichever limit comes first; small bodies may compress well."""
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(BadRequest, match="times as large"):
        decode_body(bomb, "gzip", max_bytes=1 << 30)
    with pytest.raises(BodyTooLarge):
        decode_body(bomb, "gzip", max_bytes=2_000_000)
    nested = gzip.compress(bomb)
    with pytest.raises(BadRequest, match="times as large"):
        decode_body(nested, "gzip, gzip", max_bytes=1 << 30)
    assert len(decode_body(gzip.compress(bytes(1_000_000)), "gzip", max_bytes=1 << 30)) == 1_000_000


def test_a_body_compressed_over_and_over_is_refused() -> None:
    """A stored block grows by nothing, so neither limit would end the work of a hundred layers."""
    body = TEXT
    for _ in range(4):
        body = gzip.compress(body, 0)
    with pytest.raises(BadRequest, match="content encodings"):
        decode_body(body, "gzip, gzip, gzip, gzip", max_bytes=1 << 20)
    assert decode_body(gzip.decompress(body), "gzip, identity, gzip, gzip", max_bytes=1 << 20) == TEXT


def test_an_unknown_encoding_leaves_the_headers_to_route_by(parse: Parse) -> None:
    """The body travels unread; only an explicit decode says that it cannot."""
    facts = parse(b"\x00\x01", {"x-session-id": "abc"}, content_encoding="x-own")
    assert (facts.key_source, facts.model) == (KeySource.HEADER, None)
    with pytest.raises(UnsupportedMediaType):
        decode_body(b"", "x-own", max_bytes=10)


@settings(max_examples=80, deadline=None)
@given(
    body=st.binary(max_size=60) | st.binary(max_size=60).map(gzip.compress),
    encoding=st.sampled_from(["gzip", "deflate", "zstd", "br", "gzip, deflate", ",", "identity,gzip"]),
    cut=st.integers(0, 60),
)
def test_no_bytes_make_another_error(body: bytes, encoding: str, cut: int) -> None:
    """Any data under any known name is decoded or refused with a 4xx."""
    try:
        assert len(decode_body(body[cut:], encoding, max_bytes=100)) <= 100
    except GatewayError as error:
        assert 400 <= error.status < 500  # noqa: PT017 (the other branch is as right)
