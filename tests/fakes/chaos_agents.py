"""Clients of the chaos run: conversations that grow, leave early, try again; and how each request ended.

Each request has a marker of its own, which its answer must repeat. What a client saw is judged by it alone;
the gateways' own words are compared with that later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
from fakes.chaos_fleet import ChaosFleet, Gateway
from fakes.vllm_process import MODEL, answer_pieces

SYSTEM = "You are one of many agents that share this system prompt. " * 12
HANG_LIMIT_S = 90.0
MAX_TRIES = 6
ABORT_SHARE, WHOLE_SHARE, NAMED_SHARE = 0.12, 0.25, 0.6

COMPLETE, ABORTED, REFUSED = "complete", "aborted", "refused"
HTTP_ERROR, EVENT_ERROR, LATE = "http error", "event error", "broken after [DONE]"
"""Good ends, `REFUSED` only while that gateway restarts: the connection gave not one byte of an answer."""
CUT, TRUNCATED, FOREIGN, ODD, HUNG = "cut", "truncated", "foreign", "odd", "hung"
"""Bad ends: broken without a word; ended well without a finish; of another request; unknown form; never."""


@dataclass(slots=True)
class Attempt:
    """One request as its client saw it. Wall seconds."""

    request_id: str
    session: str
    turn: int
    gateway: int
    is_stream: bool
    began_s: float
    end: str = ""
    ended_s: float = 0.0
    status: int = 0
    detail: str = ""
    backend: str = ""
    affinity: str = ""
    reason: str = ""
    num_content: int = 0
    """Events with content."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Agents:
    """All clients together."""

    fleet: ChaosFleet
    attempts: list[Attempt] = field(default_factory=list)
    is_over: bool = False

    async def play(self, seed: int) -> None:
        """One agent: conversations, one after the other."""
        rng = Random(seed)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as http:
            for number in itertools.count():
                if self.is_over:
                    return
                await self._converse(http, rng, f"s{seed}-{number}-{rng.getrandbits(48):012x}")

    async def _converse(self, http: aiohttp.ClientSession, rng: Random, session: str) -> None:
        messages = [{"role": "system", "content": SYSTEM}]
        headers = {"x-session-id": session} if rng.random() < NAMED_SHARE else {}
        for turn in range(1, 2 + min(14, int(rng.expovariate(1 / 7)))):
            if self.is_over:
                return
            length = rng.randint(10, 120) + (300 if turn == 1 else 0)  # agents begin with files
            question = "Tell me more of it, please. " * length
            for number in range(MAX_TRIES):
                marker = f"{session}-{turn}-{number}"
                content = f"{marker} is the marker of this request of {session}. {question}"
                asked = [*messages, {"role": "user", "content": content}]
                gateway, is_stream = self._pick(rng).number, rng.random() > WHOLE_SHARE
                attempt = Attempt(marker, session, turn, gateway, is_stream, time.time())
                await self._ask(http, rng, attempt, headers, asked)
                self.attempts.append(attempt)
                if attempt.end == COMPLETE:
                    messages = [*asked, {"role": "assistant", "content": "".join(answer_pieces(marker))}]
                    break
                await asyncio.sleep(0.0 if attempt.end == ABORTED else rng.uniform(0.05, 1.0))
            else:
                return
            await asyncio.sleep(rng.uniform(0.05, 0.5))

    def _pick(self, rng: Random) -> Gateway:
        """As a balancer does that has been told who is ready."""
        return rng.choice([gateway for gateway in self.fleet.gateways if gateway.is_taken])

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        rng: Random,
        attempt: Attempt,
        headers: dict[str, str],
        messages: list[dict[str, str]],
    ) -> None:
        leaves_after_s = rng.uniform(0.0, 1.2) if rng.random() < ABORT_SHARE else None
        body = {"model": MODEL, "stream": attempt.is_stream, "messages": messages}
        url = f"{self.fleet.gateways[attempt.gateway].url}/v1/chat/completions"
        try:
            async with asyncio.timeout(leaves_after_s or HANG_LIMIT_S):
                async with http.post(
                    url, json=body, headers=headers | {"x-request-id": attempt.request_id}
                ) as answer:
                    await _read(attempt, answer)
        except TimeoutError:
            attempt.end = ABORTED if leaves_after_s is not None else HUNG
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            if attempt.status:
                _judge_break(attempt)
            else:
                attempt.end = REFUSED
                gateway = self.fleet.gateways[attempt.gateway]
                gateway.is_taken = gateway.is_taken and not gateway.lock.locked()
            attempt.detail = attempt.detail or repr(error)
        attempt.ended_s = time.time()


async def _read(attempt: Attempt, answer: aiohttp.ClientResponse) -> None:
    attempt.status = answer.status
    attempt.backend = answer.headers.get("x-homing-backend", "")
    attempt.affinity = answer.headers.get("x-homing-affinity", "")
    attempt.reason = answer.headers.get("x-homing-reason", "")
    if answer.status != 200:
        _judge_error(attempt, await answer.text())
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        await _read_stream(attempt, answer)
    else:
        _judge_whole(attempt, await answer.text())


def _judge_break(attempt: Attempt) -> None:
    """The connection broke in the body. After an error, that is as it should be."""
    if attempt.end == COMPLETE:  # a client that stops reading at [DONE] never sees it
        attempt.end = LATE
    elif attempt.end != EVENT_ERROR:
        attempt.end = CUT


def _judge_error(attempt: Attempt, text: str) -> None:
    try:
        attempt.detail = json.dumps(json.loads(text)["error"])
        attempt.end = HTTP_ERROR
    except (ValueError, KeyError, TypeError):
        attempt.end, attempt.detail = ODD, text[:300]


def _judge_whole(attempt: Attempt, text: str) -> None:
    try:
        body = json.loads(text)
        content, finish = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
    except (ValueError, KeyError, TypeError, IndexError):
        attempt.end, attempt.detail = ODD, text[:300]
        return
    _judge_content(attempt, content, is_finished=finish == "stop")


async def _read_stream(attempt: Attempt, answer: aiohttp.ClientResponse) -> None:
    content, finish = "", None
    while line := await answer.content.readline():
        if not line.startswith(b"data:"):
            continue
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            if attempt.end != EVENT_ERROR:
                _judge_content(attempt, content, is_finished=finish == "stop")
            continue
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            attempt.end, attempt.detail = EVENT_ERROR, json.dumps(event["error"])
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            content += piece
            attempt.num_content += bool(piece)
            finish = choice.get("finish_reason") or finish
    if not attempt.end:
        _judge_content(attempt, content, is_finished=False)


def _judge_content(attempt: Attempt, content: str, *, is_finished: bool) -> None:
    expected = "".join(answer_pieces(attempt.request_id))
    if not expected.startswith(content):
        attempt.end, attempt.detail = FOREIGN, content[:300]
    elif content != expected or not is_finished:
        attempt.end, attempt.detail = TRUNCATED, content[-300:]
    else:
        attempt.end = COMPLETE
