"""Limits of a tenant on the wire: refusals in each dialect, what answers tell, and what replicas share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import RedisProcess, redis_server, require_redis_server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    require_redis_server()
    with redis_server(tmp_path) as process:
        yield process


def limited(**limits: Any) -> dict[str, Any]:
    return {"limits": {"per_tenant": limits}}


def shared(redis: RedisProcess) -> dict[str, Any]:
    return {"sessions": {"store": "redis", "redis": {"url": redis.url, "budget_ms": 1000}}}


async def test_answers_tell_what_is_left_and_refusals_when_to_come_again() -> None:
    """OpenAI's headers, on plain answers and streams; then 429 with Retry-After in both dialects."""
    async with GatewayWorld(**limited(requests_per_minute=2, tokens_per_minute=1000)) as world:
        plain = await world.chat("a")
        assert plain.headers["x-ratelimit-limit-requests"] == "2"
        assert plain.headers["x-ratelimit-remaining-requests"] == "1"
        assert plain.headers["x-ratelimit-limit-tokens"] == "1000"
        stream = await world.chat("a", stream=True)
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        assert stream.headers["x-ratelimit-reset-requests"].startswith(("1m0s", "59."))
        refused = await world.chat("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-should-retry" not in refused.headers
        claude = await world.client.post(
            "/v1/messages",
            json={"model": "fake-model", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        )
        assert (claude.status_code, claude.json()["error"]["type"]) == (429, "rate_limit_error")
        assert sum(world.served().values()) == 2
        page = (await world.client.get("/metrics")).text
        assert 'homing_admission_rejections_total{cause="tenant_requests"} 2' in page
        world.assert_idle()


async def test_a_refusal_for_long_tells_sdks_not_to_retry() -> None:
    """One request in ten minutes' worth of tokens: an SDK would come back in vain after a few seconds."""
    async with GatewayWorld(**limited(tokens_per_minute=1)) as world:
        assert (await world.chat("a")).status_code == 200  # 12 tokens: eleven minutes of debt
        refused = await world.chat("a")
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")


async def test_tokens_are_charged_as_reported() -> None:
    """An answer reports twelve: a long prompt's estimate is given back. A failed request costs nothing."""
    async with GatewayWorld(**limited(tokens_per_minute=10_000)) as world:
        await world.chat("a", text="word " * 4000)
        second = await world.chat("b", text="")
        assert int(second.headers["x-ratelimit-remaining-tokens"]) > 9950
        for backend in world.backends:
            backend.script(fake.respond(b"{}", status=400))
        assert (await world.chat("c", text="word " * 4000)).status_code == 400
        third = await world.chat("b", text="")
        assert int(third.headers["x-ratelimit-remaining-tokens"]) > 9950


async def test_requests_in_flight_of_a_tenant_are_bounded_and_a_gone_client_frees_its_place() -> None:
    """The second at once is refused; after the first has been cancelled the place is free."""
    async with GatewayWorld(num_backends=1, **limited(max_in_flight=1)) as world:
        world.backends[0].script(fake.hang())
        hanging = asyncio.ensure_future(world.chat("a"))
        await world.wait_for(lambda: bool(world.served()))
        assert (await world.chat("b")).status_code == 429
        hanging.cancel()
        await world.wait_for(lambda: world.gateway.limiter.num_in_flight("default") == 0)
        assert (await world.chat("b")).status_code == 200
        world.assert_idle()


@pytest.mark.redis
async def test_two_gateways_share_one_bucket(redis: RedisProcess) -> None:
    """Six requests a minute over both, whichever they meet."""
    async with GatewayWorld(
        num_gateways=2, **shared(redis), **limited(requests_per_minute=6, tokens_per_minute=100_000)
    ) as world:
        answers = [await world.chat(f"s{number}", at=number % 2) for number in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 6 + [429] * 2
        remaining = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers[:6]]
        assert remaining == [5, 4, 3, 2, 1, 0]


@pytest.mark.redis
async def test_two_gateways_share_the_requests_in_flight(redis: RedisProcess) -> None:
    """A request under way at one gateway is counted at the other, until it ends."""
    async with GatewayWorld(
        num_backends=1, num_gateways=2, **shared(redis), **limited(max_in_flight=1)
    ) as world:
        world.backends[0].script(fake.hang())
        hanging = asyncio.ensure_future(world.chat("a"))
        await world.wait_for(lambda: bool(world.served()))
        assert (await world.chat("b", at=1)).status_code == 429
        hanging.cancel()
        await world.wait_for(lambda: world.gateways[0].limiter.num_in_flight("default") == 0)
        async with asyncio.timeout(5):
            while (await world.chat("b", at=1)).status_code == 429:
                await asyncio.sleep(0.01)


@pytest.mark.redis
async def test_with_redis_gone_each_gateway_goes_on_alone(redis: RedisProcess) -> None:
    """Never a 5xx: the limit holds per gateway, from the last levels seen."""
    async with GatewayWorld(num_gateways=2, **shared(redis), **limited(requests_per_minute=4)) as world:
        assert (await world.chat("a", at=0)).status_code == 200
        redis.kill()
        statuses = [(await world.chat(f"s{number}", at=0)).status_code for number in range(5)]
        assert statuses == [200] * 3 + [429] * 2
        assert (await world.chat("b", at=1)).status_code == 200
