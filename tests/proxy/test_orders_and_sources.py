"""Operators' orders about backends that discovery finds: they hold when a backend is lost and found again."""

from __future__ import annotations

from pathlib import Path

import yaml
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.replicas.order_book import Subject
from gateway.values import BackendId


async def test_orders_hold_for_a_backend_that_is_lost_and_found_again(tmp_path: Path) -> None:
    """Removed, it is not taken in again; drained, it drains again. A gateway without Redis does so too,
    and counts the orders as in force as long as a source names the backend."""
    source = tmp_path / "backends.yaml"
    names = [BackendId("gone"), BackendId("drained")]
    async with ProbedBackend() as one, ProbedBackend() as two:
        rows = [{"id": name, "url": engine.base_url} for name, engine in zip(names, (one, two), strict=True)]
        source.write_text(yaml.safe_dump(rows))
        discovery = {"files": [{"path": str(source)}], "interval_s": 0.05}
        async with GatewayWorld(num_backends=1, fleet={"discovery": discovery}) as world:
            gateway = world.gateway
            view = lambda: gateway.fleet.view.backends  # noqa: E731 - read anew each time
            await world.wait_for(lambda: set(names) <= view().keys())
            assert (await world.admin.delete("/admin/v1/backends/gone")).status_code == 204
            assert (await world.admin.post("/admin/v1/backends/drained/drain")).status_code == 200
            source.write_text("[]")
            await world.wait_for(lambda: not gateway.discovery.named)
            await world.wait_for(lambda: "drained" not in view())
            assert not gateway.operator._in_force()
            source.write_text(yaml.safe_dump(rows))
            await world.wait_for(lambda: gateway.discovery.named == set(names))
            await world.wait_for(lambda: "drained" in view())
            assert gateway.fleet.drain_left_s(names[1]) is not None
            assert "gone" not in view()
            assert gateway.operator._in_force() == {Subject(name, "state") for name in names}
