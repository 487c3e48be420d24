"""Living with other replicas: once a second, tell them our load, learn theirs and their operators' orders.

Never on the request path. With the store away the others count as idle and their last orders hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.fleet.operator import Operator
from gateway.replicas.loads import SharedLoads
from gateway.routing.router import Router

INTERVAL_S = 1.0
ROUNDS_PER_REPORT = 3


class ReplicaSync:
    """Owns the one background task."""

    def __init__(
        self,
        router: Router,
        loads: SharedLoads,
        operator: Operator,
        *,
        clock: Callable[[], float],
        tell: Callable[[], Awaitable[object]],
    ) -> None:
        """`tell` writes what operators of other replicas may see of this one."""
        self._router, self._load_board, self._operator = router, loads, operator
        self._clock, self._tell = clock, tell
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
                await self._load_board.publish(self._router.loads())
                self._router.observe_others(self._load_board.others(), self._clock())
                if num_rounds % ROUNDS_PER_REPORT == 0:
                    await self._tell()
            except Exception:  # supervisor of its own rounds: one bad round must not end the exchange
                logging.getLogger(__name__).exception("replica exchange")
            num_rounds += 1
            await asyncio.sleep(INTERVAL_S)
