"""B34: one backend that hangs, like a stopped process, costs nobody but its own sessions, and them once."""

from __future__ import annotations

import asyncio

from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.leaks import LeakCheck

HEALTH = {
    **FAST_HEALTH,
    "probe_interval_s": 0.1,
    "probe_timeout_s": 0.2,
    "unhealthy_after": 2,
    "min_down_s": 60,
}
NUM_SESSIONS = 40


async def test_frozen_backend_is_left_and_the_others_go_on() -> None:
    """Sessions of the other backends are answered while it hangs; its own are answered elsewhere; the list of
    models stays complete; the probes take it out, and nothing remains in flight."""
    upstream = {"first_byte_timeout_s": 1.0}
    async with GatewayWorld(4, health=HEALTH, upstream=upstream) as world:
        leaks = LeakCheck(world)
        homes = {}
        for number in range(NUM_SESSIONS):
            response = await world.chat(f"s{number}")
            homes[f"s{number}"] = response.headers["x-homing-backend"]
        frozen = world.backends[0]
        others = [session for session, home in homes.items() if home != "b0"]
        victims = [session for session, home in homes.items() if home == "b0"]
        assert victims
        frozen.is_frozen = True
        frozen.cut_all()
        waiting = [asyncio.create_task(world.chat(session)) for session in victims]
        for session in others:
            response = await world.chat(session)
            assert response.status_code == 200
            assert response.headers["x-homing-backend"] == homes[session]
        assert (await world.client.get("/v1/models")).status_code == 200
        for response in await asyncio.gather(*waiting):
            assert response.status_code == 200
            assert response.headers["x-homing-backend"] != "b0"
        await world.wait_for(lambda: world.state(0) == "down")
        for session in victims:
            response = await world.chat(session)
            assert (response.status_code, response.headers["x-homing-backend"] != "b0") == (200, True)
        await world.client.aclose()  # its kept connections are no leak
        await leaks.check()
