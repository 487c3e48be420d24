"""A pin for the whole fleet reaches backends that come later, or come again without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fakes.backend import ReceivedRequest, Turn, respond
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.admin.answers import Pin
from gateway.admin.engine_pins import EnginePins, PinTable
from gateway.admin.orders import PinOrder
from gateway.admin.standing_pins import MAX_ORDER_BYTES, MAX_ORDERS, MAX_TRIES, StandingPins
from gateway.errors import BadRequest, Conflict, UpstreamUnavailable
from gateway.fleet.engine_metrics import EngineReport
from gateway.fleet.registry import Fleet
from gateway.routing.health import HealthSettings, Outcome
from gateway.values import Backend, BackendId

V1 = "/admin/v1"
ORDER = PinOrder(name="support", prompt="You are patient.")
ONE = BackendId("w1")


class FakeEngines(EnginePins):
    """Engines that hold their pins in a dict."""

    def __init__(self) -> None:
        self.pins: dict[BackendId, list[Pin]] = {}
        self.orders: list[tuple[BackendId, dict[str, Any]]] = []
        self.num_asked = 0
        self.failure: Exception | None = None
        self.on_add: Callable[[], None] = lambda: None

    async def table(self, backend_id: BackendId) -> PinTable:
        self.num_asked += 1
        if self.failure is not None:
            raise self.failure
        return PinTable(pins=self.pins.get(backend_id, []))

    async def add(self, backend_id: BackendId, order: bytes) -> None:
        fields = json.loads(order)
        self.orders.append((backend_id, fields))
        self.pins.setdefault(backend_id, []).append(Pin(id="1", name=fields["name"]))
        self.on_add()

    async def remove(self, backend_id: BackendId, name: str) -> list[Pin]:
        return [self.pins[backend_id].pop()]


class World:
    """One fleet, its engines, and a clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engines = FakeEngines()
        self.fleet = Fleet(
            HealthSettings(healthy_after=1),
            clock=lambda: self.now_s,
        )
        self.standing = StandingPins(self.fleet, self.engines, msgspec.json.encode, clock=lambda: self.now_s)

    def join(self, name: BackendId, start_s: float = 1.0) -> None:
        self.fleet.add(Backend(backend_id=name, base_url=f"http://{name}", engine="torch"))
        self.fleet.observe_probe(name, Outcome.SUCCESS)
        self.fleet.observe_report(name, EngineReport(start_time_s=start_s))

    def missing(self) -> list[tuple[str, int, bool, str | None]]:
        found = self.standing.missing_on(self.fleet.view.backends[ONE], self.engines.pins.get(ONE, []))
        return [(one.name, one.num_tries, one.is_given_up, one.problem) for one in found]


@pytest.fixture
def world() -> World:
    world = World()
    world.join(ONE)
    return world


async def test_a_newcomer_is_brought_the_pin_once(world: World) -> None:
    """What it gets and loses again in the same life, it keeps lost: somebody there let it go."""
    world.standing.keep(ORDER)
    assert world.missing() == [("support", 0, False, None)]
    await world.standing.look()
    assert [backend for backend, _ in world.engines.orders] == [ONE]
    world.engines.pins.clear()
    await world.standing.look()
    assert (len(world.engines.orders), world.missing()) == (1, [])


async def test_a_life_without_the_pin_gets_it_again(world: World) -> None:
    """A worker that came back with its manifest has it and is asked once; an empty one is brought it."""
    world.standing.keep(ORDER)
    await world.standing.look()
    for start_s, keeps_manifest in ((2.0, True), (3.0, False)):
        if not keeps_manifest:
            world.engines.pins.clear()
        world.fleet.observe_report(ONE, EngineReport(start_time_s=start_s))
        num_asked = world.engines.num_asked
        await world.standing.look()
        await world.standing.look()
        assert world.engines.num_asked == num_asked + 1
        assert len(world.engines.orders) == (1 if keeps_manifest else 2)


async def test_a_backend_that_fails_is_tried_ever_later_and_then_left_alone(world: World) -> None:
    """Until its next life, in which it may be well."""
    world.engines.failure = UpstreamUnavailable("backend w1 answered 500")
    world.standing.keep(ORDER)
    times_s = []
    for _ in range(200):
        num_asked = world.engines.num_asked
        await world.standing.look()
        if world.engines.num_asked > num_asked:
            times_s.append(world.now_s - 100.0)
        world.now_s += 1.0
    assert times_s == [0.0, 2.0, 6.0, 14.0, 30.0, 62.0]
    assert world.missing() == [("support", MAX_TRIES, True, "backend w1 answered 500")]
    world.engines.failure = None
    world.fleet.observe_report(ONE, EngineReport(start_time_s=2.0))
    await world.standing.look()
    assert (len(world.engines.orders), world.missing()) == (1, [])


async def test_only_engines_with_pins_that_answer_are_asked(world: World) -> None:
    """Not other engines, not one that is down or still joining."""
    others = {"v": "vllm", "joining": "torch"}
    for name, engine in others.items():
        self_id = BackendId(name)
        world.fleet.add(Backend(backend_id=self_id, base_url=f"http://{name}", engine=engine))
    world.fleet.observe_probe(BackendId("v"), Outcome.SUCCESS)
    world.standing.keep(ORDER)
    await world.standing.look()
    assert [backend for backend, _ in world.engines.orders] == [ONE]


async def test_a_pin_that_expires_is_brought_with_the_time_it_has_left(world: World) -> None:
    """And no longer at all once that is over."""
    world.standing.keep(msgspec.structs.replace(ORDER, ttl_s=60.0))
    world.now_s += 20.0
    await world.standing.look()
    assert world.engines.orders[0][1]["ttl_s"] == 40.0
    world.now_s += 40.0
    world.join(BackendId("w2"))
    await world.standing.look()
    assert len(world.engines.orders) == 1


async def test_a_pin_taken_back_while_it_is_brought_does_not_stay(world: World) -> None:
    """The order to let it go may pass a backend that has not got it yet."""
    world.standing.keep(ORDER)
    world.engines.on_add = lambda: world.standing.forget([("support", "")])
    await world.standing.look()
    assert world.engines.pins[ONE] == []


async def test_what_stands_is_bounded(world: World) -> None:
    """In number and in size: the orders hold prompts."""
    for number in range(MAX_ORDERS):
        world.standing.keep(PinOrder(name=str(number), prompt="x"))
    with pytest.raises(Conflict, match="remove one first"):
        world.standing.check(ORDER)
    world.standing.check(PinOrder(name="0", prompt="x"))  # stands already
    assert world.standing.forget_named("0")
    world.standing.check(ORDER)
    with pytest.raises(BadRequest, match="name its backends"):
        world.standing.check(PinOrder(name="big", prompt="x" * MAX_ORDER_BYTES))


class PinnedEngine(ProbedBackend):
    """A scripted worker with pins, over HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[dict[str, Any]] = []
        self.has_room = True

    async def answer(self, turn: Turn) -> bool:
        request = turn.request
        if not request.target.startswith("/v1/kv/pins"):
            return await super().answer(turn)
        if request.method == "POST" and not self.has_room:
            await respond(b'{"error": {"message": "no room"}}', status=409)(turn)
            return turn.keeps_open
        if request.method == "POST":
            self.pins.append({"id": f"p{len(self.pins)}", "name": name_of(request), "state": "pinned"})
        elif request.method == "DELETE":
            self.pins = [one for one in self.pins if not request.target.endswith(one["id"])]
        await respond(json.dumps({"pins": self.pins}).encode())(turn)
        return turn.keeps_open


def name_of(request: ReceivedRequest) -> str:
    return str(json.loads(request.body)["name"])


async def test_a_joiner_and_a_restarted_worker_get_the_fleets_pins() -> None:
    """Through the API: shown as missing until then, gone everywhere when taken back."""
    async with PinnedEngine() as first, PinnedEngine() as second:
        second.has_room = False
        spec = {"id": "w0", "url": first.base_url, "engine": "torch"}
        async with GatewayWorld(0, backends=[spec]) as world:
            order = {"name": "support", "prompt": "You are patient."}
            made = await world.admin.post(f"{V1}/pins", json=order)
            assert (made.status_code, made.json()["backends"][0]["missing"]) == (201, [])
            joiner = {"id": "w1", "url": second.base_url, "engine": "torch"}
            assert (await world.admin.post(f"{V1}/backends", json=joiner)).status_code == 201
            (missing,) = await missing_on_w1(world)
            assert (missing["name"], missing["is_given_up"]) == ("support", False)
            assert missing["problem"] == "backend w1 refused: no room (409)"
            second.has_room = True
            await world.wait_for(lambda: len(second.pins) == 1)
            first.pins, first.start_time_s = [], first.start_time_s + 10  # again, its manifest lost
            await world.wait_for(lambda: len(first.pins) == 1)
            gone = await world.admin.delete(f"{V1}/pins/support")
            assert gone.status_code == 200
            assert (first.pins, second.pins) == ([], [])
            assert (await world.admin.delete(f"{V1}/pins/support")).status_code == 404


async def missing_on_w1(world: GatewayWorld) -> list[dict[str, Any]]:
    """What the joiner lacks, once it has been offered it."""
    async with asyncio.timeout(20):
        while True:
            rows = (await world.admin.get(f"{V1}/pins")).json()["backends"]
            missing: list[dict[str, Any]] = next(row["missing"] for row in rows if row["backend"] == "w1")
            if any(one["num_tries"] for one in missing):
                return missing
            await asyncio.sleep(0.05)


async def test_a_pin_for_named_backends_does_not_stand() -> None:
    """It was for those: a joiner gets none and lacks none."""
    async with PinnedEngine() as first, PinnedEngine() as second:
        engines = [
            {"id": f"w{number}", "url": one.base_url, "engine": "torch"}
            for number, one in enumerate((first, second))
        ]
        async with GatewayWorld(0, backends=engines) as world:
            order = {"name": "support", "prompt": "x", "backends": ["w0"]}
            assert (await world.admin.post(f"{V1}/pins", json=order)).status_code == 201
            rows = (await world.admin.get(f"{V1}/pins")).json()["backends"]
            assert [(len(row["pins"]), row["missing"]) for row in rows] == [(1, []), (0, [])]
