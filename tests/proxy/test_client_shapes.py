"""Twelve turns of each client, with all that clients mix in: one home, right numbers, the right source."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fakes.backend import hang
from fakes.client_shapes import Client, Conversation
from fakes.client_table import CLIENTS
from fakes.gateway_world import GatewayWorld

NUM_TURNS = 12
RETRIED, COMPACTED = 4, 8  # which turns


class Session:
    """One conversation against a gateway, and where each of its turns went."""

    def __init__(
        self, world: GatewayWorld, client: Client, session: str, *, agent: str | None = None
    ) -> None:
        self.world, self.client = world, client
        self.talk = Conversation(client, session, agent=agent)
        self.homes: list[str] = []
        self.sources: list[str] = []
        self.affinities: list[str] = []

    async def turn(self, *, gives_up_once: bool = False) -> None:
        headers, body = self.talk.ask()
        if gives_up_once:
            await self._give_up(headers, body)
            headers, body = self.talk.again(num_retries=1)
        answer = await self.post(self.client.path, headers, body)
        self.homes.append(answer.headers["x-homing-backend"])
        self.sources.append(answer.headers["x-homing-key-source"])
        self.affinities.append(answer.headers["x-homing-affinity"])
        self.talk.hear()

    async def help(self) -> None:
        """Ask everything that the client asks beside its conversation."""
        for helper in self.client.helpers:
            await self.post(*self.talk.helper(helper))

    async def post(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> httpx.Response:
        answer = await self.world.client.post(path, headers=headers, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def _give_up(self, headers: dict[str, str], body: dict[str, Any]) -> None:
        """Leave while the engine is at work, as a client does whose patience ends."""
        home = self.world.backends[int(self.homes[-1][1:])]
        num_before = home.num_cancelled
        home.script(hang())
        num_requests = len(home.requests)
        asking = asyncio.create_task(self.post(self.client.path, headers, body))
        await home.wait_until(lambda backend: len(backend.requests) > num_requests)
        asking.cancel()
        await home.wait_until(lambda backend: backend.num_cancelled > num_before)


async def _turns_of_sessions(world: GatewayWorld) -> list[int]:
    """How many turns each session has; stored answers are bound, too, and have none."""
    assert world.gateway  # every request that has ended is written down
    turns: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await world.admin.get("/admin/v1/sessions", params={"cursor": cursor})).json()
        turns += [row["turns"] for row in page["sessions"] if row["turns"]]
        cursor = page["next_cursor"]
    return sorted(turns)


def _helpers() -> list[Any]:
    return [
        pytest.param(name, number, id=f"{name}: {helper.name}")
        for name, client in CLIENTS.items()
        for number, helper in enumerate(client.helpers)
    ]


@pytest.mark.parametrize("name", CLIENTS)
async def test_twelve_turns_of_a_client_have_one_home(name: str) -> None:
    """N19: retries, titles, counts, sub-agents and compaction in between leave a conversation where it is."""
    client = CLIENTS[name]
    async with GatewayWorld(num_backends=4) as world:
        main = Session(world, client, "session-1")
        agent = Session(world, client, "session-1", agent="agent-1")
        for number in range(NUM_TURNS):
            if number == COMPACTED and client.has_id:
                main.talk.compact()
            await main.turn(gives_up_once=number == RETRIED)
            await main.help()
            if number in (2, 6) and client.agent is not None:
                await agent.turn()
        num_unnamed = client.num_unnamed
        assert set(main.sources[num_unnamed:]) == {client.source}
        assert main.affinities[num_unnamed:] == ["new"] + ["hit"] * (NUM_TURNS - num_unnamed - 1)
        assert len(set(main.homes[num_unnamed:])) == 1
        if client.agent is not None:
            assert (agent.affinities, set(agent.sources)) == (["new", "hit"], {client.source})
        num_of_agent = [2] if client.agent is not None else []
        assert await _turns_of_sessions(world) == [*num_of_agent, NUM_TURNS - num_unnamed]
        world.assert_idle()


@pytest.mark.parametrize(("name", "number"), _helpers())
async def test_a_helper_request_is_no_turn(name: str, number: int) -> None:
    """N03: it makes no session where there is none, and is not counted where there is one."""
    client = CLIENTS[name]
    async with GatewayWorld(num_backends=3) as world:
        main = Session(world, client, "session-1")
        request = main.talk.helper(client.helpers[number])
        await main.post(*request)
        assert await _turns_of_sessions(world) == []
        for _ in range(2):
            await main.turn()
            await main.post(*request)
        assert main.affinities == ["new", "hit"]
        assert await _turns_of_sessions(world) == [2]
        summary = (await world.admin.get("/admin/v1/summary")).json()
        assert [(point["turn"], point["num_turns"]) for point in summary["by_turn"]] == [(1, 1), (2, 1)]
        assert [story["turns_seen"] for story in summary["recent_sessions"]] == [2]
