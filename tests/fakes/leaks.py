"""After any fault everything is as before: gauges, connections and tasks."""

from __future__ import annotations

import asyncio
import contextlib

from fakes.gateway_world import GatewayWorld

from gateway.values import BackendId


class LeakCheck:
    """Made when the world is at rest; `await check()` after the faults."""

    def __init__(self, world: GatewayWorld) -> None:
        self._world = world
        self._tasks = asyncio.all_tasks()

    async def check(self) -> None:
        world = self._world
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        world.assert_idle()
        await world.wait_for(lambda: self._num_active() == 0)
        with contextlib.suppress(TimeoutError):
            await world.wait_for(lambda: not self._new_tasks(), timeout_s=5)
        assert not self._new_tasks(), self._new_tasks()

    def _num_active(self) -> int:
        world = self._world
        return sum(
            world.gateway.pools.get(BackendId(f"b{number}")).stats().num_active
            for number in range(len(world.backends))
        )

    def _new_tasks(self) -> set[str]:
        """Tasks that were not there before; those of probes and of the fakes come and go."""
        names = {repr(task.get_coro()) for task in asyncio.all_tasks() - self._tasks}
        return {name for name in names if not any(word in name for word in ("Prober", "Fake", "LeakCheck"))}
