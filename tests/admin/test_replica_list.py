"""Replicas that share a store know of each other; one that has ended is not listed for long."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import redis_server

pytestmark = pytest.mark.redis


async def test_each_replica_lists_all(tmp_path: Path) -> None:
    """Itself first, the others as they told; alone where the store is in memory."""
    with redis_server(tmp_path) as server:
        sessions = {"store": "redis", "redis": {"url": server.url}}
        async with GatewayWorld(num_backends=1, num_gateways=2, sessions=sessions) as world:
            for admin in world.admins * 2:  # each tells the others when it is asked
                listed = (await admin.get("/admin/v1/replicas")).json()["replicas"]
            assert len(listed) == 2
            assert all(one["backends_ready"] == 1 for one in listed)
    async with GatewayWorld(num_backends=1) as world:
        assert len((await world.admin.get("/admin/v1/replicas")).json()["replicas"]) == 1


async def test_what_another_version_wrote_is_not_shown(tmp_path: Path) -> None:
    """A report that cannot be read hides no other and is no error."""
    with redis_server(tmp_path) as server:
        sessions = {"store": "redis", "redis": {"url": server.url}}
        async with GatewayWorld(num_backends=1, num_gateways=2, sessions=sessions) as world:
            await world.admins[1].get("/admin/v1/replicas")
            server.ask("HSET", "homing:{00}:replicas", "odd", "9999999999999 {not json")
            listed = await world.admin.get("/admin/v1/replicas")
            assert listed.status_code == 200
            assert len(listed.json()["replicas"]) == 2
