"""Read-only operations: where a request would go, which backends own a key, what a change would move."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.admin.answers import DecisionAnswer, GroupList, RingAnswer, WhatIfAnswer, WhatIfBackend
from gateway.admin.describe import describe_decision, describe_group, describe_ring
from gateway.admin.operations import Operation
from gateway.admin.orders import GroupQuery, RingQuery, RouteQuestion, WhatIfQuestion
from gateway.admin.parts import AdminParts
from gateway.errors import BadRequest, Overloaded
from gateway.routing.what_if import BackendForecast, Forecast, forecast
from gateway.values import BackendId, SessionKey
from gateway.wire.keys import to_bytes
from gateway.wire.routes import RouteTable

MAX_SESSIONS_WALKED = 50_000
_PAGE = 1000

Weights = dict[BackendId, float]
Sample = list[tuple[SessionKey, BackendId, int]]


class DecisionOperations:
    """Explanations. All are open to the role `read`."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._is_judging = False  # threads share one interpreter with the event loop: one at a time

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "GET",
                "/ring",
                self.show_ring,
                "Show the shares of the ring and the owners of a key",
                tag="decisions",
            ),
            Operation(
                "POST",
                "/route",
                self.explain_route,
                "Decide a request and explain it, without sending or counting it",
                tag="decisions",
                asks_only=True,
                problems=(404, 405, 503),
            ),
            Operation(
                "POST",
                "/what-if",
                self.judge_change,
                "Show what adding, removing or reweighting backends would move",
                tag="decisions",
                asks_only=True,
                problems=(503,),
            ),
            Operation(
                "GET",
                "/prompt-groups",
                self.list_groups,
                "List the most requested prompt groups and the backends believed to hold them",
                tag="decisions",
            ),
        ]

    async def show_ring(self, *, query: RingQuery) -> RingAnswer:
        owners = [] if query.key is None else self._parts.router.ring_owners(query.key, query.n)
        return RingAnswer(shares=await describe_ring(self._parts), key=query.key, owners=list(owners))

    async def explain_route(self, *, body: RouteQuestion) -> DecisionAnswer:
        parts = self._parts
        route = RouteTable(parts.config().passthrough_paths).match("POST", body.path)
        headers = [(to_bytes(name.lower()), to_bytes(value)) for name, value in body.headers.items()]
        facts = parts.parser().parse(
            route.api, headers, msgspec.json.encode(body.body), tenant=body.tenant, path=route.path
        )
        binding = await parts.sessions.get(facts.session_key) if facts.session_key else None
        return describe_decision(facts, binding, parts.router.decide(facts, binding, parts.clock()))

    async def list_groups(self, *, query: GroupQuery) -> GroupList:
        journal = self._parts.journal
        hottest = [] if journal is None else journal.hottest(self._parts.clock(), query.limit)
        return GroupList(groups=[describe_group(self._parts, group) for group in hottest])

    # -- what if

    async def judge_change(self, *, body: WhatIfQuestion) -> WhatIfAnswer:
        before: Weights = {name: backend.weight for name, backend in self._parts.fleet.view.backends.items()}
        after = _changed(before, body)
        sessions, is_sampled = await self._walk_sessions(before)
        virtual_nodes = self._parts.config().routing.virtual_nodes
        if self._is_judging:
            raise Overloaded("another what-if question is being answered: ask again", retry_after_s=1)
        self._is_judging = True
        try:  # building the ring of a large fleet is too slow for the event loop
            judged = await asyncio.to_thread(forecast, before, after, virtual_nodes, sessions)
        finally:
            self._is_judging = False
        return _describe(judged, before, after, is_sampled=is_sampled)

    async def _walk_sessions(self, weights: Weights) -> tuple[Sample, bool]:
        """Return all live sessions, or an equal sample of each backend's, and whether it is a sample."""
        limit = MAX_SESSIONS_WALKED // max(1, len(weights))
        found: Sample = []
        is_sampled = False
        for backend_id in weights:
            seen: dict[SessionKey, int] = {}
            cursor: str | None = None
            while True:
                rows, cursor = await self._parts.sessions.list_by_backend(
                    backend_id, cursor=cursor, limit=min(_PAGE, limit)
                )
                seen.update((key, binding.context_tokens) for key, binding in rows)
                if cursor is None or len(seen) >= limit:
                    is_sampled = is_sampled or cursor is not None
                    break
            found.extend((key, backend_id, tokens) for key, tokens in seen.items())
        return found, is_sampled


def _changed(before: Weights, question: WhatIfQuestion) -> Weights:
    after = dict(before)
    for name in question.remove:
        if after.pop(BackendId(name), None) is None:
            raise BadRequest(f"cannot remove backend {name}: it is not in the fleet", param="remove")
    for name, weight in question.reweight.items():
        if name not in after:
            raise BadRequest(f"cannot reweight backend {name}: it is not in the fleet", param="reweight")
        after[BackendId(name)] = weight
    for added in question.add:
        if added.id in after:
            raise BadRequest(f"cannot add backend {added.id}: it is already in the fleet", param="add")
        after[BackendId(added.id)] = added.weight
    return after


def _describe(judged: Forecast, before: Weights, after: Weights, *, is_sampled: bool) -> WhatIfAnswer:
    def row(name: BackendId, backend: BackendForecast) -> WhatIfBackend:
        return WhatIfBackend(
            id=name,
            weight_before=before.get(name),
            weight_after=after.get(name),
            ring_share_before=round(backend.ring_share_before, 6),
            ring_share_after=round(backend.ring_share_after, 6),
            sessions_before=backend.sessions_before,
            sessions_after=backend.sessions_after,
            tokens_before=backend.tokens_before,
            tokens_after=backend.tokens_after,
        )

    return WhatIfAnswer(
        new_sessions_moved_share=round(judged.ring_share_moved, 6),
        sessions=judged.num_sessions,
        sessions_moved=judged.num_sessions_moved,
        sessions_moved_share=round(judged.num_sessions_moved / max(1, judged.num_sessions), 6),
        tokens=judged.num_tokens,
        tokens_moved=judged.num_tokens_moved,
        tokens_moved_share=round(judged.num_tokens_moved / max(1, judged.num_tokens), 6),
        is_sampled=is_sampled,
        backends=[row(name, backend) for name, backend in judged.backends.items()],
    )
