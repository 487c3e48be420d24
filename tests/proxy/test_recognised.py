"""A conversation is recognised at a gateway however it begins and whatever else comes under its id."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from fakes.backend import hang
from fakes.gateway_world import GatewayWorld

Messages = list[dict[str, Any]]

CLOCKS: dict[str, Callable[[dt.datetime], str]] = {
    "iso": lambda now: now.isoformat(),
    "compact iso": lambda now: f"{now:%Y%m%dT%H%M%S}Z",
    "american": lambda now: f"{now:%m/%d/%Y %I:%M %p}",
    "no year": lambda now: f"Today is {now:%B %d}, {now:%H:%M}",
    "epoch": lambda now: f"now={now.timestamp():.0f}",
    "german": lambda now: f"Heute ist Dienstag, der {now.day}. Dezember {now.year}, {now:%H:%M} Uhr",
    "french": lambda now: f"Nous sommes le mardi {now.day} décembre {now.year} à {now.hour} h {now.minute}",
    "chinese": lambda now: f"现在是{now.year}年{now.month}月{now.day}日 {now.hour}时{now.minute}分",
    "share": lambda now: f"Context used: {now.minute}% ({now.minute * 1_311} tokens)",
    "git status": lambda now: f"Git status:\n M src/file{now.minute}.py\n?? notes-{now.minute}.md",
}


def _home(answer: Any) -> tuple[str, str, str]:
    headers = answer.headers
    return headers["x-homing-backend"], headers["x-homing-key-source"], headers["x-homing-affinity"]


async def test_chats_that_open_with_hi_have_their_home_from_the_second_turn_on() -> None:
    """E01: 24 chats at a time, 36 backends, no ids."""
    async with GatewayWorld(num_backends=36) as world:

        async def chat(number: int) -> list[tuple[str, str, str]]:
            messages: Messages = [{"role": "user", "content": "Hi"}]
            homes = []
            for turn in range(6):
                homes.append(_home(await world.chat(messages=messages)))
                messages += [
                    {"role": "assistant", "content": "Hello! How can I help you today?"},
                    {"role": "user", "content": f"What is {number} + {turn}?"},
                ]
            return homes

        chats = await asyncio.gather(*map(chat, range(24)))
        for homes in chats:
            assert len({backend for backend, _, _ in homes[1:]}) == 1
            assert {source for _, source, _ in homes[1:]} == {"fingerprint"}
            assert [affinity for _, _, affinity in homes[1:]] == ["new", *["hit"] * 4]
        world.assert_idle()


@pytest.mark.parametrize("has_helpers", [True, False])
async def test_helper_requests_under_its_id_never_cost_a_session_its_home(has_helpers: bool) -> None:
    """N03: a one-shot request after each of 18 turns; then the home is busy, and the session stays."""
    async with GatewayWorld(num_backends=3) as world:
        messages: Messages = [{"role": "system", "content": "Help with the code. " * 40}]

        async def turn(number: int) -> tuple[str, str, str]:
            messages.append({"role": "user", "content": f"Question {number}. " * 30})
            home = _home(await world.chat("main", messages=messages))
            messages.append({"role": "assistant", "content": f"Answer {number}. " * 30})
            return home

        homes = []
        for number in range(18):
            homes.append(await turn(number))
            if has_helpers:
                helper = [
                    {"role": "system", "content": "Say how the command begins."},
                    {"role": "user", "content": f"git checkout -b branch-{number}"},
                ]
                assert (await world.chat("main", messages=helper)).status_code == 200
        home = homes[0][0]
        streams = await _keep_busy(world, home)
        homes += [await turn(number) for number in range(18, 21)]
        assert homes == [(home, "header", "new"), *[(home, "header", "hit")] * 20]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _keep_busy(world: GatewayWorld, home: str) -> list[asyncio.Task[Any]]:
    """Start eight requests at a backend that never end."""
    names = iter(f"other-{number}" for number in range(100))
    other = next(names)
    while (await world.chat(other)).headers["x-homing-backend"] != home:
        other = next(names)
    backend = world.backends[int(home[1:])]
    num_requests = len(backend.requests)
    backend.script(*[hang()] * 8)
    streams = [asyncio.create_task(world.chat(other, text=f"long {number}")) for number in range(8)]
    await backend.wait_until(lambda one: len(one.requests) == num_requests + 8)
    return streams


@pytest.mark.parametrize("clock", CLOCKS)
async def test_what_changes_at_the_head_of_a_prompt_makes_no_new_sessions(clock: str) -> None:
    """N21: clocks of any kind and counters, before or behind what stays."""
    async with GatewayWorld(num_backends=6) as world:
        for is_first in (True, False):
            turns: Messages = [
                {"role": "user", "content": f"Which files of the project are tests? {is_first}"}
            ]
            homes = []
            for number in range(6):
                now = dt.datetime(2026, 12, 1, 9, 0, tzinfo=dt.UTC) + dt.timedelta(minutes=7 * number)
                parts = ["You help people who write programs. Be brief, and say what you did.\n" * 5]
                parts.insert(0 if is_first else 1, CLOCKS[clock](now))
                system = {"role": "system", "content": "\n".join(parts)}
                homes.append(_home(await world.chat(messages=[system, *turns])))
                turns += [
                    {"role": "assistant", "content": f"These: test_{number}.py"},
                    {"role": "user", "content": "And which are not?"},
                ]
            backend = homes[0][0]
            assert homes == [(backend, "fingerprint", "new"), *[(backend, "fingerprint", "hit")] * 5]
