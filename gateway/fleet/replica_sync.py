"""The exchange with other replicas: once a second, exchange loads, news and operators' orders.

Never on the request path. While Redis is unavailable the others count as idle, and orders hold as they are
known here. A single process runs it too: orders apply to backends that come, and end with those that go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.fleet.operator import Operator
from gateway.replicas.loads import SharedLoads
from gateway.replicas.news import SharedNews
from gateway.routing.router import Router

INTERVAL_S = 1.0
ROUNDS_PER_PRESENCE = 3


class ReplicaSync:
    """Owns one background task."""

    def __init__(
        self,
        router: Router,
        loads: SharedLoads,
        news: SharedNews,
        operator: Operator,
        *,
        clock: Callable[[], float],
        publish_presence: Callable[[], Awaitable[object]],
    ) -> None:
        """`publish_presence` writes what operators of other replicas can see of this one."""
        self._router, self._loads, self._news, self._operator = router, loads, news, operator
        router.news.is_collecting = news.has_others
        self._clock, self._publish_presence = clock, publish_presence
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        num_rounds = 0
        while True:
            try:
                await self._operator.learn()
                await self._loads.publish(self._router.loads())
                self._router.observe_others(self._loads.others(), self._clock())
                for news in await self._news.exchange(self._router.news.take()):
                    self._router.observe_news(news, self._clock())
                if num_rounds % ROUNDS_PER_PRESENCE == 0:
                    await self._publish_presence()
            except Exception:  # one failed round must not end the exchange
                logging.getLogger(__name__).exception("replica exchange")
            num_rounds += 1
            await asyncio.sleep(INTERVAL_S)
