"""Headers: what reaches a backend, what reaches a client, and what can never be in one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.wire.headers import (
    RequestHeads,
    clean_request_id,
    find_header,
    response_headers,
)
from gateway.wire.settings import HeaderSettings, KeySettings

Headers = list[tuple[bytes, bytes]]
ODD = "a\r\nEvil: 1"


def build(headers: Headers, *, settings: HeaderSettings | None = None, **options: object) -> list[bytes]:
    """Build a head and return its lines."""
    arguments: dict[str, object] = {"host": "backend:8000", "body_length": 5, "request_id": "rid-1"} | options
    head = RequestHeads(settings or HeaderSettings()).build("POST", "/v1/x", headers, **arguments)  # type: ignore[arg-type]  # the cases vary
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


def test_a_head_has_the_gateways_own_lines_once() -> None:
    """Request line, host, request id and length are ours, whatever the client sent."""
    lines = build(
        [
            (b"Host", b"gateway"),
            (b"Content-Length", b"999"),
            (b"Expect", b"100-continue"),
            (b"X-Request-Id", b"theirs"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Accept-Encoding", b"gzip"),
            (b"Content-Type", b"application/json"),
        ]
    )
    assert lines == [
        b"POST /v1/x HTTP/1.1",
        b"host: backend:8000",
        b"x-request-id: rid-1",
        b"Content-Type: application/json",
        b"content-length: 5",
    ]


def test_a_request_without_body_has_no_length() -> None:
    """GET and DELETE go out without framing headers."""
    assert not any(line.startswith(b"content-length") for line in build([], body_length=None))
    assert build([], body_length=0)[-1] == b"content-length: 0"


def test_an_upgrade_is_asked_for_in_our_own_words() -> None:
    """The client's Connection list cannot take the upgrade away, nor bring a second one."""
    lines = build(
        [
            (b"Connection", b"keep-alive, Upgrade, sec-websocket-protocol"),
            (b"Upgrade", b"WebSocket"),
            (b"Sec-WebSocket-Key", b"abc"),
            (b"Sec-WebSocket-Protocol", b"realtime"),
        ],
        body_length=None,
        is_upgrade=True,
    )
    assert lines[3:] == [b"Sec-WebSocket-Key: abc", b"connection: upgrade", b"upgrade: websocket"]


@pytest.mark.parametrize(
    "name", [*KeySettings().headers, "x-homing-auxiliary", "traceparent", "tracestate", "x-parent-session-id"]
)
def test_session_and_trace_headers_travel_unchanged(name: str) -> None:
    """A next gateway in the chain sees the same session, spelled the same."""
    header = (name.title().encode(), b' "odd",  value ')
    assert b"%b: %b" % header in build([header])


def as_answered(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers as the upstream connection hands them on: names in lower case."""
    return [(name.lower(), value) for name, value in headers]


@pytest.mark.parametrize(
    "name",
    ["Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "TE",
     "Trailer", "Transfer-Encoding", "Upgrade", "HTTP2-Settings"],
)  # fmt: skip
def test_headers_of_one_connection_stop_here(name: str) -> None:
    """Hop-by-hop headers reach neither the backend nor the client."""
    headers = [(name.encode(), b"x"), (b"Accept", b"*/*")]
    assert [line.split(b":")[0] for line in build(headers)[3:]] == [b"Accept", b"content-length"]
    assert response_headers(as_answered(headers)) == [(b"accept", b"*/*")]


def test_headers_named_by_connection_stop_here_too() -> None:
    """Wherever `Connection` stands and however its list is written."""
    headers = [
        (b"X-First", b"1"),
        (b"connection", b"close, X-FIRST ,x-last"),
        (b"X-Keep", b"2"),
        (b"Connection", b"x-other"),
        (b"x-other", b"3"),
        (b"X-Last", b"4"),
    ]
    assert build(headers)[3:] == [b"X-Keep: 2", b"content-length: 5"]
    assert response_headers(as_answered(headers)) == [(b"x-keep", b"2")]


def test_connection_cannot_take_away_what_the_gateway_sets() -> None:
    """A client that lists `host` or `content-length` in `Connection` changes nothing of ours."""
    lines = build(
        [(b"Connection", b"content-length, authorization")], credential=(b"authorization", b"Bearer W")
    )
    assert lines[-2:] == [b"authorization: Bearer W", b"content-length: 5"]
    lines = build([(b"Connection", b"host, x-request-id")])
    assert lines[:3] == [b"POST /v1/x HTTP/1.1", b"host: backend:8000", b"x-request-id: rid-1"]


def test_a_backends_key_replaces_the_clients_credentials() -> None:
    """With a key for the backend, the client's key never leaves the gateway; without, it passes."""
    headers = [(b"Authorization", b"Bearer C"), (b"X-Api-Key", b"C2")]
    replaced = build(headers, credential=(b"authorization", b"Bearer W"))
    assert replaced[3:] == [b"authorization: Bearer W", b"content-length: 5"]
    assert build(headers)[3:5] == [b"Authorization: Bearer C", b"X-Api-Key: C2"]


@pytest.mark.parametrize(
    "name", ["X-Homing-Backend", "x-homing-affinity", "X-Data-Parallel-Rank", "X-Forwarded-For",
             "X-Forwarded-Host", "Forwarded", "X-Real-IP", "X-Override-Rid", "x-dynamo-request-id"],
)  # fmt: skip
def test_clients_cannot_speak_for_the_gateway(name: str) -> None:
    """Internal, engine-control and forged forwarding headers are dropped, and other names for a request."""
    assert build([(name.encode(), b"1")])[3:] == [b"content-length: 5"]


def test_a_trusted_proxy_may_say_whom_it_forwards_for() -> None:
    """With the option on, forwarding headers pass; internal ones still do not."""
    trusting = HeaderSettings(trust_forwarded_headers=True, stripped_headers=("x-mine",))
    headers = [(b"X-Forwarded-For", b"1.2.3.4"), (b"X-Homing-Backend", b"b"), (b"X-Mine", b"1")]
    assert build(headers, settings=trusting)[3:] == [b"X-Forwarded-For: 1.2.3.4", b"content-length: 5"]


def test_answers_do_not_carry_a_backends_framing_or_our_names() -> None:
    """The relay sets framing; `x-homing-*` is the gateway's alone; all the rest passes in order."""
    headers = [
        (b"Content-Type", b"text/event-stream"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-Homing-Backend", b"spoofed"),
        (b"Set-Cookie", b"a=1"),
        (b"Set-Cookie", b"b=2"),
        (b"Content-Length", b"3"),
    ]
    answered = response_headers(as_answered(headers))
    assert [name for name, _ in answered] == [b"content-type", b"set-cookie", b"set-cookie"]


@pytest.mark.parametrize("bad", [b"a\r\nEvil: 1", b"a\nEvil: 1", b"a\rb", b"a\0b"])
@pytest.mark.parametrize("place", ["name", "value"])
def test_line_breaks_and_nul_are_refused(bad: bytes, place: str) -> None:
    """Whatever a parser in front let through, no second header or request comes out."""
    header = (bad, b"x") if place == "name" else (b"x", bad)
    with pytest.raises(BadRequest):
        build([header])


@pytest.mark.parametrize(
    ("option", "value"),
    [("request_id", ODD), ("host", ODD), ("credential", (b"authorization", ODD.encode()))],
)
def test_line_breaks_in_our_own_values_are_refused(option: str, value: object) -> None:
    """Configuration and ids are checked with the rest."""
    ours: dict[str, Any] = {option: value}
    with pytest.raises(BadRequest):
        build([], **ours)


@settings(max_examples=150, deadline=None)
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"Connection", b"X-A", b"x-a", b"Host", b"TE", b"x-homing-a"])
            | st.binary(max_size=4),
            st.sampled_from([b"x-a", b"close", b"te, x-a"]) | st.binary(max_size=6),
        ),
        max_size=6,
    )
)
def test_any_headers_give_one_head_or_a_bad_request(headers: Headers) -> None:
    """There is one blank line, at the end, and one line per header that stayed."""
    try:
        lines = build(headers)
    except BadRequest:
        return
    assert all(b"\n" not in line and b"\r" not in line for line in lines)
    assert len(lines) <= len(headers) + 4
    assert lines.count(b"host: backend:8000") == 1


@pytest.mark.parametrize("value", ["abc", "A-1_b.c:d/e", "f" * 128, b"abc"])
def test_ordinary_request_ids_are_kept(value: str | bytes) -> None:
    """An id of the usual alphabet and length is the client's to choose."""
    assert clean_request_id(value) == (value.decode() if isinstance(value, bytes) else value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "f" * 129,
        "a b",
        "a\r\n[ERROR] fake",
        "${jndi:ldap://x}",
        "é",
        b"\xff",
        "a\0",
        "<script>",
        "abc\n",
    ],
)
def test_request_ids_that_could_do_harm_are_replaced(value: str | bytes | None) -> None:
    """Log injection, templates, markup and endless ids are not passed on."""
    assert clean_request_id(value) is None


def test_a_header_is_found_by_its_lower_case_name() -> None:
    """The first value counts."""
    assert find_header([(b"x-a", b"1"), (b"x-a", b"2")], b"x-a") == b"1"
    assert find_header([], b"x-a") is None
