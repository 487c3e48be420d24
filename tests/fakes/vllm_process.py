"""`python tests/fakes/vllm_process.py PORT`: an engine as a process that behaves as vLLM under a gateway.

The head of a stream leaves before the prompt is computed. The prefill takes time by the tokens that no
earlier prompt of this life began with; then come events with content, usage with cached tokens, `[DONE]`. A
full queue is 503. The answer repeats the marker in the last message, so that a client knows its own answer.
`POST /fail` makes the next answers errors: in place of content, or behind some of it.

What happens to each request is a JSON line on standard output, and survives a kill.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

MODEL = "fake-model"
NUM_EVENTS = 12
EVENT_INTERVAL_S = 0.035
PREFILL_TOKENS_PER_S = 6_000.0
LEAST_PREFILL_S = 0.04
MAX_RUNNING, MAX_WAITING = 8, 16
MAX_PREFIXES = 4_000
FAILURE = {
    "error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
}
FULL = {"error": {"message": "the queue is full", "type": "ServiceUnavailable", "code": 503}}


def answer_pieces(marker: str) -> list[str]:
    """What each event of the answer to this marker holds."""
    return [f"{marker} ", *(f"w{number} " for number in range(1, NUM_EVENTS))]


class PrefixCache:
    """The openings of the conversations that were computed, by how many tokens they have."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def take(self, messages: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Returns the tokens of the prompt, and how many of them were computed before. Keeps all."""
        num_tokens = num_cached = key = 0
        for message in messages:
            num_tokens += len(message["content"]) // 4
            key = hash((key, message["role"], message["content"]))
            if key in self._tokens:
                num_cached = num_tokens
            self._tokens[key] = num_tokens
            self._tokens.move_to_end(key)
        while len(self._tokens) > MAX_PREFIXES:
            self._tokens.popitem(last=False)
        return num_tokens, num_cached


class Engine:
    """One life of the process."""

    def __init__(self) -> None:
        self._started_wall_s = time.time()
        self._cache = PrefixCache()
        self._running, self._num_here = asyncio.Semaphore(MAX_RUNNING), 0
        self._failures: Iterator[str] = iter(())

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/fail", self._fail)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        num_running = min(self._num_here, MAX_RUNNING)
        return web.Response(
            text=f"process_start_time_seconds {self._started_wall_s}\n"
            f'vllm:num_requests_running{{model_name="{MODEL}"}} {num_running}\n'
            f'vllm:num_requests_waiting{{model_name="{MODEL}"}} {self._num_here - num_running}\n'
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _fail(self, request: web.Request) -> web.Response:
        order = await request.json()
        self._failures = itertools.repeat(order["how"], order["count"])
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        request_id = request.headers.get("x-request-id", "").partition("-req-")[0]  # as the client gave it
        if self._num_here >= MAX_RUNNING + MAX_WAITING:
            self._tell(request_id, "full")
            return web.json_response(FULL, status=503)
        self._num_here += 1
        self._tell(request_id, "arrived")
        try:
            body = await request.json()
            answer = self._stream if body.get("stream") else self._whole
            response = await answer(request, body)
            self._tell(request_id, "answered")
            return response
        finally:
            self._num_here -= 1
            self._tell(request_id, "left")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)  # vLLM sends it before it computes anything
        async with self._running:
            usage = await self._prefill(body)
            failure = next(self._failures, None)
            events = _events(answer_pieces(_marker(body)), usage)
            if failure is not None:
                events = [*(events[:4] if failure == "in_stream" else ()), _event(FAILURE), events[-1]]
            for event in events[:-1]:
                await response.write(event)
                await asyncio.sleep(EVENT_INTERVAL_S)
        await response.write_eof(events[-1])
        return response

    async def _whole(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        async with self._running:
            usage = await self._prefill(body)
            if next(self._failures, None) is not None:
                return web.json_response(FAILURE, status=500)
            await asyncio.sleep(NUM_EVENTS * EVENT_INTERVAL_S)
        message = {"role": "assistant", "content": "".join(answer_pieces(_marker(body)))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        num_tokens, num_cached = self._cache.take(body["messages"])
        await asyncio.sleep(max(LEAST_PREFILL_S, (num_tokens - num_cached) / PREFILL_TOKENS_PER_S))
        return {
            "prompt_tokens": num_tokens,
            "completion_tokens": NUM_EVENTS,
            "total_tokens": num_tokens + NUM_EVENTS,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _tell(self, request_id: str, what: str) -> None:
        line = {"wall_s": round(time.time(), 3), "id": request_id, "what": what, "num_here": self._num_here}
        print(json.dumps(line), flush=True)


def _marker(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"]).split()[0]


def _events(pieces: Sequence[str], usage: dict[str, Any]) -> list[bytes]:
    payloads: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    ]
    payloads += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    payloads[-1]["choices"][0]["finish_reason"] = "stop"
    return [*map(_event, payloads), _event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


async def serve(port: int) -> None:
    """Until killed."""
    runner = web.AppRunner(
        Engine().application(), access_log=None, handler_cancellation=True, keepalive_timeout=5
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
