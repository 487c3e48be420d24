"""Fixtures of the session store tests: every store that owes the contract, behind one harness."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sessions.harness import TTL_S, Harness, ManualClock

from gateway.sessions.memory import MemoryStore


@pytest.fixture(params=["memory"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    clock = ManualClock()
    store = MemoryStore(ttl_s=TTL_S, max_sessions=50, clock=clock)

    async def settle() -> None:
        """Memory does nothing in the background."""

    async def advance(seconds: float) -> None:
        clock.now_s += seconds

    await store.start()
    yield Harness(store=store, settle=settle, advance=advance)
    await store.close()
