"""Faults of the gateway itself: a log that cannot be written, a bug. They cost at most one request."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.backend import respond, stream
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient, post

from gateway.observability.logs import AccessLog
from gateway.replay.recording_file import RecordingFile
from gateway.request.proxy import Proxy
from gateway.sessions.memory import MemoryStore
from gateway.values import Binding, SessionKey

CHAT = b'{"model":"fake-model","messages":[{"role":"user","content":"hi"}]}'


def failing(error: Exception) -> AccessLog:
    """A log whose every write fails."""

    def write(_data: bytes) -> None:
        raise error

    return AccessLog(write)


class BrokenStore(MemoryStore):
    """Its contract says that a look-up never raises."""

    def peek(self, key: SessionKey) -> Binding | None:
        raise RuntimeError("a bug")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_log_that_cannot_be_written_loses_its_line(number: int) -> None:
    """Its reader sleeps or has gone, or the disk is full: no request fails for that."""
    failing(OSError(number, "cannot write")).write({"event": "request_debug"})


async def test_a_recording_that_cannot_go_on_ends_and_costs_no_request() -> None:
    """A full disk, found when what was held back is written: later lines, and the closing, do nothing."""
    full = Path("/dev/full")
    async with GatewayWorld(1, record_path=full) as world:
        for number in range(20):  # far more than a buffer's worth
            assert (await world.chat(f"s{number}")).status_code == 200
        world.assert_idle()
    RecordingFile(full).close()


@pytest.mark.parametrize("answer", [respond(b"{}"), stream(b"data: [DONE]\n\n")])
async def test_an_answer_that_has_ended_is_never_followed_by_another(answer: Any) -> None:
    """A bug after the last byte costs the record alone: a second head would answer the next request."""
    async with GatewayWorld(1) as world, RawClient(world.gateway.port) as client:
        world.backends[0].default = answer
        recorder = world.gateway.recorder
        recorder.log, recorder.logs_requests = failing(RuntimeError("a bug")), True
        await client.send(post("/v1/chat/completions", CHAT))
        first = await client.read_response()
        assert (first.status, first.is_complete) == (200, True)
        await client.send(post("/v1/chat/completions", CHAT))
        second = await client.read_response()
        assert (second.status, second.body, second.is_complete) == (200, first.body, True)
        world.assert_idle()


async def test_an_unforeseen_error_is_counted_with_the_status_that_the_client_got() -> None:
    """A bug before the first byte: 500 for the client, in the counters and in the access line."""
    lines: list[bytes] = []
    async with GatewayWorld(1) as world:
        recorder = world.gateway.recorder
        recorder.log, recorder.logs_requests = AccessLog(lines.append), True
        parts = replace(world.gateway.proxy_parts, sessions=BrokenStore(clock=time.monotonic))
        world.gateway.front.take_over(Proxy(parts), world.gateway.config)
        answer = await world.chat("alice")
        metrics = world.gateway.metrics
        assert answer.status_code == 500
        assert metrics.requests["chat", "500", "not_sent"] == 1
        assert metrics.errors["internal", "internal_error"] == 1
        assert b'"status":500' in lines[0]
        world.assert_idle()
