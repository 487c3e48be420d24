"""Lists, adds and removes pins on engines, with one bounded request each.

The engine decides what is pinned; only our own worker has pins (`/v1/kv/pins`). Failures become errors that
name the backend. Keeps no state.
"""

from __future__ import annotations

import asyncio
import re

import msgspec

from gateway.admin.answers import Pin
from gateway.errors import Conflict, UpstreamUnavailable
from gateway.fleet.pools import UpstreamPools
from gateway.values import BackendId

ENGINES_WITH_PINS = frozenset(("torch",))
ASK_TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_PATH = "/v1/kv/pins"
_PIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")  # it becomes part of a path


class PinTable(msgspec.Struct):
    """An engine's list of pins."""

    pins: list[Pin] = []
    budget_blocks: int = 0
    block_size: int = 0


class _EngineError(msgspec.Struct):
    message: str = ""


class _EngineProblem(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


class EnginePins:
    """Requests to engines about pins. All methods raise UpstreamError or Conflict."""

    def __init__(self, pools: UpstreamPools) -> None:
        self._pools = pools

    async def table(self, backend_id: BackendId) -> PinTable:
        try:
            return msgspec.json.decode(await self._ask(backend_id, "GET", _PATH), type=PinTable)
        except msgspec.DecodeError as error:
            raise UpstreamUnavailable(f"backend {backend_id} did not return a valid list of pins") from error

    async def add(self, backend_id: BackendId, order: bytes) -> None:
        await self._ask(backend_id, "POST", _PATH, order)

    async def remove(self, backend_id: BackendId, name: str) -> list[Pin]:
        """Remove the pins with this name or id and return them."""
        found = [pin for pin in (await self.table(backend_id)).pins if name in (pin.name, pin.id)]
        for pin in found:
            if not _PIN_ID.match(pin.id):
                raise UpstreamUnavailable(f"backend {backend_id} returned a pin with an invalid id")
            await self._ask(backend_id, "DELETE", f"{_PATH}/{pin.id}")
        return found

    async def _ask(self, name: BackendId, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send one bounded request. The error for a refusal quotes the engine's message."""
        head = self._pools.own_request_head(name, method, path, None if body is None else len(body))
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                exchange = await self._pools.get(name).open(head, body or b"", method=method)
                try:
                    answer = await exchange.read(MAX_ANSWER_BYTES)
                finally:
                    exchange.abort()
        except TimeoutError as error:
            raise UpstreamUnavailable(
                f"backend {name} did not answer within {ASK_TIMEOUT_S:.0f} s"
            ) from error
        if exchange.status == 404 and method == "DELETE":
            return answer  # the pin is already gone
        if exchange.status >= 500:
            raise UpstreamUnavailable(f"backend {name} answered {exchange.status}")
        if exchange.status >= 300:
            raise Conflict(f"backend {name} refused: {_words(answer)} ({exchange.status})")
        return answer


def _words(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_EngineProblem).error.message[:300] or "no reason given"
    except msgspec.DecodeError:
        return "no reason given"
