"""What handlers need: the server's state, and the context with engine, tokenizer, template, names and limits.

Decides the phases of the process as clients see them (loading, ready, draining, dead). The server listens
before the model is loaded, so that a health check can distinguish "starting" from "gone". Until then there is
no `ServingContext` and API requests get a 503.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field

from aiohttp import web

from engine_adapter.engine.core.async_engine import AsyncEngine
from engine_adapter.engine.kv.kv_event_publisher import KVEventPublisher
from engine_adapter.engine.text.chat_template import ChatTemplate
from engine_adapter.engine.text.grammar import GrammarCompiler
from engine_adapter.engine.text.tokenizer import Tokenizer
from engine_adapter.server.errors import model_not_found, overloaded
from engine_adapter.server.metrics import WorkerMetrics
from engine_adapter.server.response_store import ResponseStore
from engine_adapter.server.sampling_options import SamplingLimits


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingContext:
    """Everything a handler needs once the model is loaded."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarCompiler
    limits: SamplingLimits
    model_names: tuple[str, ...]  # the first is the one reported
    metrics: WorkerMetrics
    max_queue_s: float
    kv_events: KVEventPublisher | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    created_wall_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str) -> None:
        """Raise a 404 unless the name is served here."""
        if name not in self.model_names:
            raise model_not_found(name, self.model_name)

    def deadline_s(self) -> float:
        """The time, on the engine's clock, until which a request may wait for its first step."""
        return time.monotonic() + self.max_queue_s


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The mutable state of the process: its phase, requests in flight, and the context once there is one."""

    phase: Phase = Phase.LOADING
    detail: str = "loading the model"
    context: ServingContext | None = None
    num_in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last request has left
    started_wall_s: float = field(default_factory=time.time)

    def enter(self) -> None:
        """A request has begun."""
        self.num_in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        """A request has ended, successfully or not."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        if self.num_in_flight:
            await self.idle.wait()

    def ready_context(self) -> ServingContext:
        """Return the context, or raise a 503 while requests are not accepted."""
        if self.context is None or self.phase is not Phase.READY:
            raise overloaded(f"the worker is {self.phase.value}: {self.detail}", retry_after_s=2)
        return self.context


TAG_HEADERS = {"session_tag": "X-Homing-Session-Tag", "group_tag": "X-Homing-Group-Tag"}
MAX_TAG_LENGTH = 128


def tags_of(request: web.Request) -> dict[str, str]:
    """The opaque names by which the gateway asks what is resident; invalid ones count as absent."""
    given = {field_name: request.headers.get(header, "") for field_name, header in TAG_HEADERS.items()}
    return {name: tag for name, tag in given.items() if 0 < len(tag) <= MAX_TAG_LENGTH}


SERVER_STATE = web.AppKey("server_state", ServerState)


def context_of(request: web.Request) -> ServingContext:
    """The context for a handler.

    Raises:
        ApiError: 503 while loading, draining or dead.
    """
    return request.app[SERVER_STATE].ready_context()
