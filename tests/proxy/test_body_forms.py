"""Bodies that are no plain JSON, through the whole gateway: compressed ones, forms with files, audio."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable

import brotli
import pytest
import zstandard
from fakes.backend import Turn, chunk, respond
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient, post

CHAT = "/v1/chat/completions"

Encoder = Callable[[bytes], bytes]


def _raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def _brotli(data: bytes) -> bytes:
    return brotli.compress(data, quality=4)


def _chunked_zstd(data: bytes) -> bytes:
    """A frame that does not tell its size, as a streaming client writes it."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


ENCODINGS: dict[str, tuple[str, Encoder]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without its header": ("deflate", _raw_deflate),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "zstd as a stream": ("zstd", _chunked_zstd),
    "br": ("br", _brotli),
    "two layers": ("gzip, br", lambda data: _brotli(gzip.compress(data))),
    "another spelling": ("X-GZip", gzip.compress),
}


@pytest.fixture
async def world() -> AsyncIterator[GatewayWorld]:
    async with GatewayWorld(3) as started:
        yield started


def _chat(session: str) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    return json.dumps({"model": "fake-model", "session_id": session, "messages": messages}).encode()


# -- compressed requests


async def test_a_compressed_body_keeps_its_session_and_its_bytes(world: GatewayWorld) -> None:
    """It is opened for the key alone: the plain body has the same home, and the engine gets what was sent."""
    home = (await world.client.post(CHAT, content=_chat("s-1"))).headers["x-homing-backend"]
    backend = world.backends[int(home[1])]
    backend.default = respond()
    for name, (encoding, encode) in ENCODINGS.items():
        body = encode(_chat("s-1"))
        answer = await world.client.post(CHAT, content=body, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, home), name
        assert answer.headers["x-homing-key-source"] == "body"
        request = backend.requests[-1]
        assert (request.body, request.header("content-encoding")) == (body, encoding), name


async def test_an_unknown_encoding_is_refused(world: GatewayWorld) -> None:
    """S03, G08: what cannot be read cannot be judged: 415 in the dialect. No header hides another."""
    for encodings in (["lz4"], ["gzip, lz4"], ["identity", "lz4"], ["", "lz4"]):
        headers = [("x-session-id", "s-1"), *[("content-encoding", one) for one in encodings]]
        for body in (_chat("s-1"), b"\x04\x22opaque"):
            answer = await world.client.post(CHAT, content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
    answer = await world.client.post("/v1/messages", content=b"{}", headers={"content-encoding": "lz4"})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")
    assert not world.served()


async def test_bombs_are_refused_whole() -> None:
    """Growth beyond the ratio is 400, beyond the size 413; nothing of it reaches an engine."""
    form = b'{"model":"fake-model","messages":[],"pad":"%b"}'
    endless = form % (b"0" * 3_000_000)
    async with GatewayWorld(1, downstream={"max_body_bytes": 4_000_000}) as world:
        for name, (encoding, encode) in ENCODINGS.items():
            answer = await world.client.post(
                CHAT, content=encode(endless), headers={"content-encoding": encoding}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-encoding"), name
        assert not world.served()
    noise = form % bytes(random.Random(1).choices(b"0123456789abcdef", k=400_000))  # grows to twice its size
    async with GatewayWorld(1, downstream={"max_body_bytes": 300_000}) as world:
        for name, (encoding, encode) in ENCODINGS.items():
            answer = await world.client.post(
                CHAT, content=encode(noise), headers={"content-encoding": encoding}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large"), name
        assert not world.served()


async def test_torn_and_mislabelled_bodies_are_the_clients_errors(world: GatewayWorld) -> None:
    """400, and where the encoding shows it, the header that is wrong."""
    for name, (encoding, encode) in ENCODINGS.items():
        headers = {"content-encoding": encoding}
        torn = await world.client.post(CHAT, content=encode(_chat("s-1"))[:-12], headers=headers)
        assert torn.status_code == 400, name
        other = await world.client.post(CHAT, content=b"not compressed at all", headers=headers)
        assert (other.status_code, other.json()["error"]["param"]) == (400, "content-encoding"), name
    assert not world.served()


# -- audio


async def test_a_form_with_a_file_goes_to_the_backend_of_its_model() -> None:
    """A real multipart upload, sized and in chunks: routed by the form's model, not a byte changed."""
    async with GatewayWorld(2) as world:
        world.backends[1].model = "whisper-1"
        await world.wait_for(
            lambda: (
                {frozenset(one.models or ()) for one in world.gateway.fleet.view.backends.values()}
                == {frozenset({"fake-model"}), frozenset({"whisper-1"})}
            )
        )
        sound = random.Random(1).randbytes(300_000)
        world.backends[1].default = respond(b'{"text":"hello"}')
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            answer = await world.client.post(
                path,
                data={"model": "whisper-1", "language": "en"},
                files={"file": ("a.wav", sound, "audio/wav")},
            )
            assert answer.json() == {"text": "hello"}
            request = world.backends[1].requests[-1]
            assert request.header("content-type") == answer.request.headers["content-type"]
            assert request.body == answer.request.read()
            assert sound in request.body
        content_type = answer.request.headers["content-type"]
        chunks = b"".join(chunk(request.body[at : at + 65_536]) for at in range(0, len(request.body), 65_536))
        async with RawClient(world.gateway.port) as client:
            head = (
                f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\n"
                "Transfer-Encoding: chunked\r\n\r\n"
            )
            await client.send(head.encode() + chunks + b"0\r\n\r\n")
            assert (await client.read_response()).status == 200
        assert world.backends[1].requests[-1].body == request.body
        assert not world.backends[0].requests


async def test_a_form_of_an_unknown_model_is_404() -> None:
    """The form's model is checked like that of a JSON body."""
    async with GatewayWorld(1) as world:
        answer = await world.client.post(
            "/v1/audio/transcriptions",
            data={"model": "other"},
            files={"file": ("a.wav", b"RIFF", "audio/wav")},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_speech_is_streamed_as_it_comes() -> None:
    """Binary audio without a length: each piece arrives before the next is made, unaltered."""
    pieces = [random.Random(number).randbytes(10_000) for number in range(3)]
    gates = [asyncio.Event() for _ in pieces]

    async def speak(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n")
        for gate, piece in zip(gates, pieces, strict=True):
            await gate.wait()
            await turn.send(chunk(piece))
        await turn.send(b"0\r\n\r\n")

    async with GatewayWorld(1) as world, RawClient(world.gateway.port) as client:
        world.backends[0].script(speak)
        body = json.dumps({"model": "fake-model", "input": "hello", "voice": "alloy"}).encode()
        await client.send(post("/v1/audio/speech", body))
        status, _, headers = await client.read_head()
        assert (status, dict(headers)["content-type"]) == (200, "audio/mpeg")
        for gate, piece in zip(gates, pieces, strict=True):
            gate.set()
            came = b""
            while len(came) < len(piece):
                came += await client.read_chunk()
            assert came == piece
        assert await client.read_chunk() == b""
