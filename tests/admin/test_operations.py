"""The operations of the admin API on a live gateway: backends, sessions, decisions, process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld

from gateway.admin import decision_operations
from gateway.admin.process_operations import MASK, mask_secrets
from gateway.routing.ring import MAX_BACKEND_POINTS, Ring
from gateway.routing.what_if import forecast
from gateway.values import BackendId

V1 = "/admin/v1"
SYSTEM = [{"role": "system", "content": "You are a helpful assistant of the harbour office. " * 20}]


async def get(world: GatewayWorld, path: str, **params: Any) -> Any:
    answer = await world.admin.get(f"{V1}{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def turn(world: GatewayWorld, session: str, number: int) -> str:
    """One more turn of a conversation with a shared system prompt; returns its home."""
    history = [{"role": "user", "content": f"question {one} of {session}"} for one in range(number + 1)]
    return (await world.chat(session, messages=SYSTEM + history)).headers["x-homing-backend"]


async def key_of(world: GatewayWorld, session: str) -> str:
    (found,) = (await get(world, "/sessions", session_id=session))["sessions"]
    return str(found["key"])


# -- backends


async def test_adding_a_backend_twice_changes_nothing_the_second_time() -> None:
    """201, then 200; the same address under another name is a conflict."""
    async with GatewayWorld(num_backends=2) as world:
        await world.admin.delete(f"{V1}/backends/b1")
        spec = {"id": "b9", "url": world.backends[1].base_url, "engine": "vllm"}
        assert (await world.admin.post(f"{V1}/backends", json=spec)).status_code == 201
        again = await world.admin.post(f"{V1}/backends", json=spec)
        assert (again.status_code, again.json()["id"]) == (200, "b9")
        other = await world.admin.post(f"{V1}/backends", json={**spec, "id": "b8"})
        assert (other.status_code, other.json()["param"]) == (409, "url")


async def test_two_operators_cannot_add_one_address_twice() -> None:
    """Not at the same moment either, while its name is being resolved for the first of them."""
    async with GatewayWorld(num_backends=1) as world:
        specs = [{"id": name, "url": "http://localhost:9"} for name in ("b8", "b9")]
        answers = await asyncio.gather(*(world.admin.post(f"{V1}/backends", json=spec) for spec in specs))
        assert sorted(answer.status_code for answer in answers) == [201, 409]


async def test_an_address_that_may_not_be_dialled_is_refused() -> None:
    """The default keeps the API from pointing the gateway at metadata services and the internet."""
    async with GatewayWorld(num_backends=1) as world:
        for url in ("http://169.254.169.254", "http://8.8.8.8"):
            answer = await world.admin.post(f"{V1}/backends", json={"url": url})
            assert (answer.status_code, answer.json()["param"]) == (400, "url")
        assert world.gateway.fleet.view.backends.keys() == {"b0"}


async def test_a_change_may_be_conditional() -> None:
    """If-Match of an older state is 412 and changes nothing; the tag ignores what moves by itself."""
    async with GatewayWorld(num_backends=1) as world:
        url = f"{V1}/backends/b0"
        old = (await world.admin.get(url)).headers["etag"]
        await world.chat("alice")
        assert (await world.admin.get(url)).headers["etag"] == old
        changed = await world.admin.patch(
            url, json={"weight": 2, "labels": {"zone": "a"}}, headers={"if-match": old}
        )
        assert (changed.status_code, changed.json()["weight"], changed.json()["labels"]) == (
            200,
            2,
            {"zone": "a"},
        )
        for method, path in (("PATCH", url), ("POST", f"{url}/drain"), ("DELETE", url)):
            late = await world.admin.request(method, path, json={}, headers={"if-match": old})
            assert late.status_code == 412
        assert world.state(0) == "ready"
        either = {"if-match": f"{old}, {changed.headers['etag']}"}
        assert (await world.admin.post(f"{url}/cordon", headers=either)).status_code == 200
        assert (await world.admin.delete(url, headers={"if-match": "*"})).status_code == 204


# -- sessions


async def test_a_session_tells_its_story() -> None:
    """Home, key source, turns, tokens, hit rate; after its home has left, the move and its reason."""
    async with GatewayWorld(num_backends=2) as world:
        homes = [await turn(world, "alice", number) for number in range(3)]
        key = await key_of(world, "alice")
        await world.admin.delete(f"{V1}/backends/{homes[0]}")
        new_home = await turn(world, "alice", 3)
        session = await get(world, f"/sessions/{key}")
        story = session["story"]
        assert (session["backend"], session["turns"]) == (new_home, 4)
        assert (story["key_source"], story["turns_seen"], story["model"]) == ("header", 4, "fake-model")
        assert story["prompt_tokens"] > 0
        assert story["hit_rate"] is not None
        (move,) = story["moves"]
        assert (move["before"], move["after"], move["reason"]) == (homes[0], new_home, "home_removed")
        assert [one["affinity"] for one in story["last_turns"]] == ["new", "hit", "hit", "moved"]
        assert move["at_wall_s"] >= story["first_seen_wall_s"]


async def test_sessions_are_found_by_id_by_key_and_by_its_beginning() -> None:
    """As a client names them, as the API does, as the access log does."""
    async with GatewayWorld(num_backends=2) as world:
        await turn(world, "alice", 0)
        key = await key_of(world, "alice")
        for params in (
            {"session_id": "alice", "model": "fake-model"},
            {"key": key},
            {"key": key[:12]},
        ):
            assert [one["key"] for one in (await get(world, "/sessions", **params))["sessions"]] == [key]
        assert (await get(world, "/sessions", session_id="nobody"))["sessions"] == []
        assert (await world.admin.get(f"{V1}/sessions/{'0' * 32}")).status_code == 404


async def test_listing_pages_through_every_session_once() -> None:
    """Over all backends and of one, whatever the size of a page."""
    async with GatewayWorld(num_backends=3) as world:
        for number in range(25):
            await turn(world, f"session-{number}", 0)
        found: list[str] = []
        params: dict[str, Any] = {"limit": 4}
        while True:
            page = await get(world, "/sessions", **params)
            found += [one["key"] for one in page["sessions"]]
            if page["next_cursor"] is None:
                break
            params["cursor"] = page["next_cursor"]
        assert len(found) == len(set(found)) == 25
        of_each = [len((await get(world, "/sessions", backend=f"b{one}"))["sessions"]) for one in range(3)]
        assert sum(of_each) == 25


async def test_moving_and_ending_a_session() -> None:
    """The next turn goes where the operator said; the move is in the story; ending twice is a success."""
    async with GatewayWorld(num_backends=2) as world:
        home = await turn(world, "alice", 0)
        other = "b1" if home == "b0" else "b0"
        key = await key_of(world, "alice")
        old = (await world.admin.get(f"{V1}/sessions/{key}")).headers["etag"]
        moved = await world.admin.post(f"{V1}/sessions/{key}/move", json={"backend": other})
        assert (moved.status_code, moved.json()["backend"]) == (200, other)
        again = await world.admin.post(f"{V1}/sessions/{key}/move", json={"backend": other})
        assert again.json()["version"] == moved.json()["version"]
        assert await turn(world, "alice", 1) == other
        moves = (await get(world, f"/sessions/{key}"))["story"]["moves"]
        assert [(one["after"], one["reason"]) for one in moves] == [(other, "operator")]
        late = await world.admin.delete(f"{V1}/sessions/{key}", headers={"if-match": old})
        assert late.status_code == 412
        for _ in range(2):
            assert (await world.admin.delete(f"{V1}/sessions/{key}")).status_code == 204
        assert (await world.admin.get(f"{V1}/sessions/{key}")).status_code == 404


# -- decisions


async def test_a_dry_run_says_what_the_request_would_then_get() -> None:
    """The same backend and reason, and nothing is counted."""
    async with GatewayWorld(num_backends=3) as world:
        home = await turn(world, "alice", 0)
        before = await get(world, "/counters")
        body = {
            "model": "fake-model",
            "messages": [*SYSTEM, {"role": "user", "content": "question 0 of alice"}],
        }
        question = {"headers": {"X-Session-Id": "alice"}, "body": body}
        told = (await world.admin.post(f"{V1}/route", json=question)).json()
        assert (told["backend"], told["affinity"], told["key_source"]) == (home, "hit", "header")
        assert told["binding"]["backend"] == home
        assert told["candidates"][0]["backend"] == home
        assert await get(world, "/counters") == before
        world.assert_idle()


async def test_the_ring_is_shared_out_whole() -> None:
    """Shares sum to one and follow weights; the owners of a key are all different."""
    async with GatewayWorld(num_backends=3) as world:
        await world.admin.patch(f"{V1}/backends/b0", json={"weight": 3})
        ring = await get(world, "/ring", key="some-key", n=3)
        shares = {one["backend"]: one["share"] for one in ring["shares"]}
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
        assert shares["b0"] > 2 * shares["b1"]
        assert sorted(ring["owners"]) == ["b0", "b1", "b2"]


class WatchedRing(Ring):
    """Notes who walks along it."""

    __slots__ = ("walkers",)
    walkers: list[threading.Thread]

    def points(self) -> Iterator[tuple[int, BackendId]]:
        self.walkers.append(threading.current_thread())
        return super().points()


async def test_the_ring_is_counted_once_and_beside_the_requests() -> None:
    """A dashboard asks every few seconds, and for a large fleet the counting takes long."""
    async with GatewayWorld(num_backends=2) as world:
        ring = WatchedRing({BackendId("b0"): 1.0, BackendId("b1"): 1.0}, 160)
        ring.walkers = []
        world.gateway.router._candidates.ring = ring
        for path in ("/summary", "/summary", "/ring"):
            await get(world, path)
    (walker,) = ring.walkers
    assert walker is not threading.main_thread()


async def test_what_if_counts_live_sessions_and_changes_nothing() -> None:
    """Removing a backend moves its own; adding one moves none, only a share of new keys."""
    async with GatewayWorld(num_backends=3) as world:
        homes = [await turn(world, f"session-{number}", 0) for number in range(12)]
        view = world.gateway.fleet.view
        removed = (await world.admin.post(f"{V1}/what-if", json={"remove": ["b0"]})).json()
        assert (removed["sessions"], removed["sessions_moved"]) == (12, homes.count("b0"))
        added = (await world.admin.post(f"{V1}/what-if", json={"add": [{"id": "b7"}]})).json()
        assert (added["sessions_moved"], added["tokens_moved"]) == (0, 0)
        assert 0.15 < added["new_sessions_moved_share"] < 0.35
        assert world.gateway.fleet.view is view
        for wrong in ({"remove": ["b9"]}, {"add": [{"id": "b0"}]}, {"reweight": {"b9": 1}}):
            assert (await world.admin.post(f"{V1}/what-if", json=wrong)).status_code == 400


async def test_the_largest_weights_cost_no_more_than_others() -> None:
    """S09: neither to those who may set them nor to those who may only ask."""
    async with GatewayWorld(num_backends=4) as world:
        for number in range(4):
            order = {"weight": 1000 - number}
            answer = await world.admin.patch(f"{V1}/backends/b{number}", json=order)
            assert answer.status_code == 200, answer.text
        points = list(world.gateway.router._candidates.ring.points())
        assert len(points) <= 4 * MAX_BACKEND_POINTS
        added = [{"id": f"c{number}", "weight": 1000} for number in range(64)]
        async with asyncio.timeout(10):
            judged = await world.admin.post(f"{V1}/what-if", json={"add": added})
        assert judged.status_code == 200
        assert judged.json()["new_sessions_moved_share"] > 0.9


async def test_one_what_if_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S09: they hold the interpreter that the requests need. Who comes in between is asked to come again."""
    gate = threading.Event()

    def held(*args: Any) -> Any:
        assert gate.wait(10)
        return forecast(*args)

    monkeypatch.setattr(decision_operations, "forecast", held)
    question = {"add": [{"id": "b7"}]}
    async with GatewayWorld(num_backends=2) as world:
        first = asyncio.create_task(world.admin.post(f"{V1}/what-if", json=question))
        await asyncio.sleep(0.2)
        second = await world.admin.post(f"{V1}/what-if", json=question)
        gate.set()
        assert (second.status_code, (await first).status_code) == (503, 200)
        assert second.headers["retry-after"] == "1"
        assert (await world.admin.post(f"{V1}/what-if", json=question)).status_code == 200


async def test_hot_prompt_groups_name_who_holds_them() -> None:
    """Requests with one system prompt are one group, held by the backends that served it."""
    async with GatewayWorld(num_backends=2) as world:
        homes = {await turn(world, f"session-{number}", 0) for number in range(6)}
        (group,) = (await get(world, "/prompt-groups"))["groups"]
        assert group["requests"] == 6
        assert {one["backend"] for one in group["holders"]} == homes
        assert group["prefix_tokens"] > 0


# -- pins


async def test_engines_without_pins_are_named() -> None:
    """Nothing is dropped silently: the order is refused, the list says why there is none."""
    async with GatewayWorld(num_backends=1) as world:
        order = {"name": "support", "prompt": "You are", "backends": ["b0"]}
        refused = await world.admin.post(f"{V1}/pins", json=order)
        assert refused.status_code == 409
        assert "vllm, which does not support pins" in refused.json()["detail"]
        assert (await world.admin.post(f"{V1}/pins", json={**order, "backends": None})).status_code == 409
        assert (
            await world.admin.post(f"{V1}/pins", json={"name": "x", "backends": ["b0"]})
        ).status_code == 400
        (row,) = (await get(world, "/pins"))["backends"]
        assert (row["pins"], row["problem"]) == ([], "vllm does not support pins")


# -- the process


async def test_log_level_changes_at_once() -> None:
    """And says what it is."""
    before = logging.getLogger().level
    try:
        async with GatewayWorld(num_backends=1) as world:
            assert (await world.admin.put(f"{V1}/log-level", json={"level": "error"})).json() == {
                "level": "error"
            }
            assert logging.getLogger().level == logging.ERROR
            assert (await world.admin.put(f"{V1}/log-level", json={"level": "loud"})).status_code == 400
    finally:
        logging.getLogger().setLevel(before)


async def test_the_summary_is_enough_for_a_dashboard() -> None:
    """Fleet, curves by turn, moves, sessions and groups in one answer, before any traffic too."""
    async with GatewayWorld(num_backends=2) as world:
        assert (await get(world, "/summary"))["by_turn"] == []
        for number in range(3):
            await turn(world, "alice", number)
        summary = await get(world, "/summary")
        assert [one["turn"] for one in summary["by_turn"]] == [1, 2, 3]
        assert [one["turns_seen"] for one in summary["recent_sessions"]] == [3]
        assert len(summary["groups"]) == len(summary["status"]["backends"]) - 1 == 1


async def test_without_a_journal_everything_else_works() -> None:
    """`journal_sessions: 0`: no stories, no groups, no errors."""
    async with GatewayWorld(num_backends=1, admin={"port": 0, "journal_sessions": 0}) as world:
        await turn(world, "alice", 0)
        key = await key_of(world, "alice")
        assert (await get(world, f"/sessions/{key}"))["story"] is None
        assert (await get(world, "/summary"))["recent_sessions"] == []
        assert (await get(world, "/prompt-groups"))["groups"] == []
        assert (await world.admin.get(f"{V1}/sessions", params={"key": key[:8]})).status_code == 400


def test_secrets_are_masked_wherever_they_slip_in() -> None:
    """Values of secret names and passwords in urls; names of variables stay readable."""
    masked = mask_secrets(
        {
            "token_env": "HOMING_ADMIN_TOKEN",
            "redis": {"url": "redis://me:hunter2@host/0", "password": "hunter2"},
            "keys": [{"api_key": "hunter2"}, {"api_keys": ["hunter2"]}],
            "drain_timeout_s": 3.0,
        }
    )
    assert "hunter2" not in str(masked)
    assert masked["token_env"] == "HOMING_ADMIN_TOKEN"
    assert masked["redis"]["url"] == f"redis://me:{MASK}@host/0"
