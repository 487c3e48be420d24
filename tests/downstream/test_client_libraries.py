"""What we may send beyond the answer, interim heads and SSE comments, disturbs no client library.

The probes of `gateway.downstream.half_close` rest on this.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
import requests
from fakes.backend import STREAM_HEAD, FakeBackend, chat_body, chat_events, chunk, raw

from gateway.downstream.half_close import PROBE_DELAYS_S
from gateway.downstream.request import CONTINUE

PROBES = CONTINUE * len(PROBE_DELAYS_S)
USAGE: dict[str, object] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
BODY = json.dumps(chat_body("Hello there", USAGE, "m")).encode()
ANSWER = PROBES + b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
    BODY
)
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def commented_stream(events: list[bytes]) -> bytes:
    """Probes before the head, and a comment before, between and behind the events."""
    comment = chunk(b":\n")
    body = comment + b"".join(chunk(event) + comment for event in events)
    return PROBES + STREAM_HEAD + body + b"0\r\n\r\n"


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend(default=raw(ANSWER + BODY)) as started:
        yield started


@pytest.fixture
async def streaming() -> AsyncIterator[FakeBackend]:
    events = chat_events("Hello there", USAGE, "m")
    async with FakeBackend(default=raw(commented_stream(events))) as started:
        yield started


async def test_openai(backend: FakeBackend, streaming: FakeBackend) -> None:
    """openai-python: whole and streamed."""
    async with openai.AsyncOpenAI(base_url=f"{backend.base_url}/v1", api_key="x", max_retries=0) as client:
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello there"
    async with openai.AsyncOpenAI(base_url=f"{streaming.base_url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        deltas = [part.choices[0].delta.content async for part in stream if part.choices]
    assert "".join(delta or "" for delta in deltas) == "Hellothere"


async def test_anthropic() -> None:
    """anthropic-python: streamed, with comments between its named events."""
    message: dict[str, object] = {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    payloads: list[dict[str, object]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    events = [f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n".encode() for payload in payloads]
    async with (
        FakeBackend(default=raw(commented_stream(events))) as backend,
        anthropic.AsyncAnthropic(base_url=backend.base_url, api_key="x", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=5, messages=MESSAGES) as stream,
    ):
        assert [text async for text in stream.text_stream] == ["Hello"]


async def test_httpx(backend: FakeBackend) -> None:
    """httpx (h11)."""
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            response = await client.post(f"{backend.base_url}/v1/chat/completions", json={})
            assert (response.status_code, response.content) == (200, BODY)
    assert backend.num_connections == 1


async def test_aiohttp(backend: FakeBackend) -> None:
    """aiohttp's client."""
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.post(f"{backend.base_url}/v1/chat/completions", data=b"{}") as response:
                assert (response.status, await response.read()) == (200, BODY)


async def test_requests(backend: FakeBackend) -> None:
    """requests (http.client), which skips no other interim status than 100."""

    def call() -> tuple[int, bytes]:
        with requests.Session() as session:
            response = session.post(f"{backend.base_url}/v1/chat/completions", data=b"{}", timeout=5)
            return response.status_code, response.content

    assert await asyncio.to_thread(call) == (200, BODY)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl(backend: FakeBackend) -> None:
    """curl."""
    process = await asyncio.create_subprocess_exec(
        "curl",
        "--silent",
        "--fail",
        "--data",
        "{}",
        f"{backend.base_url}/v1/chat/completions",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert (process.returncode, output) == (0, BODY)
