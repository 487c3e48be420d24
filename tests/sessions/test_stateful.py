"""Any sequence of operations on a store gives what a plain dictionary would give.

The Redis store is checked as two replicas on one server: each step goes to one of them, and both must agree
with the model as soon as the moves made so far were heard.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fakes.redis_server import RedisProcess
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from sessions.harness import TTL_S, ManualClock, move_server_time, until, until_live

from gateway.redis_link.settings import RedisSettings
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.store import SessionStore
from gateway.values import BackendId, Binding, SessionKey

keys = st.sampled_from([SessionKey(f"{number * 7919:032x}") for number in range(4)])
backends = st.sampled_from([BackendId(name) for name in "abc"])
replicas = st.integers(0, 1)


@dataclass(frozen=True)
class Expected:
    """What the model knows of one living session."""

    backend_id: BackendId
    version: int
    context_tokens: int
    num_turns: int
    expires_at_s: float


class StoreMachine(RuleBasedStateMachine):
    """The model, and the rules. Subclasses say which stores there are."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.table: dict[SessionKey, Expected] = {}
        self.seen: dict[SessionKey, list[Binding]] = {}
        self.num_moves = 0
        self.stores: list[Any] = self.runner.run(self.open_stores())

    async def open_stores(self) -> list[Any]:
        raise NotImplementedError

    async def settle(self) -> None:
        """Let all that runs in the background finish."""

    async def let_pass(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def teardown(self) -> None:
        async def close() -> None:
            for store in self.stores:
                await store.close()

        self.runner.run(close())
        self.runner.close()

    def store(self, replica: int) -> SessionStore:
        store: SessionStore = self.stores[replica % len(self.stores)]
        return store

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def living(self, key: SessionKey) -> Expected | None:
        expected = self.table.get(key)
        return expected if expected is not None and expected.expires_at_s > self.clock() else None

    def note(self, key: SessionKey, binding: Binding) -> None:
        self.seen.setdefault(key, []).append(binding)

    @rule(key=keys, backend_id=backends, tokens=st.integers(0, 10), replica=replicas)
    def claim(self, key: SessionKey, backend_id: BackendId, tokens: int, replica: int) -> None:
        held = self.living(key)
        answer = self.run(self.store(replica).claim(key, backend_id, 1, tokens))
        if held is not None:
            assert (answer.backend_id, answer.version) == (held.backend_id, held.version)
            return
        assert answer.backend_id == backend_id
        assert all(answer.version > earlier.version for earlier in self.seen.get(key, []))
        self.note(key, answer)
        self.table[key] = Expected(backend_id, answer.version, tokens, 0, self.clock() + TTL_S)

    @rule(
        key=keys,
        pick=st.integers(0, 100),
        tokens=st.integers(0, 10),
        turns=st.integers(0, 5),
        replica=replicas,
    )
    def renew(self, key: SessionKey, pick: int, tokens: int, turns: int, replica: int) -> None:
        """Renews some home that the session has or once had."""
        known = self.seen.get(key)
        if not known:
            return
        binding = known[pick % len(known)]
        self.store(replica).renew(key, binding, context_tokens=tokens, num_turns=turns)
        self.run(self.settle())
        held = self.living(key)
        if held is not None and held.version == binding.version:
            self.table[key] = replace(
                held,
                context_tokens=tokens,
                num_turns=max(held.num_turns, turns),
                expires_at_s=self.clock() + TTL_S,
            )

    @rule(key=keys, backend_id=backends, pick=st.integers(0, 100), replica=replicas)
    def rebind(self, key: SessionKey, backend_id: BackendId, pick: int, replica: int) -> None:
        """Moves from some version that the session has or once had."""
        known = self.seen.get(key)
        version = known[pick % len(known)].version if known else 1
        held = self.living(key)
        answer = self.run(self.store(replica).rebind(key, version, backend_id, 1, 3))
        if held is None:
            assert answer is None
        elif held.version != version:
            assert (answer.backend_id, answer.version) == (held.backend_id, held.version)
        else:
            assert answer.backend_id == backend_id
            assert answer.version > version
            self.note(key, answer)
            self.table[key] = Expected(backend_id, answer.version, 3, held.num_turns, self.clock() + TTL_S)
            self.num_moves += 1
            self.run(self.settle())

    @rule(key=keys, replica=replicas)
    def end(self, key: SessionKey, replica: int) -> None:
        held = self.living(key)
        assert self.run(self.store(replica).end(key)) is (held is not None)
        self.table.pop(key, None)
        if held is not None:
            self.num_moves += 1
            self.run(self.settle())

    @rule(seconds=st.sampled_from([10.0, 50.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """A little more than the round number: the contract suite looks at the very moment of expiry."""
        self.run(self.let_pass(seconds + 0.001))

    @rule(replica=replicas, limit=st.integers(1, 3), backend_id=backends)
    def list(self, replica: int, limit: int, backend_id: BackendId) -> None:
        async def walk() -> list[SessionKey]:
            listed: list[SessionKey] = []
            cursor = None
            for _ in range(50):
                page, cursor = await self.store(replica).list_by_backend(
                    backend_id, cursor=cursor, limit=limit
                )
                listed += [key for key, _ in page]
                if cursor is None:
                    return listed
            raise AssertionError("the listing does not end")

        living = [key for key in self.table if self.is_at(key, backend_id)]
        assert sorted(self.run(walk())) == sorted(living)

    def is_at(self, key: SessionKey, backend_id: BackendId) -> bool:
        held = self.living(key)
        return held is not None and held.backend_id == backend_id

    @invariant()
    def every_replica_agrees_with_the_model(self) -> None:
        for store, key in itertools.product(self.stores, self.table):
            held, found = self.living(key), self.run(store.get(key))
            if held is None:
                assert found is None
            else:
                assert (found.backend_id, found.version) == (held.backend_id, held.version)
                if len(self.stores) == 1:
                    assert (found.context_tokens, found.num_turns) == (held.context_tokens, held.num_turns)

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        living = [held.backend_id for held in map(self.living, self.table) if held is not None]
        assert self.run(self.stores[0].count_by_backend()) == {
            name: living.count(name) for name in set(living)
        }


class MemoryMachine(StoreMachine):
    async def open_stores(self) -> list[Any]:
        return [MemoryStore(ttl_s=TTL_S, clock=self.clock)]


def test_memory_store_is_a_table() -> None:
    """The memory store behaves as the model in every sequence."""
    run_state_machine_as_test(
        MemoryMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


@pytest.mark.redis
def test_two_replicas_are_one_table(shared_redis: RedisProcess) -> None:
    """Two Redis stores behave as the one model in every sequence, wherever each step is made."""

    class RedisMachine(StoreMachine):
        async def open_stores(self) -> list[Any]:
            self.client = Redis.from_url(shared_redis.url)
            await self.client.flushall()
            config = RedisSettings(url=shared_redis.url, budget_ms=10_000, flush_interval_ms=10_000)
            stores = [RedisStore(config, ttl_s=TTL_S, clock=self.clock, environ={}) for _ in range(2)]
            for store in stores:
                await store.start()
            for store in stores:
                await until_live(store)
            return stores

        async def settle(self) -> None:
            for store in self.stores:
                await store.flush()
            await until(
                lambda: all(store.stats().num_invalidations >= self.num_moves for store in self.stores),
                "all moves are heard",
            )

        async def let_pass(self, seconds: float) -> None:
            self.clock.now_s += seconds
            await move_server_time(self.client, seconds)

        def teardown(self) -> None:
            self.runner.run(self.client.aclose())
            super().teardown()

    run_state_machine_as_test(
        RedisMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
