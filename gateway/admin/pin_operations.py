"""Operations on pins: shared prefixes that engines keep resident.

The engine owns its pins (`engine_pins`). The caller must send the prefix, because the gateway keeps no
prompts of requests. A pin for all backends also applies to backends that join later (`standing_pins`). A pin
order for an engine without pins is refused with an error that names the engine. Pinning an existing name on a
backend changes nothing and returns the existing pin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.admin.answers import BackendPins, PinList
from gateway.admin.engine_pins import ENGINES_WITH_PINS, EnginePins, PinTable
from gateway.admin.operations import Operation, Reply
from gateway.admin.orders import PinName, PinOrder
from gateway.admin.parts import AdminParts
from gateway.admin.standing_pins import StandingPins, key_of
from gateway.errors import BadRequest, Conflict, NotFound, UpstreamError
from gateway.values import Backend, BackendId

Found = TypeVar("Found")


class PinOperations:
    """Sends pin orders to the engines and collects their answers."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._engines = EnginePins(parts.pools)
        self._standing = StandingPins(parts.fleet, self._engines, self._encode, clock=parts.clock)

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "GET",
                "/pins",
                self.list_pins,
                "List the pins of all backends",
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
                "Remove a pin from every backend that has it",
                tag="pins",
                problems=(404, 502, 503, 504),
            ),
        ]

    async def keep_standing(self, _application: web.Application) -> AsyncIterator[None]:
        """While the admin listener is open, send standing orders to backends that join later."""
        task = asyncio.ensure_future(self._standing.running())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def list_pins(self) -> PinList:
        backends = list(self._parts.fleet.view.backends.values())
        return PinList(backends=list(await asyncio.gather(*(self._show(backend) for backend in backends))))

    async def add_pin(self, *, body: PinOrder) -> Reply[PinList]:
        if sum(given is not None for given in (body.messages, body.prompt, body.tokens)) != 1:
            raise BadRequest("give the prefix as exactly one of messages, prompt and tokens")
        targets = self._targets(body.backends)
        request = self._encode(body)
        is_for_all = body.backends is None
        if is_for_all:
            self._standing.check(body)
        added = await _all_or_error(self._pin(backend, body, request) for backend in targets)
        if is_for_all:
            self._standing.keep(body)
        rows = list(await asyncio.gather(*(self._show(backend) for backend in targets)))
        return Reply(value=PinList(backends=rows), status=201 if any(added) else 200)

    def _encode(self, order: PinOrder) -> bytes:
        """Return the engine's request body. Raises BadRequest for an unknown or missing tenant."""
        fields: dict[str, Any] = {
            name: value for name, value in msgspec.structs.asdict(order).items() if value is not None
        }
        fields.pop("backends", None)
        tenant_name = fields.pop("tenant", None)
        if tenant_name is not None:
            tenant = self._parts.tenant_named(tenant_name)
            if tenant is None:
                raise BadRequest(f"no tenant {tenant_name!r} is configured", param="tenant")
            fields["owner"] = tenant.name
            if tenant.cache_salt is not None:
                fields["cache_salt"] = tenant.cache_salt
        elif self._parts.config().authentication.cache_salt:
            raise BadRequest(
                "engine caches are separated by tenant (authentication.cache_salt): name the prefix's tenant",
                param="tenant",
            )
        return msgspec.json.encode(fields)

    async def remove_pin(self, *, name: PinName) -> PinList:
        backends = [
            backend
            for backend in self._parts.fleet.view.backends.values()
            if backend.engine in ENGINES_WITH_PINS and backend.state.is_routable
        ]
        has_stood = self._standing.forget_named(name)
        removed = await _all_or_error(self._engines.remove(backend.backend_id, name) for backend in backends)
        # `name` may be an id, so also forget by the names of the removed pins
        self._standing.forget((pin.name, pin.owner) for pins in removed for pin in pins)
        if not any(removed) and not has_stood:
            raise NotFound("no backend has a pin with this name or id")
        return PinList(backends=list(await asyncio.gather(*(self._show(backend) for backend in backends))))

    def _targets(self, names: Sequence[str] | None) -> list[Backend]:
        """Return the backends to pin on. Raises NotFound, or Conflict naming an engine without pins."""
        view = self._parts.fleet.view
        if names is None:
            targets = [
                backend
                for backend in view.backends.values()
                if backend.engine in ENGINES_WITH_PINS and backend.state.is_routable
            ]
            if not targets:
                engines = ", ".join(sorted({backend.engine for backend in view.backends.values()})) or "none"
                raise Conflict(f"no reachable backend supports pins (engine torch); engines: {engines}")
            return targets
        targets = []
        for name in dict.fromkeys(names):
            backend = view.get(BackendId(name))
            if backend is None:
                raise NotFound(f"backend {name} is not in the fleet")
            if backend.engine not in ENGINES_WITH_PINS:
                raise Conflict(
                    f"backend {name} runs {backend.engine}, which does not support pins; only torch does"
                )
            targets.append(backend)
        return targets

    async def _show(self, backend: Backend) -> BackendPins:
        """Return the pins of one backend.

        A failure becomes the row's `problem`; other rows are unaffected.
        """
        table, trouble = PinTable(), None
        has_pins = backend.engine in ENGINES_WITH_PINS
        if not has_pins:
            trouble = f"{backend.engine} does not support pins"
        else:
            try:
                table = await self._engines.table(backend.backend_id)
            except UpstreamError as error:
                trouble = error.message
        return BackendPins(
            backend=backend.backend_id,
            engine=backend.engine,
            pins=table.pins,
            missing=self._standing.missing_on(backend, table.pins) if has_pins else [],
            budget_tokens=table.budget_blocks * table.block_size if trouble is None else None,
            problem=trouble,
        )

    async def _pin(self, backend: Backend, order: PinOrder, request: bytes) -> bool:
        """Add the pin unless this tenant already has one with this name. Return whether it was added."""
        pins = (await self._engines.table(backend.backend_id)).pins
        if any((pin.name, pin.owner) == key_of(order) for pin in pins):
            return False
        await self._engines.add(backend.backend_id, request)
        return True


async def _all_or_error(jobs: Iterable[Awaitable[Found]]) -> list[Found]:
    """Wait for all jobs, then raise the first error, if any."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    found: list[Found] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
