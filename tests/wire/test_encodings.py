"""Compressed bodies: opened for reading within limits, and harmless where they cannot be."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest, BodyTooLarge, GatewayError, UnsupportedMediaType
from gateway.values import Api, KeySource, RequestFacts
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


@pytest.mark.parametrize(
    ("encoding", "compress"), [("zstd", zstandard.ZstdCompressor().compress), ("br", brotli.compress)]
)
def test_zstd_and_br_are_opened(parse: Parse, encoding: str, compress: Callable[[bytes], bytes]) -> None:
    """G08: they work as gzip does, limits included."""
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


@pytest.mark.parametrize("api", [api for api in Api if api not in (Api.MODELS, Api.OTHER, Api.REALTIME)])
def test_an_unknown_encoding_is_refused(parse: Parse, api: Api) -> None:
    """S03: what cannot be read cannot be judged, though headers would do to route it; plain JSON or not."""
    for body in (b"\x00\x01", TEXT):
        for encoding in ("x-own", "identity, x-own", "gzip, x-own"):
            with pytest.raises(UnsupportedMediaType):
                parse(body, {"x-session-id": "abc"}, api=api, content_encoding=encoding)


def test_a_passed_through_body_may_have_any_encoding(parse: Parse) -> None:
    """Only its model is of interest, and a body that cannot be opened names none."""
    facts = parse(TEXT, {"x-session-id": "abc"}, api=Api.OTHER, content_encoding="x-own")
    assert (facts.key_source, facts.model) == (KeySource.HEADER, None)
    assert parse(gzip.compress(TEXT), api=Api.OTHER, content_encoding="gzip").model == "m"
    assert parse(b"no gzip", api=Api.OTHER, content_encoding="gzip").model is None


def test_a_body_that_reads_two_ways_is_refused(parse: Parse) -> None:
    """S03: an engine that does not decode must not find another model in the bytes as they are."""
    # a deflate stream can be written in ASCII; here the coding is none, spelled so that it is looked at
    for body in (b'  {"model":"b","messages":[]}', b'{"model":"b","messages":[],"x":"%b"}' % (b"x" * 500)):
        with pytest.raises(BadRequest, match="though it has a content encoding"):
            parse(body, content_encoding="identity,, ,identity")


def test_many_small_members_take_no_time() -> None:
    """S04: each member once cost a copy of all that followed it."""
    for members, is_allowed in (
        (gzip.compress(b"x" * 40) * 2_000, True),
        (gzip.compress(b"") * 800_000, False),
    ):
        started_s = time.process_time()
        with contextlib.nullcontext() if is_allowed else pytest.raises(BadRequest):
            decode_body(members, "gzip", max_bytes=1 << 20)
        assert time.process_time() - started_s < 2.0


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br"])
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    """Whatever it would grow to, by itself or at once: what is over the limit is never kept."""
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "zstd": zstandard.ZstdCompressor().compress,
        "br": lambda data: brotli.compress(data, quality=2),
    }
    bomb = compressors[encoding](bytes(200_000_000)) + random.Random(1).randbytes(100_000)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decode_body(bomb, encoding, max_bytes=8_000_000)
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


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
