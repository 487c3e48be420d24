"""A changed configuration: taken over whole while requests run, or refused whole."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
from fakes import backend as fake
from fakes.certificates import Authority
from fakes.gateway_process import GatewayProcess
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.config.config import parse_config
from gateway.config.file_watch import ChangedFiles
from gateway.config.reload import changed_paths, is_live
from gateway.values import BackendId, ReloadReport

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'


async def reload(world: GatewayWorld, **changes: Any) -> ReloadReport:
    """Reload with these sections in the place of the old ones."""
    world.data.update(changes)
    return await world.gateway.reloader.reload()


def named(world: GatewayWorld, *numbers: int, **options: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"b{number}", "url": world.backends[number].base_url, "engine": "vllm", **options}
        for number in numbers
    ]


async def test_backends_come_and_go_and_the_rest_stays() -> None:
    """One is added, one removed, one reweighted; sessions of the others keep their homes."""
    async with GatewayWorld(num_backends=2) as world, ProbedBackend() as third:
        homes = {f"s{n}": (await world.chat(f"s{n}")).headers["x-homing-backend"] for n in range(20)}
        spec = {"id": "b2", "url": third.base_url, "engine": "vllm", "weight": 3.0}
        report = await reload(world, backends=[*named(world, 1, weight=2.0), spec])
        assert report.outcome == "applied"
        assert set(report.changed) == {"backends.b0", "backends.b1", "backends.b2"}
        fleet = world.gateway.fleet
        await world.wait_for(lambda: set(fleet.view.backends) == {"b1", "b2"})
        await world.wait_for(world._all_ready)
        assert {name: one.weight for name, one in fleet.view.backends.items()} == {"b1": 2.0, "b2": 3.0}
        for session, home in homes.items():
            now = (await world.chat(session)).headers["x-homing-backend"]
            assert now == home if home == "b1" else now in ("b1", "b2")


async def test_a_stream_survives_the_removal_of_its_backend() -> None:
    """The backend takes no new session, its stream goes on to the end, and then it leaves."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=2) as world:
        home = (await world.chat("alice")).headers["x-homing-backend"]
        number = int(home[1:])
        world.backends[number].default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        running = asyncio.ensure_future(world.chat("alice", stream=True))
        await world.wait_for(lambda: world.gateway.router.in_flight(BackendId(home)) == 1)
        assert (await reload(world, backends=named(world, 1 - number))).outcome == "applied"
        assert world.state(number) == "draining"
        assert (await world.chat("bob")).headers["x-homing-backend"] != home
        gate.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await world.wait_for(lambda: world.state(number) == "removed")
        world.assert_idle()


async def test_a_backend_named_again_before_it_left_stays() -> None:
    """Taking the removal back undoes the drain."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=1) as world:
        world.backends[0].default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        running = asyncio.ensure_future(world.chat("alice", stream=True))
        await world.wait_for(lambda: world.gateway.router.in_flight(BackendId("b0")) == 1)
        await reload(world, backends=[])
        assert world.state(0) == "draining"
        await reload(world, backends=named(world, 0))
        assert world.state(0) == "ready"
        gate.set()
        await running


async def test_an_operator_may_keep_a_backend_that_the_file_dropped() -> None:
    """An undrain over the admin API while it is leaving: it stays, until it is removed there."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=1) as world:
        world.backends[0].default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        running = asyncio.ensure_future(world.chat("alice", stream=True))
        await world.wait_for(lambda: world.gateway.router.in_flight(BackendId("b0")) == 1)
        await reload(world, backends=[])
        await world.admin.post("/admin/v1/backends/b0/undrain")
        gate.set()
        await running
        await world.wait_for(lambda: not world.gateway.membership._departures)
        assert world.state(0) == "ready"


async def test_what_operators_did_stays() -> None:
    """A backend added by the admin API, a weight set there and a removal outlive an unrelated reload."""
    async with GatewayWorld(num_backends=3) as world, ProbedBackend() as extra:
        spec = {"id": "extra", "url": extra.base_url, "engine": "vllm"}
        await world.admin.post("/admin/v1/backends", json=spec)
        await world.admin.patch("/admin/v1/backends/b0", json={"weight": 7.0})
        await world.admin.delete("/admin/v1/backends/b1")
        assert (await reload(world, limits={"max_in_flight": 9})).changed == ("limits.max_in_flight",)
        backends = world.gateway.fleet.view.backends
        assert set(backends) == {"b0", "b2", "extra"}
        assert backends[BackendId("b0")].weight == 7.0
        clash = [*named(world, 0, 1, 2), {"id": "other", "url": extra.base_url}]
        report = await reload(world, backends=clash)
        assert report.errors == ("backends.other.url: backend extra already has this url",)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"routing": {"polcy": "homing"}}, "routing: unknown key `polcy`"),
        ({"backends": [{"url": "ftp://x"}]}, "backends[0]: base_url"),
        ({"listen": {"port": 1234}}, "listen.port: needs a restart"),
        ({"workers": 2, "sessions": {"store": "redis"}}, "workers: needs a restart"),
        ({"sessions": {"ttl_s": 5}}, "sessions.ttl_s: needs a restart"),
        ({"routing": {"policy": "round_robin"}}, "routing.policy: needs a restart"),
        ({"admin": {"is_enabled": False, "port": 0}}, "admin.is_enabled: needs a restart"),
        ({"listen": {"port": 0, "tls": {"cert_file": "/absent.pem"}}}, "listen.tls: cert_file '/absent.pem'"),
    ],
)
async def test_what_cannot_be_taken_over_changes_nothing(changes: dict[str, Any], error: str) -> None:
    """Also not the valid half of the file; the reason names the option, and metrics tell."""
    async with GatewayWorld(num_backends=1) as world:
        before = world.gateway.config
        report = await reload(world, limits={"max_in_flight": 1}, **changes)
        assert (report.outcome, report.generation) == ("rejected", 1)
        assert any(error in one for one in report.errors), report.errors
        assert world.gateway.config is before
        metrics = (await world.client.get("/metrics")).text
        assert "homing_config_last_reload_successful 0" in metrics
        assert "homing_config_generation 1" in metrics
        assert (await world.chat("alice")).status_code == 200


async def test_every_live_section_is_in_force_at_once() -> None:
    """Limits, keys, failover, health, routing, fleet: the next request meets the new values."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=1) as world:
        report = await reload(
            world,
            limits={"max_in_flight": 1, "queue_size": 0},
            keys={"headers": ["x-chat"]},
            key_watch={"is_enabled": False},
            routing={"retry_after_s": 9.0},
            health={"unhealthy_after": 7},
            failover={"max_attempts": 1},
            fleet={"drain_deadline_s": 1.0},
            drain_timeout_s=3.0,
        )
        assert report.outcome == "applied", report.errors
        gateway = world.gateway
        world.backends[0].default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        running = asyncio.ensure_future(world.chat("bob", stream=True))
        await world.wait_for(lambda: gateway.proxy.num_in_flight == 1)
        assert (await world.chat("alice")).status_code == 503
        gate.set()
        await running
        assert gateway.fleet.health.settings.unhealthy_after == 7
        assert gateway.router.settings.retry_after_s == 9.0
        assert gateway.config.drain_timeout_s == 3.0
        assert (await world.admin.get("/admin/v1/config")).json()["config"]["limits"]["max_in_flight"] == 1
        assert "homing_config_generation 2" in (await world.client.get("/metrics")).text
        await reload(world, limits={})
        await world.chat(headers={"x-chat": "alice"})
        answer = await world.chat(headers={"x-chat": "alice"})
        assert answer.headers["x-homing-affinity"] == "hit"


async def test_a_request_keeps_the_configuration_it_began_with() -> None:
    """A request under way when retries are switched off still gets its own; the next one gets none."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=2) as world:
        busy = fake.respond(status=503, reason="Busy")

        async def busy_later(turn: fake.Turn) -> None:
            await gate.wait()
            await busy(turn)

        for backend in world.backends:
            backend.default = busy_later
        running = asyncio.ensure_future(world.chat())
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 1)
        await reload(world, failover={"max_attempts": 1})
        assert world.gateway.proxy.num_in_flight == 1  # counted together with those of the new one
        gate.set()
        await running
        assert sum(world.served().values()) == 2
        await world.chat()
        assert sum(world.served().values()) == 3


async def test_reloads_under_load_cost_no_request() -> None:
    """B59: backends come, go and change weight, files are refused, all while requests run: none fails, each
    backend has exactly one probe task, and gauges come back to zero."""
    async with GatewayWorld(num_backends=3) as world:
        is_over = False
        statuses: list[int] = []

        async def send_for_ever(number: int) -> None:
            while not is_over:
                statuses.append((await world.chat(f"s{number}")).status_code)

        senders = [asyncio.ensure_future(send_for_ever(number)) for number in range(4)]
        sets = [(0, 1, 2), (0, 1), (1, 2), (0, 2)]
        for number in range(20):
            chosen = sets[number % 4]
            if number % 5 == 4:
                url = world.backends[0].base_url
                report = await reload(world, backends=[{"id": "x", "url": url}, {"id": "y", "url": url}])
                assert "have the same url" in report.errors[0]
            else:
                report = await reload(world, backends=named(world, *chosen, weight=2.0 + number))
                assert report.outcome == "applied"
                present = {f"b{one}" for one in chosen}
                await world.wait_for(lambda p=present: set(world.gateway.fleet.view.backends) == p)  # type: ignore[misc]  # bound early
                assert world.gateway.prober._tasks.keys() == present
                await world.wait_for(world._all_ready)
        is_over = True
        await asyncio.gather(*senders)
        assert len(statuses) >= 20
        assert set(statuses) == {200}
        world.assert_idle()


async def test_the_same_configuration_again_changes_nothing() -> None:
    """Order of backends and spelt-out defaults make no difference."""
    async with GatewayWorld(num_backends=2) as world:
        report = await reload(world, backends=world.data["backends"][::-1], workers=1)
        assert (report.outcome, report.changed, report.generation) == ("unchanged", (), 1)


def test_differences_have_paths() -> None:
    """Each differing option is named once, at its own depth."""
    before = parse_config({"backends": [{"id": "a", "url": "http://a"}]})
    after = parse_config({"routing": {"stay_gain": 0.5}, "listen": {"tls": {"cert_file": "x"}}})
    assert set(changed_paths(before, after)) == {"backends.a", "routing.stay_gain", "listen.tls"}
    assert [is_live(path) for path in ("listen.tls.cert_file", "listen.host", "routing.policy", "new")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_file_counts_as_changed_when_it_has_settled(tmp_path: Path) -> None:
    """Not at the first look, not while it is written, not when it is gone; a turned link is a change."""
    (tmp_path / "one").write_text("a")
    (tmp_path / "two").write_text("b")
    link = tmp_path / "config"
    link.symlink_to(tmp_path / "one")
    files = ChangedFiles()
    assert [files.look([link]) for _ in range(2)] == [False, False]
    (tmp_path / "new").symlink_to(tmp_path / "two")
    (tmp_path / "new").replace(link)
    assert [files.look([link]) for _ in range(3)] == [False, True, False]
    (tmp_path / "two").write_text("half")
    assert not files.look([link])
    (tmp_path / "two").write_text("half and whole")
    assert [files.look([link]) for _ in range(2)] == [False, True]
    link.unlink()
    assert [files.look([link]) for _ in range(2)] == [False, False]


async def test_a_stream_survives_sighup_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """A stream runs through an accepted and a refused reload of a real process; log and metrics tell."""
    gate = asyncio.Event()
    async with ProbedBackend() as one, ProbedBackend() as two:
        one.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        first, second = ({"id": name, "url": it.base_url} for name, it in (("one", one), ("two", two)))
        async with GatewayProcess(tmp_path, backends=[first]) as gateway:
            running = asyncio.ensure_future(gateway.chat("alice", stream=True))
            async with asyncio.timeout(10):
                while not one.requests:
                    await asyncio.sleep(0.01)
            gateway.write(backends=[second])
            accepted = await gateway.reload()
            assert (accepted["event"], accepted["generation"]) == ("config_reloaded", 2)
            assert set(accepted["changed"]) == {"backends.one", "backends.two"}
            gateway.write(backends=[first], routing={"stay_gian": 1})
            refused = await gateway.reload()
            assert refused["event"] == "config_rejected"
            (error,) = refused["errors"]
            assert error.startswith(f"{gateway.config_path}: routing: unknown key `stay_gian`")
            gate.set()
            assert (await running).text.endswith("data: [DONE]\n\n")
            await gateway.wait_for(lambda: gateway.events("backend_left") != [])
            assert (await gateway.chat("bob")).headers["x-homing-backend"] == "two"
            metrics = (await gateway.client.get(f"{gateway.base_url}/metrics")).text
            assert "homing_config_last_reload_successful 0" in metrics
            assert "homing_config_generation 2" in metrics


async def test_a_turned_link_is_noticed(tmp_path: Path) -> None:
    """`reload.watch` with the layout of a mounted ConfigMap: config → ..data → a folder that is replaced."""
    async with ProbedBackend() as backend:
        watch = {"watch": True, "interval_s": 0.05}
        gateway = GatewayProcess(tmp_path, backends=[{"id": "one", "url": backend.base_url}], reload=watch)
        for name in ("v1", "v2"):
            (tmp_path / name).mkdir()
        gateway.config_path.replace(tmp_path / "v1" / "homing.yaml")
        (tmp_path / "..data").symlink_to("v1")
        gateway.config_path.symlink_to("..data/homing.yaml")
        text = (tmp_path / "v1" / "homing.yaml").read_text()
        (tmp_path / "v2" / "homing.yaml").write_text(text + "drain_timeout_s: 7.0\n")
        async with gateway:
            (tmp_path / "..new").symlink_to("v2")
            (tmp_path / "..new").replace(tmp_path / "..data")
            await gateway.wait_for(lambda: gateway.events("config_reloaded") != [])
            assert gateway.events("config_reloaded")[0]["changed"] == ["drain_timeout_s"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_a_rotated_certificate_is_noticed(tmp_path: Path) -> None:
    """Files replaced on disk, no signal, no `reload.watch`: new connections see the new certificate."""
    authority = Authority(tmp_path)
    authority.issue("server")
    files = {"cert_file": authority.path("server.pem"), "key_file": authority.path("server.key")}
    async with ProbedBackend() as backend:
        gateway = GatewayProcess(
            tmp_path,
            admin={"port": 0, "tls": files},
            backends=[{"url": backend.base_url}],
            reload={"interval_s": 0.05},
        )
        async with gateway:

            def shown() -> str:
                return ssl.get_server_certificate(("127.0.0.1", gateway.admin_port), timeout=5)

            before = await asyncio.to_thread(shown)
            authority.issue("server")
            async with asyncio.timeout(20):
                while await asyncio.to_thread(shown) == before:
                    await asyncio.sleep(0.02)
            assert await asyncio.to_thread(shown) == (tmp_path / "server.pem").read_text()
