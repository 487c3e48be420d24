"""Bad input to the worker: the right status, the offending field, OpenAI's error object, never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine.worker_app import LIMIT_S, MODEL, Worker, finished_requests, running_worker
from fakes.tiny_checkpoint import write_tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.server.errors import ApiError
from engine_adapter.server.protocol import ChatRequest
from engine_adapter.server.request_body import decode
from engine_adapter.server.serving import Phase

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), context_tokens=256)


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint) as running:
        yield running


async def error_of(response: Any) -> dict[str, Any]:
    document = json.loads(await response.read())
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert response.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = document["error"]
    return error


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": 123}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -4}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
]


async def test_each_bad_chat_field_is_named(worker: Worker) -> None:
    """Wrong types, values out of range and unsupported fields: 400 with `param`."""
    for changes, param in CHAT_FAULTS:
        body = {"model": MODEL, "messages": USER, **changes}
        response = await worker.client.post(CHAT, json=body)
        error = await error_of(response)
        assert (response.status, error["param"]) == (400, param), (changes, error)
        assert error["type"] == "invalid_request_error"


COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": "x" * 300}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 50}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


async def test_each_bad_completion_field_is_named(worker: Worker) -> None:
    """Every illegal form of a prompt and every unsupported option: 400 with `param`."""
    for changes, param in COMPLETION_FAULTS:
        response = await worker.client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", **changes})
        error = await error_of(response)
        assert (response.status, error["param"]) == (400, param), (changes, error)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"messages":' + b"[" * 100_000, "invalid_type"),
        (b'{"extra":' + b"[" * 100_000, "invalid_json"),
        (b'{"a":NaN}', "invalid_json"),
        (b"\xff\xfe{\x00}\x00", "invalid_json"),
        (b'{"model": "\xc3("}', "invalid_json"),
        (b"null", "invalid_type"),
        (b"[]", "invalid_type"),
        (b"17", "invalid_type"),
        (b"{}", "missing_required_parameter"),
    ],
)
async def test_what_is_no_request_object_is_a_400(worker: Worker, raw: bytes, code: str) -> None:
    """Broken, foreign-encoded, absurdly nested or non-object JSON."""
    response = await worker.client.post(CHAT, data=raw, headers={"Content-Type": "application/json"})
    assert response.status == 400
    assert (await error_of(response))["code"] == code


@settings(max_examples=200)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\ud83nul1e9-', max_size=40).map(str.encode))
def test_no_bytes_crash_the_decoder(raw: bytes) -> None:
    """Whatever comes, the decoder returns a value or raises an ApiError with a 4xx."""
    status = 200
    try:
        decode(raw, ChatRequest)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


async def test_lone_surrogates_are_answered(worker: Worker) -> None:
    """Half an emoji in any text is replaced, not refused: a poisoned history stays usable."""
    raw = (
        b'{"model":"tiny","max_tokens":2,"user":"\\ud83d","messages":[{"role":"user","content":"a\\ud83d"}]}'
    )
    response = await worker.client.post(CHAT, data=raw, headers={"Content-Type": "application/json"})
    assert response.status == 200


async def test_a_byte_order_mark_is_no_error(worker: Worker) -> None:
    """Some editors save request files with one."""
    raw = b"\xef\xbb\xbf" + json.dumps({"model": MODEL, "messages": USER, "max_tokens": 1}).encode()
    response = await worker.client.post(CHAT, data=raw, headers={"Content-Type": "application/json"})
    assert response.status == 200


async def test_validation_comes_before_the_model_name(worker: Worker) -> None:
    """Missing messages with an unknown model: 400 for the field, not 404 for the name."""
    response = await worker.client.post(CHAT, json={"model": "gpt-5"})
    assert response.status == 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_unknown_model_is_a_404(worker: Worker, path: str) -> None:
    """With OpenAI's code, and the served name in the message; a huge name is cut."""
    body = {"model": "x" * 10_000, "messages": USER, "prompt": "a"}
    response = await worker.client.post(path, json=body)
    error = await error_of(response)
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in error["message"]
    assert len(error["message"]) < 300


async def test_framework_refusals_have_our_shape(worker: Worker) -> None:
    """404 and 405 (with Allow) are JSON errors too."""
    for method, path, status in [
        ("GET", "/nope", 404),
        ("POST", "/v1", 404),
        ("GET", CHAT, 405),
        ("PUT", "/health", 405),
    ]:
        response = await worker.client.request(method, path)
        await error_of(response)
        assert response.status == status
        assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/chat/completions/ HTTP/1.1", 404),
        (b"POST //v1/chat/completions HTTP/1.1", 404),
        (b"POST /v1/../health HTTP/1.1", 404),
        (b"POST /v1/%2e%2e/health HTTP/1.1", 404),
        (b"POST http://elsewhere/v1/chat/completions HTTP/1.1", 200),
        (b"HEAD /v1/models HTTP/1.1", 200),
        (b"POST /v1/chat/completions HTTP/1.0", 200),
    ],
)
async def test_odd_request_lines(worker: Worker, head: bytes, status: int) -> None:
    """Near misses of a path are 404, an absolute target counts by its path, HTTP/1.0 gets no chunks."""
    body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 2, "stream": True}).encode()
    fields = (
        b"\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(worker.client.server.host, worker.client.server.port)
    writer.write(head + fields % len(body) + body)
    async with asyncio.timeout(LIMIT_S):
        answer = await reader.read()
    writer.close()
    assert int(answer.split(b" ")[1]) == status
    if b"HTTP/1.0" in head:
        assert b"chunked" not in answer
        assert answer.endswith(b"data: [DONE]\n\n")
    if status == 404:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_found"


async def test_other_content_types_are_a_415(worker: Worker) -> None:
    """A form is not JSON; a missing header is taken for JSON."""
    response = await worker.client.post(CHAT, data={"a": "b"})
    assert response.status == 415
    await error_of(response)


async def test_a_body_over_the_limit_is_a_413(checkpoint: Path) -> None:
    """By declared length and by counted chunks alike; one byte under the limit passes."""
    async with running_worker(checkpoint, max_body_bytes=2000) as worker:
        body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 1}).encode()
        json_type = {"Content-Type": "application/json"}

        async def chunks() -> AsyncIterator[bytes]:
            yield body.ljust(1500)
            yield b" " * 600

        fits = await worker.client.post(CHAT, data=body.ljust(2000), headers=json_type)
        assert fits.status == 200
        for data in (body.ljust(2100), chunks()):
            response = await worker.client.post(CHAT, data=data, headers=json_type)
            assert response.status == 413
            assert (await error_of(response))["code"] == "request_too_large"


async def test_a_full_queue_is_a_503_with_retry_after(checkpoint: Path) -> None:
    """Requests beyond the waiting limit are refused at once, the others are answered."""
    async with running_worker(checkpoint, max_num_sequences=1, max_num_waiting=1) as worker:
        response = await worker.chat(n=8)
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await error_of(response))["code"] == "overloaded"
        assert (await worker.chat()).status == 200


async def test_a_request_that_waits_too_long_is_a_503(checkpoint: Path) -> None:
    """The limit is on the queue, never on an answer that has begun."""
    async with running_worker(checkpoint, max_queue_s=-1) as worker:
        response = await worker.chat(stream=True)
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert (await error_of(response))["code"] == "queue_timeout"
        assert await finished_requests(worker) == {"timeout": 1}


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING, Phase.DEAD])
async def test_requests_outside_the_ready_phase_are_refused(worker: Worker, phase: Phase) -> None:
    """503 with Retry-After for the API, while /live and /metrics go on."""
    worker.state.phase = phase
    assert (await worker.chat()).status == 503
    assert (await worker.client.get("/ready")).status == 503
    assert (await worker.client.get("/live")).status == 200
    assert (await worker.client.get("/metrics")).status == 200
    assert (await worker.client.get("/health")).status == (200 if phase is Phase.DRAINING else 503)


async def test_a_bug_becomes_a_plain_500(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception is logged, and its text does not reach the client."""
    worker.state.context = object()  # type: ignore[assignment]  # any attribute access on it fails
    response = await worker.client.get("/v1/models")
    error = await error_of(response)
    assert response.status == 500
    assert "attribute" not in error["message"]
    assert "request_failed" in caplog.text
    worker.state.context = worker.context
