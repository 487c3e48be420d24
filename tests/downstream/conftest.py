"""Both event loops: asyncio's own and uvloop, which the gateway runs on. They differ in how writes, resets
and half-closes reach a protocol, so each test here runs on each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories(config: object, item: object) -> Mapping[str, Callable[[], object]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
