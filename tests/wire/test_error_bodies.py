"""Errors as clients see them: right shape per dialect, honest about retries, and understood by real SDKs."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    MethodNotAllowed,
    ModelNotFound,
    NoBackend,
    Overloaded,
    TooManyRequests,
    Unauthorized,
    UpstreamConnectFailed,
    UpstreamTimeout,
    UpstreamTruncated,
)
from gateway.values import Api
from gateway.wire.error_bodies import error_response, stream_error

OPENAI_APIS = [api for api in Api if api not in (Api.MESSAGES, Api.MESSAGE_BATCHES)]


@pytest.mark.parametrize("api", OPENAI_APIS)
def test_openai_shaped_errors(api: Api) -> None:
    """Every API but Messages answers with OpenAI's error object."""
    status, body, headers = error_response(api, BadRequest("the field `model` is missing", param="model"))
    assert status == 400
    assert json.loads(body) == {
        "error": {
            "message": "the field `model` is missing",
            "type": "invalid_request_error",
            "param": "model",
            "code": "invalid_request",
        }
    }
    assert dict(headers)["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (ModelNotFound("x"), "not_found_error"),
        (BodyTooLarge("x"), "request_too_large"),
        (TooManyRequests("x"), "rate_limit_error"),
        (Overloaded("x"), "overloaded_error"),
        (UpstreamTimeout("x"), "timeout_error"),
        (UpstreamConnectFailed("x"), "api_error"),
        (GatewayError("x"), "api_error"),
    ],
)
def test_anthropic_shaped_errors(error: GatewayError, kind: str) -> None:
    """Messages answers with Anthropic's error object and its types."""
    status, body, _ = error_response(Api.MESSAGES, error)
    assert status == error.status
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "x"}}


@pytest.mark.parametrize(
    ("error", "retry_after", "should_retry"),
    [
        (NoBackend("x", retry_after_s=2.2), "3", None),
        (NoBackend("x"), "1", None),
        (NoBackend("x", retry_after_s=0.0), "1", None),
        (TooManyRequests("x", retry_after_s=0.25), "1", None),
        (TooManyRequests("x", retry_after_s=float("inf")), None, None),
        (UpstreamConnectFailed("x"), None, None),
        (UpstreamTimeout("x"), None, "false"),
        (BadRequest("x"), None, "false"),
        (ModelNotFound("x"), None, "false"),
        (BodyTooLarge("x"), None, "false"),
    ],
)
def test_retries_are_asked_for_only_where_they_can_help(
    error: GatewayError, retry_after: str | None, should_retry: str | None
) -> None:
    """Whole seconds and never 0; `x-should-retry: false` for what cannot succeed by repetition."""
    headers = dict(error_response(Api.CHAT, error)[2])
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == should_retry


def test_short_waits_are_told_in_milliseconds_too() -> None:
    """SDKs prefer the finer header."""
    headers = dict(error_response(Api.CHAT, TooManyRequests("x", retry_after_s=0.25))[2])
    assert headers["retry-after-ms"] == "250"


def test_a_wrong_method_lists_the_right_ones() -> None:
    """405 has `Allow`, as RFC 9110 demands."""
    status, _, headers = error_response(Api.CHAT, MethodNotAllowed("x", allow="POST"))
    assert (status, dict(headers)["allow"]) == (405, "POST")


def test_a_message_with_half_a_character_can_be_sent() -> None:
    """What was quoted from a request cannot break the answer."""
    assert json.loads(error_response(Api.CHAT, BadRequest("no \ud83d"))[1])["error"]["message"] == "no ?"


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES, Api.GENERATE])
@pytest.mark.parametrize("mid_event", [False, True])
def test_a_broken_stream_ends_with_one_error_event(api: Api, mid_event: bool) -> None:
    """It stands alone even after half an event, and invents neither `[DONE]` nor a finish reason."""
    before = b'data: {"choices":[{"delta":{"content":"Hel' if mid_event else b"data: {}\n\n"
    stream = before + stream_error(api, UpstreamTruncated("backend lost"), mid_event=mid_event)
    events = stream.split(b"\n\n")
    assert events[-1] == b""
    assert len(events) == 3
    payload = json.loads(events[1].rpartition(b"data: ")[2])
    assert payload["error"]["message"] == "backend lost"
    assert b"[DONE]" not in stream
    assert b"finish_reason" not in stream
    assert b"stop_reason" not in stream


def _http_library_of(sdk: Any) -> Any:
    """The HTTP library an SDK is built on: httpx, or in later versions its successor."""
    client = next(cls for cls in sdk.DefaultHttpxClient.__mro__ if cls.__name__ == "Client")
    return importlib.import_module(client.__module__.partition(".")[0])


def _read_stream(sdk: Any, api: Api, body: bytes) -> list[Any]:
    """Read `body` as a stream through an SDK; only its transport is ours."""
    http = _http_library_of(sdk)
    answer = http.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    client_type = sdk.Anthropic if api is Api.MESSAGES else sdk.OpenAI
    turn = {"role": "user", "content": "x"}
    with http.Client(transport=http.MockTransport(lambda _request: answer)) as http_client:
        client = client_type(api_key="k", base_url="http://gateway/v1", http_client=http_client)
        if api is Api.RESPONSES:
            return list(client.responses.create(model="m", input="x", stream=True))
        if api is Api.MESSAGES:
            return list(client.messages.create(model="m", max_tokens=5, messages=[turn], stream=True))
        return list(client.chat.completions.create(model="m", messages=[turn], stream=True))


@pytest.mark.parametrize(
    ("sdk_name", "api", "first"),
    [
        ("openai", Api.CHAT, b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'),
        (
            "openai",
            Api.RESPONSES,
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        ),
        (
            "anthropic",
            Api.MESSAGES,
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":"a"}}\n\n',
        ),
    ],
    ids=["openai-chat", "openai-responses", "anthropic"],
)
def test_official_sdks_raise_on_a_broken_stream(sdk_name: str, api: Api, first: bytes) -> None:
    """The SDK of each dialect raises an API error: nobody takes the torso for an answer."""
    sdk = pytest.importorskip(sdk_name)
    broken = first + stream_error(api, UpstreamTruncated("backend lost"), mid_event=False)
    with pytest.raises(sdk.APIError, match="backend lost"):
        _read_stream(sdk, api, broken)
