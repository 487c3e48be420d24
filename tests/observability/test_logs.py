"""What is logged of a request, what never is, and who may ask for more."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest
from fakes.backend import openai_answer
from fakes.gateway_world import GatewayWorld

from gateway.observability.logs import AccessLine, AccessLog, configure_logging, log_event
from gateway.redis_link.settings import RedisSettings
from gateway.sessions.redis_store import RedisStore
from gateway.values import SessionKey

TOKEN = "the-admin-token"
SECRETS = ("secret-prompt", "secret-session", "secret-key", "secret-tenant-value", TOKEN)


def listening(world: GatewayWorld) -> list[dict[str, Any]]:
    """The lines that the gateway writes of requests from now on."""
    lines: list[dict[str, Any]] = []
    recorder = world.gateway.recorder
    recorder.log, recorder.logs_requests = AccessLog(lambda data: lines.append(json.loads(data))), True
    return lines


async def ask(world: GatewayWorld, **headers: str) -> None:
    given = {"authorization": "Bearer secret-key", **headers}
    answer = await world.chat("secret-session", text="secret-prompt", stream=True, headers=given)
    assert answer.status_code == 200


async def test_the_access_line_tells_decision_times_and_tokens() -> None:
    """One JSON object per request, with what an operator needs and nothing that a client would mind."""
    async with GatewayWorld(1) as world:
        world.backends[0].default = openai_answer("hello", cached_tokens=3)
        lines = listening(world)
        await ask(world)
        world.gateway.ledger.drain()
        (line,) = lines
    assert line["event"] == "request"
    assert line["status"] == 200
    assert line["api"] == "chat"
    assert line["key_source"] == "header"
    assert line["backend"] == "b0"
    assert line["affinity"] == "new"
    assert line["reason"] == "new_placement"
    assert line["cached_tokens"] == 3
    assert line["attempts"] == 1
    assert 0 <= line["overhead_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    assert len(line["session"]) == 12
    assert not [secret for secret in SECRETS if secret in json.dumps(line)]


async def test_an_operator_may_have_one_request_told_in_full() -> None:
    """With the admin token, the candidates and their prices are logged, whatever the log level is."""
    async with GatewayWorld(2, environ={"HOMING_ADMIN_TOKEN": TOKEN}) as world:
        lines = listening(world)
        await ask(world, **{"x-homing-log-level": "debug", "x-homing-admin-token": TOKEN})
        access, debug = lines
        sent = [dict(one.headers) for backend in world.backends for one in backend.requests]
    assert access["event"] == "request"
    assert debug["event"] == "request_debug"
    assert debug["request_id"] == access["request_id"]
    assert {one["backend"] for one in debug["decision"]["candidates"]} == {"b0", "b1"}
    assert debug["binding"]["backend"] == access["backend"]
    assert not [secret for secret in SECRETS if secret in json.dumps(debug)]
    assert not [name for headers in sent for name in headers if name.startswith("x-homing-")]


async def test_one_request_is_told_in_full_where_others_are_not_told() -> None:
    """With `log.access` off there is this line and no other; it goes where access lines would."""
    told: list[dict[str, Any]] = []
    async with GatewayWorld(1, environ={"HOMING_ADMIN_TOKEN": TOKEN}) as world:
        assert not world.gateway.recorder.logs_requests
        world.gateway.recorder.log = AccessLog(lambda data: told.append(json.loads(data)))
        await ask(world)
        await ask(world, **{"x-homing-log-level": "debug", "x-homing-admin-token": TOKEN})
    assert [line["event"] for line in told] == ["request_debug"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-homing-log-level": "debug"},
        {"x-homing-log-level": "debug", "x-homing-admin-token": "guessed"},
        {"x-homing-log-level": "info", "x-homing-admin-token": TOKEN},
        {"x-homing-admin-token": TOKEN},
    ],
)
async def test_nobody_else_may(headers: dict[str, str]) -> None:
    """Without the token, or without asking for debug, there is the access line and no more."""
    async with GatewayWorld(1, environ={"HOMING_ADMIN_TOKEN": TOKEN}) as world:
        lines = listening(world)
        await ask(world, **headers)
    assert [line["event"] for line in lines] == ["request"]


async def test_without_an_admin_token_the_header_does_nothing() -> None:
    """An empty token is no token: it does not open what is not configured."""
    async with GatewayWorld(1) as world:
        lines = listening(world)
        await ask(world, **{"x-homing-log-level": "debug", "x-homing-admin-token": ""})
    assert [line["event"] for line in lines] == ["request"]


def test_a_hostile_value_cannot_forge_a_line() -> None:
    """Line breaks in data stay inside their JSON string."""
    written: list[bytes] = []
    AccessLog(written.append).write(
        AccessLine(
            time=1.0,
            request_id='x"\n{"event":"forged"}',
            api="chat",
            status=200,
            outcome="complete",
            duration_ms=1.0,
            attempts=1,
            key_source="none",
            model="a\r\nb",
        )
    )
    (data,) = written
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    assert msgspec.json.decode(data)["request_id"] == 'x"\n{"event":"forged"}'


def test_a_full_pipe_loses_the_line_and_no_request() -> None:
    """A log reader that has fallen asleep does not stop the gateway."""

    def refuse(_data: bytes) -> None:
        raise BlockingIOError

    AccessLog(refuse).write({"event": "request_debug"})


async def test_trouble_with_the_store_is_told_with_its_data(caplog: pytest.LogCaptureFixture) -> None:
    """Which part of it, or what it said: without that the line helps nobody."""
    store = RedisStore(RedisSettings(url="redis://127.0.0.1:1/0"), environ={})
    while not store.link.is_open(0):
        await store.get(SessionKey("0" * 32))
    await store.close()
    (record,) = [one for one in caplog.records if one.getMessage() == "session_store_unavailable"]
    assert vars(record)["fields"] == {"shard": 0}


def test_events_are_json_with_their_data() -> None:
    """State changes carry their data as fields; foreign libraries' text becomes the event."""
    lines: list[bytes] = []
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("info", lines.append)
        log_event("backend_state", backend='b"\n0', before="ready", after="down")
        log_event("unheard", level=logging.DEBUG)
        logging.getLogger("aiohttp").warning("something %s", "odd")
    finally:
        root.handlers[:], root.level = handlers, level
    state, foreign = [json.loads(line) for line in lines]
    assert (state["event"], state["backend"], state["level"]) == ("backend_state", 'b"\n0', "info")
    assert (foreign["event"], foreign["logger"]) == ("something odd", "aiohttp")
