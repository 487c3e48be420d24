"""`python tests/fakes/chaos_engine.py PORT`: a vLLM-like engine for the chaos run, as a process.

It sends the head of a stream before it "computes", computes for what its cache lacks of a prompt, echoes the
conversation's mark in every token, and refuses with 503 when its queue is full. After SIGUSR1 the next
requests fail with an error event in place of content, after SIGUSR2 behind some.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

from aiohttp import web

NUM_TOKENS = 10
TOKEN_INTERVAL_S = 0.02
PREFILL_S_PER_TURN = 0.04
MOST_RUNNING = 24
NUM_FAILURES = 4


class ChaosEngine:
    """One life of the process."""

    def __init__(self) -> None:
        self._started_wall_s = time.time()
        self._num_running = 0
        self._num_cached: dict[str, int] = {}  # conversation -> messages whose KV is here
        self.failures: list[str] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", lambda _: _ok(b"{}"))
        app.router.add_get("/v1/models", lambda _: _ok(b'{"object":"list","data":[{"id":"fake-model"}]}'))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _metrics(self, _request: web.Request) -> web.Response:
        return await _ok(
            f"process_start_time_seconds {self._started_wall_s}\n"
            f"vllm:num_requests_running {self._num_running}\nvllm:num_requests_waiting 0\n".encode()
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self._num_running >= MOST_RUNNING:
            return web.json_response({"error": {"message": "the queue is full", "code": 503}}, status=503)
        messages = (await request.json())["messages"]
        mark = messages[0]["content"]
        self._num_running += 1
        try:
            return await self._stream(request, mark, len(messages))
        finally:
            self._num_running -= 1

    async def _stream(self, request: web.Request, mark: str, num_messages: int) -> web.StreamResponse:
        failure = self.failures.pop() if self.failures else None
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_cached = min(self._num_cached.get(mark, 0), num_messages)
        await asyncio.sleep(PREFILL_S_PER_TURN * (num_messages - num_cached))
        self._num_cached[mark] = num_messages
        for number in range(NUM_TOKENS):
            if failure == "first" or (failure == "later" and number == NUM_TOKENS // 2):
                error = {"message": "EngineCore died", "type": "InternalServerError", "code": 500}
                await response.write(_event({"error": error}))
                break
            reason = "stop" if number == NUM_TOKENS - 1 else None
            choice = {"index": 0, "delta": {"content": f"{mark} "}, "finish_reason": reason}
            await response.write(_event({"id": "c", "choices": [choice]}))
            await asyncio.sleep(TOKEN_INTERVAL_S)
        else:
            usage: dict[str, Any] = {"prompt_tokens": 40 * num_messages, "completion_tokens": NUM_TOKENS}
            usage["prompt_tokens_details"] = {"cached_tokens": 40 * num_cached}
            await response.write(_event({"id": "c", "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _ok(body: bytes) -> web.Response:
    return web.Response(body=body)


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def serve(port: int) -> None:
    engine, stop = ChaosEngine(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, engine.failures.extend, ["first"] * NUM_FAILURES)
    loop.add_signal_handler(signal.SIGUSR2, engine.failures.extend, ["later"] * NUM_FAILURES)
    runner = web.AppRunner(engine.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
