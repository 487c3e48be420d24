"""Operations on backends (list, add, change, cordon, drain, remove) and on the fleet as a whole."""

from __future__ import annotations

from dataclasses import replace

from gateway.admin.answers import BackendAnswer, BackendList, Status
from gateway.admin.backend_hosts import require_allowed
from gateway.admin.backend_keys import require_key_allowed
from gateway.admin.describe import describe_backend, describe_backends, describe_orders, describe_status
from gateway.admin.operations import IfMatch, Operation, Reply
from gateway.admin.order_answers import OrderList
from gateway.admin.orders import BackendName, BackendPatch, DrainOrder
from gateway.admin.parts import AdminParts
from gateway.errors import Conflict, NotFound
from gateway.fleet.settings import BackendSettings, backend_of, normalise_backend_url
from gateway.replicas.order_book import Subject
from gateway.values import Backend, BackendId

ORDERED = (200, 202)
"""An order answers 202 instead while it is not shared with other gateways."""


class FleetOperations:
    """Every change is idempotent: draining a draining backend succeeds."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    def operations(self) -> list[Operation]:
        backend_path = "/backends/{name}"
        return [
            Operation("GET", "/status", self.show_status, "Show the whole fleet", tag="fleet"),
            Operation("GET", "/backends", self.list_backends, "List all backends", tag="fleet"),
            Operation(
                "POST",
                "/backends",
                self.add_backend,
                "Add a backend, or update an existing one",
                statuses=(201, 200, 202),
                problems=(409,),
                tag="fleet",
            ),
            Operation("GET", "/orders", self.list_orders, "List all orders about backends", tag="fleet"),
            Operation("GET", backend_path, self.show_backend, "Show one backend", tag="fleet"),
            Operation(
                "PATCH",
                backend_path,
                self.patch_backend,
                "Change weight or labels",
                statuses=ORDERED,
                tag="fleet",
            ),
            Operation(
                "DELETE",
                backend_path,
                self.remove_backend,
                "Remove a backend immediately",
                statuses=(204, 202),
                tag="fleet",
            ),
            Operation(
                "POST",
                f"{backend_path}/cordon",
                self.cordon_backend,
                "Stop new sessions; bound ones stay",
                statuses=ORDERED,
                tag="fleet",
            ),
            Operation(
                "POST",
                f"{backend_path}/drain",
                self.drain_backend,
                "Stop new sessions; bound ones move",
                statuses=ORDERED,
                tag="fleet",
            ),
            Operation(
                "POST",
                f"{backend_path}/undrain",
                self.undrain_backend,
                "Cancel a cordon or a drain",
                statuses=ORDERED,
                tag="fleet",
            ),
        ]

    # -- reading

    async def show_status(self) -> Status:
        return describe_status(self._parts, await self._parts.sessions.count_by_backend())

    async def list_backends(self) -> BackendList:
        sessions = await self._parts.sessions.count_by_backend()
        return BackendList(backends=describe_backends(self._parts, sessions))

    async def show_backend(self, *, name: BackendName) -> BackendAnswer:
        self._find(name)
        sessions = await self._parts.sessions.count_by_backend()
        return describe_backend(self._parts, self._find(name), sessions, self._parts.router.snapshot())

    async def list_orders(self) -> OrderList:
        subjects = sorted(self._parts.operator.orders())
        return OrderList(orders=describe_orders(self._parts, subjects))

    # -- changing

    async def add_backend(self, *, body: BackendSettings) -> Reply[BackendAnswer]:
        backend_id, url = BackendId(body.backend_id), normalise_backend_url(body.url)
        config = self._parts.config()
        await require_allowed(url, config.admin.allow_backend_hosts)
        await require_key_allowed(body, config, self._parts.environ)
        for other in self._parts.fleet.view.backends.values():  # do not await between this check and `add`
            is_same = (other.base_url, other.rank) == (url, body.data_parallel_rank)
            if is_same and other.backend_id != backend_id:
                raise Conflict(f"backend {other.backend_id} already has this URL", param="url")
        is_known = backend_id in self._parts.fleet.view.backends
        api_key = self._parts.environ.get(body.api_key_env) if body.api_key_env else None
        await self._parts.operator.add(backend_of(body), api_key=api_key)
        return await self._ordered(backend_id, status=200 if is_known else 201)

    async def patch_backend(
        self,
        *,
        name: BackendName,
        body: BackendPatch,
        if_match: IfMatch,
    ) -> Reply[BackendAnswer]:
        backend = await self._matching(name, if_match)
        if body.labels is not None:
            api_key = self._parts.fleet.api_key(backend.backend_id)
            self._parts.fleet.add(replace(backend, labels=body.labels), api_key=api_key)
        if body.weight is None:
            return Reply(value=await self.show_backend(name=name), status=200)
        await self._parts.operator.set_weight(backend.backend_id, body.weight)
        return await self._ordered(backend.backend_id)

    async def remove_backend(self, *, name: BackendName, if_match: IfMatch) -> Reply[OrderList | None]:
        backend = await self._matching(name, if_match)
        await self._parts.operator.remove(backend.backend_id)
        subject = Subject(backend.backend_id, "state")
        if self._parts.operator.is_shared(subject):
            return Reply(value=None, status=204)
        return Reply(value=OrderList(orders=describe_orders(self._parts, [subject])), status=202)

    async def cordon_backend(self, *, name: BackendName, if_match: IfMatch) -> Reply[BackendAnswer]:
        backend = await self._matching(name, if_match)
        await self._parts.operator.cordon(backend.backend_id)
        return await self._ordered(backend.backend_id)

    async def drain_backend(
        self,
        *,
        name: BackendName,
        if_match: IfMatch,
        body: DrainOrder | None = None,
    ) -> Reply[BackendAnswer]:
        backend = await self._matching(name, if_match)
        order = body or DrainOrder()
        deadline_s = order.deadline_s
        if deadline_s is None:
            deadline_s = self._parts.config().fleet.drain_deadline_s
        await self._parts.operator.drain(backend.backend_id, deadline_s, is_until_restart=order.until_restart)
        return await self._ordered(backend.backend_id)

    async def undrain_backend(self, *, name: BackendName, if_match: IfMatch) -> Reply[BackendAnswer]:
        backend = await self._matching(name, if_match)
        await self._parts.operator.undrain(backend.backend_id)
        return await self._ordered(backend.backend_id)

    async def _ordered(self, backend_id: BackendId, status: int = 200) -> Reply[BackendAnswer]:
        """Show a backend after an order: with 202 while other gateways cannot know of it."""
        is_shared = self._parts.operator.is_shared(*self._parts.operator.standing(backend_id))
        return Reply(value=await self.show_backend(name=backend_id), status=status if is_shared else 202)

    def _find(self, name: str) -> Backend:
        backend = self._parts.fleet.view.get(BackendId(name))
        if backend is None:
            known = ", ".join(sorted(self._parts.fleet.view.backends)) or "none"
            raise NotFound(f"no such backend; backends in the fleet: {known}")
        return backend

    async def _matching(self, name: str, if_match: IfMatch) -> Backend:
        backend = self._find(name)
        if if_match.header is not None:
            if_match.require((await self.show_backend(name=name)).etag())
        return backend
