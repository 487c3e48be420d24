"""A whole gateway on real sockets in front of scripted backends, in one event loop.

`async with GatewayWorld(num_backends=3) as world:` gives a started gateway whose backends are ready.
Probes are answered apart, so a script is consumed by the test's own requests only.
"""

from __future__ import annotations

import asyncio
import collections
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from fakes.backend import Behaviour, FakeBackend, ReceivedRequest, Turn, respond

from gateway.config.config import parse_config
from gateway.process.gateway import Gateway
from gateway.values import BackendId, BackendState

PROBED = ("/health", "/metrics", "/v1/models", "/is_sleeping")
FAST_HEALTH = {"probe_interval_s": 0.2, "suspect_interval_s": 0.02, "healthy_after": 1, "min_down_s": 0.05}


class ProbedBackend(FakeBackend):
    """A fake backend whose GETs (health, models, metrics) never touch the script or the record."""

    start_time_s: float = 1_000.0
    health: Behaviour | None = None  # None: it is well
    more_metrics: str = ""
    model_card: dict[str, Any] | None = None  # None: its name alone
    num_lists: int = 0  # how often its models were listed
    sleeps: bool | None = None  # what it answers when it is asked; None: it has no such path

    def fall_asleep(self, tells_in: str) -> None:
        """Answer nothing but probes; say so in the `path` for it or in `metrics`."""
        self._tell_sleep(tells_in, is_asleep=True)

    def wake_up(self, tells_in: str) -> None:
        self._tell_sleep(tells_in, is_asleep=False)

    def _tell_sleep(self, tells_in: str, *, is_asleep: bool) -> None:
        if tells_in == "path":
            self.sleeps = is_asleep
        else:
            state = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
            self.more_metrics = f"{state} {0.0 if is_asleep else 1.0}\n"

    async def _serve_one(
        self, connection_id: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        request = await self.read_request(connection_id, reader)
        turn = Turn(self, request, reader, writer)
        if request.method == "GET" and request.target in PROBED:
            await self._answer_probe(turn, request)
            return turn.keeps_open
        return await self.answer(turn)

    async def _answer_probe(self, turn: Turn, request: ReceivedRequest) -> None:
        if request.target == "/metrics":
            text = f"process_start_time_seconds {self.start_time_s}\n{self.more_metrics}"
            await respond(text.encode())(turn)
        elif request.target == "/v1/models":
            self.num_lists += 1
            cards = [self.model_card or {"id": self.model}]
            await respond(json.dumps({"object": "list", "data": cards}).encode())(turn)
        elif request.target == "/is_sleeping":
            if self.sleeps is None:
                await respond(b"{}", status=404)(turn)
            else:
                await respond(json.dumps({"is_sleeping": self.sleeps}).encode())(turn)
        else:
            await (self.health or respond())(turn)


class GatewayWorld:
    """The gateway under test, its backends and a client."""

    def __init__(
        self,
        num_backends: int = 2,
        *,
        num_gateways: int = 1,
        environ: dict[str, str] | None = None,
        record_path: Path | None = None,
        kinds: Sequence[str] = (),
        **config: Any,
    ) -> None:
        """`kinds`: the engine of each backend; vLLM where it is left out."""
        self._kinds = [*kinds, *["vllm"] * num_backends]
        self.backends = [ProbedBackend() for _ in range(num_backends)]
        self._config = config
        self._environ = environ or {}
        self._record_path = record_path
        self._num_gateways = num_gateways
        self.data: dict[str, Any] = {}  # the configuration as a reload will read it
        self._gateways: list[Gateway] = []
        self.clients: list[httpx.AsyncClient] = []
        self.admins: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        for backend in self.backends:
            await backend.start()
        self.data = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "log": {"access": False, "level": "error"},
            "health": FAST_HEALTH,
            "backends": [
                {"id": f"b{number}", "url": backend.base_url, "engine": self._kinds[number]}
                for number, backend in enumerate(self.backends)
            ],
            **self._config,
        }
        for _ in range(self._num_gateways):
            gateway = Gateway(
                parse_config(self.data),
                load=lambda: parse_config(self.data),
                environ=self._environ,
                record_path=self._record_path,
            )
            await gateway.start()
            self._gateways.append(gateway)
            self.clients.append(httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60))
            admin_url = f"http://127.0.0.1:{gateway.admin_port}"
            self.admins.append(httpx.AsyncClient(base_url=admin_url, timeout=60))
        await self.wait_for(self._all_ready)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in (*self.clients, *self.admins):
            await client.aclose()
        for gateway in self.gateways:
            await gateway.stop(drain_timeout_s=0)
        for backend in self.backends:
            await backend.stop()

    def _all_ready(self) -> bool:
        return all(
            backend.state is BackendState.READY
            for gateway in self.gateways
            for backend in gateway.fleet.view.backends.values()
        )

    @property
    def gateways(self) -> list[Gateway]:
        """All gateways, with every request that has ended written down."""
        for gateway in self._gateways:
            gateway.ledger.drain()
        return self._gateways

    @property
    def gateway(self) -> Gateway:
        """The first gateway, for tests that need one."""
        return self.gateways[0]

    @property
    def client(self) -> httpx.AsyncClient:
        return self.clients[0]

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.admins[0]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def state(self, number: int) -> str:
        backend = self.gateway.fleet.view.get(BackendId(f"b{number}"))
        return backend.state.value if backend else BackendState.REMOVED.value

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Until `condition` holds. Polls: what is waited for happens in the gateway's own tasks."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def chat(self, session: str | None = None, *, text: str = "hi", **fields: Any) -> httpx.Response:
        """One chat request; `headers=`, `at=` (which gateway) and any body field may be given."""
        headers = fields.pop("headers", {})
        client = self.clients[fields.pop("at", 0)]
        if session is not None:
            headers = {"x-session-id": session, **headers}
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        body = {"model": "fake-model", "messages": messages, **fields}
        return await client.post("/v1/chat/completions", json=body, headers=headers)

    def ages_s(self) -> list[float]:
        """How long each backend has been in its present state."""
        now_s = time.monotonic()
        return [now_s - backend.since_s for backend in self.gateway.fleet.view.backends.values()]

    def served(self) -> collections.Counter[int]:
        """Requests by backend number."""
        return collections.Counter(
            {
                number: len(backend.requests)
                for number, backend in enumerate(self.backends)
                if backend.requests
            }
        )

    def assert_idle(self) -> None:
        """Every gauge is at zero."""
        for gateway in self.gateways:
            assert gateway.proxy.num_in_flight == 0
            for backend_id in gateway.fleet.view.backends:
                assert gateway.router.in_flight(backend_id) == 0
