"""What only the memory store owes: bounds on number, memory and time."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc

import pytest
from sessions.harness import ManualClock

from gateway.sessions.memory import MemoryStore
from gateway.values import BackendId, SessionKey

A, B = BackendId("a"), BackendId("b")


def key(number: int) -> SessionKey:
    return SessionKey(f"{number:032x}")


def make(max_sessions: int = 10, ttl_s: float = 100.0) -> tuple[MemoryStore, ManualClock]:
    clock = ManualClock()
    return MemoryStore(ttl_s=ttl_s, max_sessions=max_sessions, clock=clock), clock


async def test_cap_evicts_the_longest_unused() -> None:
    """At the cap a new session takes the place of the one whose last turn is longest ago, whatever backend it
    is on; reading alone does not count as use."""
    store, clock = make(max_sessions=3)
    for number, backend_id in enumerate((A, B, A)):
        clock.now_s += 1
        binding = await store.claim(key(number), backend_id, 1)
        assert binding is not None
        if number == 0:
            first = binding
    clock.now_s += 1
    store.renew(key(0), first, context_tokens=1, num_turns=1)
    await store.get(key(1))
    await store.claim(key(3), A, 1)
    assert [await store.get(key(number)) is not None for number in range(4)] == [True, False, True, True]
    assert store.stats().num_evictions == 1
    assert store.stats().num_sessions == 3


async def test_cap_holds_for_ever() -> None:
    """Ten thousand sessions through a store for ten: never more than ten, in any of its structures."""
    store, clock = make(max_sessions=10)
    for number in range(10_000):
        clock.now_s += 0.001
        await store.claim(key(number), BackendId(f"b{number % 7}"), 1)
        assert store.stats().num_sessions <= 10
    assert sum((await store.count_by_backend()).values()) == 10
    assert sum(len(table) for table in store._tables) == 10
    assert len(store._lines) <= 7


async def test_expired_sessions_leave_by_themselves() -> None:
    """With steady traffic expired sessions are dropped as fast as new ones come: the table stays small."""
    store, clock = make(max_sessions=1_000_000, ttl_s=10.0)
    for number in range(5000):
        clock.now_s += 0.1
        await store.claim(key(number), A, 1)
        assert store.stats().num_sessions <= 100 + 2


async def test_lines_of_gone_backends_are_forgotten() -> None:
    """Backends come and go; one without sessions leaves nothing behind."""
    store, _ = make()
    for number in range(1000):
        await store.claim(key(0), BackendId(f"pod-{number}"), 1)
        await store.end(key(0))
    assert store._lines == {}


async def test_coarse_clock_keeps_order() -> None:
    """Sessions used within one tick of the clock are still evicted in the order of their use."""
    store, _ = make(max_sessions=3)
    for number in range(3):
        await store.claim(key(number), A, 1)
    await store.claim(key(3), A, 1)
    assert await store.get(key(0)) is None
    assert await store.get(key(1)) is not None


async def test_clock_that_goes_back_neither_loses_nor_reorders() -> None:
    """Should the clock step back, present sessions stay and the order of use holds."""
    store, clock = make(max_sessions=3)
    await store.claim(key(0), A, 1)
    clock.now_s -= 50
    await store.claim(key(1), B, 1)
    await store.claim(key(2), A, 1)
    await store.claim(key(3), A, 1)
    assert [await store.get(key(number)) is not None for number in range(4)] == [False, True, True, True]


async def test_close_forgets_everything() -> None:
    """A closed store holds no session, and may be closed again."""
    store, _ = make()
    await store.claim(key(0), A, 1)
    await store.close()
    await store.close()
    assert await store.get(key(0)) is None
    assert await store.count_by_backend() == {}
    assert store.stats().num_sessions == 0


async def fill(store: MemoryStore, num_sessions: int, chance: random.Random) -> None:
    """Distinct sessions with a turn each, over eight backends."""
    names = [BackendId(f"backend-{number}") for number in range(8)]
    for number in range(num_sessions):
        session = SessionKey(f"{chance.getrandbits(128):032x}")
        binding = await store.claim(session, names[number % 8], 1_700_000_000)
        assert binding is not None
        store.renew(session, binding, context_tokens=1000 + chance.randrange(100_000), num_turns=number % 50)


async def test_bytes_per_session() -> None:
    """Key, numbers, table and index stay below 400 bytes per session, also after all were replaced."""
    num_sessions = 8_000
    chance = random.Random(1)
    tracemalloc.start()
    try:
        store = MemoryStore(max_sessions=num_sessions)
        before = tracemalloc.get_traced_memory()[0]
        await fill(store, 2 * num_sessions, chance)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.stats().num_sessions == num_sessions
    assert used / num_sessions < 400


async def test_sessions_are_unknown_to_the_garbage_collector() -> None:
    """A full table adds next to nothing to what a full collection has to walk."""
    store = MemoryStore(max_sessions=2000)
    gc.collect()
    before = len(gc.get_objects())
    await fill(store, 2000, random.Random(2))
    gc.collect()
    assert len(gc.get_objects()) - before < 500
    assert store.stats().num_sessions == 2000


@pytest.mark.bench
async def test_bench_a_million_sessions() -> None:
    """Prints memory and times at a million sessions, filled and then all replaced once."""
    import psutil

    process = psutil.Process()
    num_sessions = 1_000_000
    chance = random.Random(1)
    gc.collect()
    before = process.memory_info().rss
    store = MemoryStore(max_sessions=num_sessions)
    for phase in ("filled", "replaced"):
        started_s = time.perf_counter()
        await fill(store, num_sessions, chance)
        microseconds = (time.perf_counter() - started_s) / num_sessions * 1e6
        gc.collect()
        size = (process.memory_info().rss - before) / num_sessions
        print(f"{phase}: {size:.0f} bytes per session; key, claim and renew {microseconds:.1f} µs")
    started_s = time.perf_counter()
    gc.collect()
    print(f"full garbage collection: {(time.perf_counter() - started_s) * 1e3:.0f} ms")
    sessions = [record.key for line in store._lines.values() for record in line]
    for name, keys in (
        ("hot", sessions[:1000] * 100),
        ("cold", chance.sample(sessions, 100_000)),
    ):
        times = []
        for _ in range(9):
            started_s = time.perf_counter()
            for session in keys:
                await store.get(session)
            times.append((time.perf_counter() - started_s) / len(keys) * 1e6)
        print(f"get, {name} keys: best {min(times):.2f}, median {sorted(times)[4]:.2f} µs")
