"""The operations on pins: shared prefixes that engines keep resident.

The engine owns its pins; the gateway passes orders on and keeps none. It holds no prompt text, so whoever
pins names the prefix. Only our own worker has pins (`/v1/kv/pins`); an order to another engine is refused
with that engine's name, never silently dropped. Pinning the same name again replaces nothing and pins
nothing twice: an existing pin of that name on a backend is returned as it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import msgspec

from gateway.admin.answers import BackendPins, Pin, PinList
from gateway.admin.operations import Operation, Reply
from gateway.admin.orders import PinName, PinOrder
from gateway.admin.parts import AdminParts
from gateway.errors import BadRequest, Conflict, NotFound, UpstreamError, UpstreamUnavailable
from gateway.values import Backend, BackendId

ENGINES_WITH_PINS = frozenset(("torch",))
ASK_TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_PINS = "/v1/kv/pins"
_PIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")  # it becomes part of a path


class _PinTable(msgspec.Struct):
    pins: list[Pin] = []
    budget_blocks: int = 0
    block_size: int = 0


class _EngineError(msgspec.Struct):
    message: str = ""


class _EngineProblem(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


class PinOperations:
    """Passes orders to the engines and gathers what they say."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "GET",
                "/pins",
                self.list_pins,
                "The pins of all backends",
                tag="pins",
            ),
            Operation(
                "POST",
                "/pins",
                self.add_pin,
                "Keep a prefix resident on some or all backends",
                tag="pins",
                statuses=(201, 200),
                problems=(404, 409, 502, 503, 504),
            ),
            Operation(
                "DELETE",
                "/pins/{name}",
                self.remove_pin,
                "Take a pin back on every backend that has it",
                tag="pins",
                problems=(404, 502, 503, 504),
            ),
        ]

    async def list_pins(self) -> PinList:
        backends = list(self._parts.fleet.view.backends.values())
        return PinList(backends=list(await asyncio.gather(*(self._show(one) for one in backends))))

    async def add_pin(self, *, body: PinOrder) -> Reply[PinList]:
        if sum(one is not None for one in (body.messages, body.prompt, body.tokens)) != 1:
            raise BadRequest("name the prefix by exactly one of messages, prompt and tokens")
        targets = self._targets(body.backends)
        request = msgspec.json.encode(self._engine_order(body))
        added = await _all_or_error(self._pin(one, body, request) for one in targets)
        rows = list(await asyncio.gather(*(self._show(one) for one in targets)))
        return Reply(value=PinList(backends=rows), status=201 if any(added) else 200)

    def _engine_order(self, order: PinOrder) -> dict[str, Any]:
        """The order as the engine takes it. Raises BadRequest for a tenant that there is not."""
        fields = {name: value for name, value in msgspec.structs.asdict(order).items() if value is not None}
        fields.pop("backends", None)
        tenant_name = fields.pop("tenant", None)
        if tenant_name is not None:
            tenant = self._parts.tenant_named(tenant_name)
            if tenant is None:
                raise BadRequest(f"there is no tenant {tenant_name!r}", param="tenant")
            fields["owner"] = tenant.name
            if tenant.cache_salt is not None:
                fields["cache_salt"] = tenant.cache_salt
        elif self._parts.config().authentication.cache_salt:
            raise BadRequest(
                "engines' caches are kept apart by tenant: name the tenant whose prefix this is",
                param="tenant",
            )
        return fields

    async def remove_pin(self, *, name: PinName) -> PinList:
        backends = [
            one
            for one in self._parts.fleet.view.backends.values()
            if one.engine in ENGINES_WITH_PINS and one.state.is_routable
        ]
        removed = await _all_or_error(self._unpin(one, name) for one in backends)
        if not any(removed):
            raise NotFound("no backend has a pin of this name")
        return PinList(backends=list(await asyncio.gather(*(self._show(one) for one in backends))))

    def _targets(self, names: Sequence[str] | None) -> list[Backend]:
        """The backends an order is for. Raises NotFound, or Conflict naming an engine without pins."""
        view = self._parts.fleet.view
        if names is None:
            targets = [
                one
                for one in view.backends.values()
                if one.engine in ENGINES_WITH_PINS and one.state.is_routable
            ]
            if not targets:
                engines = ", ".join(sorted({one.engine for one in view.backends.values()})) or "none"
                raise Conflict(f"no reachable backend has an engine with pins (torch); engines: {engines}")
            return targets
        targets = []
        for name in dict.fromkeys(names):
            backend = view.get(BackendId(name))
            if backend is None:
                raise NotFound(f"there is no backend {name}")
            if backend.engine not in ENGINES_WITH_PINS:
                raise Conflict(f"backend {name} runs {backend.engine}, which has no pins; only torch has")
            targets.append(backend)
        return targets

    async def _show(self, backend: Backend) -> BackendPins:
        """What one backend says of its pins; trouble is told in the row, and hides no other backend."""
        table, trouble = _PinTable(), None
        if backend.engine not in ENGINES_WITH_PINS:
            trouble = f"{backend.engine} has no pins"
        else:
            try:
                table = await self._table(backend)
            except UpstreamError as error:
                trouble = error.message
        return BackendPins(
            backend=backend.backend_id,
            engine=backend.engine,
            pins=table.pins,
            budget_tokens=table.budget_blocks * table.block_size if trouble is None else None,
            problem=trouble,
        )

    async def _pin(self, backend: Backend, order: PinOrder, request: bytes) -> bool:
        """Whether a pin was added: not if this tenant had one of this name."""
        wanted = (order.name, order.tenant or "")
        if any((pin.name, pin.owner) == wanted for pin in (await self._table(backend)).pins):
            return False
        await self._ask(backend, "POST", _PINS, request)
        return True

    async def _unpin(self, backend: Backend, name: str) -> bool:
        """Whether there was such a pin."""
        found = [pin for pin in (await self._table(backend)).pins if name in (pin.name, pin.id)]
        for pin in found:
            if not _PIN_ID.match(pin.id):
                raise UpstreamUnavailable(
                    f"backend {backend.backend_id} names a pin in a way that is not ours"
                )
            await self._ask(backend, "DELETE", f"{_PINS}/{pin.id}")
        return bool(found)

    async def _table(self, backend: Backend) -> _PinTable:
        try:
            return msgspec.json.decode(await self._ask(backend, "GET", _PINS), type=_PinTable)
        except msgspec.DecodeError as error:
            raise UpstreamUnavailable(f"backend {backend.backend_id} answered no list of pins") from error

    async def _ask(self, backend: Backend, method: str, path: str, body: bytes | None = None) -> bytes:
        """One bounded request. Raises UpstreamError, or Conflict with the engine's own words."""
        name, pools = backend.backend_id, self._parts.pools
        head = pools.own_request_head(name, method, path, None if body is None else len(body))
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                exchange = await pools.get(name).open(head, body or b"", method=method)
                try:
                    answer = await exchange.read(MAX_ANSWER_BYTES)
                finally:
                    exchange.abort()
        except TimeoutError as error:
            raise UpstreamUnavailable(
                f"backend {name} did not answer within {ASK_TIMEOUT_S:.0f} s"
            ) from error
        if exchange.status == 404 and method == "DELETE":
            return answer  # gone by itself meanwhile: what was wanted
        if exchange.status >= 500:
            raise UpstreamUnavailable(f"backend {name} answered {exchange.status}")
        if exchange.status >= 300:
            raise Conflict(f"backend {name} refused: {_words(answer)} ({exchange.status})")
        return answer


def _words(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=_EngineProblem).error.message[:300] or "without a reason"
    except msgspec.DecodeError:
        return "without a reason"


async def _all_or_error(jobs: Iterable[Awaitable[bool]]) -> list[bool]:
    """Wait for all, so that none is left half done; then raise the first error, if any."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if result is True or result is False]
