"""The headers of an answer: a backend's end-to-end ones, and what the gateway tells of its decision."""

from __future__ import annotations

from gateway.request.turn import Turn
from gateway.upstream.exchange import Exchange
from gateway.wire.headers import response_headers


def answer_headers(turn: Turn, exchange: Exchange, is_event_stream: bool) -> list[tuple[bytes, bytes]]:
    """The backend's end-to-end headers, and what the gateway tells about its decision."""
    assert turn.decision is not None
    headers = response_headers(exchange.headers)
    if turn.cors_headers:
        headers = [one for one in headers if not one[0].startswith(b"access-control-")]
        headers += turn.cors_headers
    if turn.charge is not None:
        headers = [one for one in headers if not one[0].startswith(b"x-ratelimit-")]
        headers += [(name.encode(), value.encode()) for name, value in turn.charge.headers()]
    if is_event_stream:
        headers.append((b"x-accel-buffering", b"no"))  # nginx in front would hold events back
    headers += [
        (b"x-request-id", turn.request_id.encode()),
        (b"x-homing-backend", turn.decision.backend_id.encode()),
        (b"x-homing-affinity", turn.affinity._value_.encode()),
        (b"x-homing-key-source", turn.facts.key_source._value_.encode()),
        (b"x-homing-reason", (turn.moved_reason or turn.decision.reason).encode()),
    ]
    return headers
