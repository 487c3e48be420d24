"""Several replicas on one Redis: one truth, and how fast a move is followed."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest
from fakes.redis_server import RedisProcess
from fakes.tcp_proxy import tcp_proxy
from redis.asyncio import Redis
from sessions.harness import ManualClock, started_redis_store, until, until_live

from gateway.redis_link.settings import RedisSettings
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId, Binding, SessionKey

pytestmark = pytest.mark.redis

A, B, C = BackendId("a"), BackendId("b"), BackendId("c")
KEY = SessionKey("00112233445566778899aabbccddeeff")


def settings(server: RedisProcess, **options: float) -> RedisSettings:
    """Settings with a budget that a busy machine does not exceed by chance."""
    return msgspec.convert({"url": server.url, "budget_ms": 1000, **options}, RedisSettings)


async def bound(store: RedisStore, backend_id: BackendId = A) -> Binding:
    """A session bound through this replica."""
    binding = await store.claim(KEY, backend_id, 1)
    assert binding is not None
    return binding


async def home(store: RedisStore) -> str | None:
    """Where this replica would send the session now."""
    found = await store.get(KEY)
    return None if found is None else found.backend_id


async def test_first_requests_over_two_replicas_have_one_winner(shared_redis: RedisProcess) -> None:
    """Fifty first requests of one session over two replicas on a slow network end at one backend, and both
    replicas send all later turns there."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        config = RedisSettings(url=f"redis://127.0.0.1:{proxy.port}/0", budget_ms=3000)
        async with started_redis_store(config) as one, started_redis_store(config) as two:
            await until_live(one)
            await until_live(two)
            proxy.delay_s = 0.05
            claims = [
                (one, two)[number % 2].claim(KEY, BackendId(f"b{number % 4}"), 1) for number in range(50)
            ]
            answers = await asyncio.gather(*claims)
            homes = {answer.backend_id for answer in answers if answer is not None}
            assert None not in answers
            assert len(homes) == 1
            assert {await home(one), await home(two)} == homes


async def test_late_refresh_cannot_undo_a_move(shared_redis: RedisProcess) -> None:
    """While one replica moves a session, twenty turns noted by the other as of the old home change nothing,
    also those that are sent long after."""
    config = settings(shared_redis, flush_interval_ms=100_000)
    async with started_redis_store(config) as one, started_redis_store(config) as two:
        await until_live(one)
        await until_live(two)
        old = await bound(one)
        for turn in range(20):
            two.renew(KEY, old, context_tokens=turn, num_turns=turn)
        moved = await one.rebind(KEY, old.version, B, 1, 500)
        assert moved is not None
        await two.flush()
        await until(lambda: two.stats().num_invalidations == 1, "the move is heard")
        assert (await home(one), await home(two)) == (B, B)
        async with started_redis_store(config) as fresh:
            found = await fresh.get(KEY)
            assert found is not None
            assert (found.backend_id, found.version, found.context_tokens, found.num_turns) == (
                B,
                moved.version,
                500,
                0,
            )


async def test_overload_move_is_final_for_both(shared_redis: RedisProcess) -> None:
    """A session moved because its home was busy stays at its new home, on both replicas, after the load is
    gone: a second move from the old version is refused and told the present home."""
    async with (
        started_redis_store(settings(shared_redis)) as one,
        started_redis_store(settings(shared_redis)) as two,
    ):
        await until_live(one)
        await until_live(two)
        old = await bound(one)
        assert await home(two) == A
        assert (await one.rebind(KEY, old.version, B, 1)).backend_id == B  # type: ignore[union-attr]  # None fails
        assert (await two.rebind(KEY, old.version, C, 1)).backend_id == B  # type: ignore[union-attr]  # None fails
        assert (await home(one), await home(two)) == (B, B)


async def test_round_robin_over_three_replicas_keeps_sessions_home(shared_redis: RedisProcess) -> None:
    """A hundred sessions of ten turns over three replicas, each turn at the next one: every turn is at one
    backend, but for a session moved half way by an admin, which has exactly two homes in order; and a replica
    asks Redis once per session, not once per turn."""
    num_sessions, num_turns = 100, 10
    async with (
        started_redis_store(settings(shared_redis)) as one,
        started_redis_store(settings(shared_redis)) as two,
        started_redis_store(settings(shared_redis)) as three,
    ):
        stores = [one, two, three]
        for store in stores:
            await until_live(store)
        turns: dict[SessionKey, list[str]] = {SessionKey(f"{n:032x}"): [] for n in range(num_sessions)}
        moved_key = SessionKey(f"{5:032x}")
        calls_before = sum(store.stats().num_local_misses for store in stores)
        for turn in range(num_turns):
            if turn == num_turns // 2:
                held = await one.get(moved_key)
                assert held is not None
                await one.rebind(moved_key, held.version, BackendId("moved"), 1)
                await until(
                    lambda: all(store.stats().num_invalidations == 1 for store in stores), "the move is heard"
                )
            for number, key in enumerate(turns):
                store = stores[(number + turn) % 3]
                found = await store.get(key)
                if found is None:
                    found = await store.claim(key, BackendId(f"b{(number + turn) % 4}"), 1)
                assert found is not None
                store.renew(key, found, context_tokens=turn, num_turns=turn + 1)
                turns[key].append(found.backend_id)
        assert turns.pop(moved_key)[5:] == ["moved"] * 5
        assert all(len(Counter(homes)) == 1 for homes in turns.values())
        misses = sum(store.stats().num_local_misses for store in stores) - calls_before
        assert misses <= num_sessions * 3 + 3


async def test_end_is_followed(shared_redis: RedisProcess) -> None:
    """A session ended on one replica has no home on the other as soon as that is heard."""
    async with (
        started_redis_store(settings(shared_redis)) as one,
        started_redis_store(settings(shared_redis)) as two,
    ):
        await until_live(one)
        await until_live(two)
        await bound(one)
        assert await home(two) == A
        await one.end(KEY)
        await until(lambda: two.stats().num_invalidations == 1, "the end is heard")
        assert await home(two) is None


async def test_own_end_needs_no_channel(shared_redis: RedisProcess) -> None:
    """A replica that hears nothing forgets a session that it ended itself at once."""
    async with started_redis_store(settings(shared_redis)) as deaf:
        await until_live(deaf)
        deaf._channel._on_move = lambda key, version: None
        await bound(deaf)
        assert await deaf.end(KEY)
        assert await home(deaf) is None


async def test_move_not_heard_is_followed_within_the_stated_bound(shared_redis: RedisProcess) -> None:
    """With a channel that does not work, a copy is used for `local_ttl_s` and then asked for again."""
    clock = ManualClock()
    config = settings(shared_redis, heartbeat_interval_ms=100_000, local_ttl_s=30)
    async with started_redis_store(settings(shared_redis)) as one:
        binding = await bound(one)
        async with started_redis_store(config, clock=clock) as deaf:
            assert await home(deaf) == A
            # As if no beat had ever come back.
            await until(lambda: deaf.stats().is_invalidation_live, "the channel is live")
            deaf._set_trust(None)
            deaf._channel._on_move = lambda key, version: None
            await one.rebind(KEY, binding.version, B, 1)
            clock.now_s += 29.9
            assert await home(deaf) == A
            clock.now_s += 0.2
            assert await home(deaf) == B


async def test_move_lost_by_a_fail_over_is_undone_everywhere(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """Redis fails over to a copy that lacks a move: the replica that made it follows what Redis holds now, as
    the others do, and can move the session again."""
    clock = ManualClock()
    name = "homing:{00}:s:" + KEY
    async with started_redis_store(settings(shared_redis), clock=clock) as store:
        await until_live(store)
        old = await bound(store)
        value_before = await redis.get(name)
        assert value_before is not None
        assert await store.rebind(KEY, old.version, B, 1) is not None
        await redis.set(name, value_before, ex=100)
        clock.now_s += 31
        store._set_trust(None)
        assert await home(store) == A
        assert (await store.rebind(KEY, old.version, C, 1)).backend_id == C  # type: ignore[union-attr]  # None fails


async def test_silent_channel_is_noticed_and_opened_anew(shared_redis: RedisProcess) -> None:
    """A subscription that stays open and carries nothing is given up after three beats; what was read before
    is asked for again, and the new subscription is trusted."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        config = RedisSettings(
            url=f"redis://127.0.0.1:{proxy.port}/0", heartbeat_interval_ms=50, local_ttl_s=0.001
        )
        async with started_redis_store(config) as store:
            await until_live(store)
            await bound(store)
            assert await home(store) == A
            misses = store.stats().num_local_misses
            proxy.is_silent = True
            await until(lambda: not store.stats().is_invalidation_live, "the silence is noticed")
            proxy.is_silent = False
            await until(lambda: not store.stats().is_degraded, "the channel works again")
            assert await home(store) == A
            assert store.stats().num_local_misses == misses + 1
            assert await home(store) == A
            assert store.stats().num_local_misses == misses + 1


async def test_killed_subscription_is_noticed_at_once(shared_redis: RedisProcess, redis: Redis) -> None:
    """The server drops the subscription: what was read before is not trusted any more, also when the channel
    is back, since a move made in between was not heard."""
    async with (
        started_redis_store(settings(shared_redis)) as one,
        started_redis_store(settings(shared_redis, heartbeat_interval_ms=100, local_ttl_s=0.001)) as two,
    ):
        await until_live(two)
        binding = await bound(one)
        assert await home(two) == A
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: not two.stats().is_invalidation_live, "the loss is noticed")
        await one.rebind(KEY, binding.version, B, 1)
        await until_live(two)
        assert await home(two) == B


async def test_nonsense_on_the_channel_is_ignored(shared_redis: RedisProcess, redis: Redis) -> None:
    """Others may write to the channel: only well-formed moves are heeded."""
    async with started_redis_store(settings(shared_redis)) as store:
        await until_live(store)
        await bound(store)
        for data in (b"", b"x", b"-5 " + KEY.encode(), b"9" * 50 + b" " + KEY.encode(), b"\xff\xfe 1"):
            await redis.publish("homing:moves", data)
        await redis.publish("homing:moves", b"99999999999999999 " + KEY.encode())
        await until(lambda: store.stats().num_invalidations == 1, "the last one is heard")
        assert store.stats().is_invalidation_live


async def test_prefixes_do_not_meet(shared_redis: RedisProcess) -> None:
    """Two gateways with different prefixes share a Redis without seeing each other's sessions."""
    async with (
        started_redis_store(RedisSettings(url=shared_redis.url, key_prefix="one")) as one,
        started_redis_store(RedisSettings(url=shared_redis.url, key_prefix="two")) as two,
    ):
        await bound(one, A)
        assert await home(two) is None
        await bound(two, B)
        assert (await home(one), await one.count_by_backend()) == (A, {A: 1})
