"""Makes known who made which object, before the client learns its id: it may ask another replica at once.

An answer that describes an object is held until it is complete, which is soon: it is small. What is learned
from it is the id of the object and of those that it has brought forth, such as the output of a batch.
Nothing is learned from a content, which clients choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.request.attempt import Attempt
from gateway.request.turn import Turn
from gateway.sessions.store import SessionStore
from gateway.values import BackendId, SessionKey
from gateway.wire.facts import FactsParser
from gateway.wire.objects import RESPONSE, made_ids

MAX_BYTES = 1 << 20
"""No description of an object is longer."""

Home = tuple[BackendId, int]
"""Who made an object, and in which life of its cache."""


class MadeObjects:
    """Writes the homes of objects. A failed write loses an id, never an answer."""

    def __init__(self, sessions: SessionStore, objects: SessionStore, parser: FactsParser) -> None:
        self._sessions, self.store, self._parser = sessions, objects, parser

    def key(self, tenant: str, kind: str, object_id: str) -> SessionKey:
        return self._parser.object_key(tenant, kind, object_id)

    def must_see(self, turn: Turn, attempt: Attempt) -> bool:
        """Whether the answer tells ids once it is complete."""
        place, method = turn.route.place, turn.request.method
        if place is None or attempt.status >= 300 or sum(map(len, attempt.held)) > MAX_BYTES:
            return False
        return place.learns(method) or (turn.placement.is_asking and place.object_id is not None)

    async def publish(self, turn: Turn, attempt: Attempt) -> None:
        """Write what a complete answer tells. Waits no longer than the request may wait for the store."""
        place, maker = turn.route.place, turn.backend_id
        assert place is not None
        assert maker is not None
        home = (maker, turn.placement.epoch)
        if place.learns(turn.request.method):
            made = made_ids(place.kind, b"".join(attempt.held))
            await self.claim([self.key(turn.tenant.name, *one) for one in made], home)
        if turn.placement.is_asking and place.object_id is not None:  # it was found there
            if place.kind is RESPONSE:
                assert turn.facts.answer_key is not None
                await self._sessions.claim(turn.facts.answer_key, *home)
            else:
                await self.claim(turn.facts.object_keys[:1], home)

    async def claim(self, keys: Iterable[SessionKey], home: Home) -> None:
        await asyncio.gather(*(self.store.claim(key, *home) for key in keys))

    def renew(self, turn: Turn) -> None:
        """Keep what a request has named from being forgotten."""
        for key, binding in turn.placement.objects:
            self.store.renew(key, binding, context_tokens=0, num_turns=binding.num_turns + 1)

    async def forget(self, turn: Turn) -> None:
        """An object was deleted."""
        await self.store.end(turn.facts.object_keys[0])
