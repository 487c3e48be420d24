"""`python tests/fakes/engine_process.py PORT`: an engine as a process; it answers slowly and stops politely.

It behaves towards a gateway as our worker does: streams with usage, a start time in its metrics, and after
SIGTERM 503 for new requests while running ones finish. It computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

from aiohttp import web

MODEL = "fake-model"
NUM_EVENTS = 12
EVENT_INTERVAL_S = 0.03


class Engine:
    """One life of the process."""

    def __init__(self) -> None:
        self._started_wall_s = time.time()
        self._is_draining = False
        self._num_running = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        deadline_s = time.monotonic() + timeout_s
        while self._num_running and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f"process_start_time_seconds {self._started_wall_s}\n"
            f"vllm:num_requests_running {self._num_running}\nvllm:num_requests_waiting 0\n"
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            return web.json_response({"error": "draining"}, status=503, headers={"retry-after": "2"})
        self._num_running += 1
        try:
            body = await request.json()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for event in _events(len(json.dumps(body["messages"])) // 4):
                await response.write(event)
                await asyncio.sleep(EVENT_INTERVAL_S)
            await response.write_eof()
            return response
        finally:
            self._num_running -= 1


def _events(num_prompt_tokens: int) -> list[bytes]:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": NUM_EVENTS}
    payloads: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": f"w{n} "}}]} for n in range(NUM_EVENTS)
    ]
    payloads[-1]["choices"][0]["finish_reason"] = "stop"
    payloads.append({"choices": [], "usage": usage})
    return [f"data: {json.dumps(one)}\n\n".encode() for one in payloads] + [b"data: [DONE]\n\n"]


async def serve(port: int) -> None:
    engine, stop = Engine(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(engine.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await stop.wait()
    await engine.drain(timeout_s=20)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
