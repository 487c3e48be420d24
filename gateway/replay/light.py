"""Workloads that traces do not show, because traces keep engines busy: light load, weights, one hot key.

At light load no request waits for another, so nothing spreads sessions but the room they need. Everything is
a function of the arguments; the names are those of scenarios.
"""

from __future__ import annotations

import msgspec

from gateway.replay.facts import facts_of
from gateway.replay.trace import Row, Trace, build
from gateway.values import RequestFacts

_BLOCK = 16


def agents(
    num_agents: int,
    *,
    num_turns: int = 4,
    shared_tokens: int = 1_700,
    own_tokens: int = 15_300,
    added_tokens: int = 200,
    every_s: float = 30.0,
    name: str = "light_agents",
) -> Trace:
    """Agents with one system prompt that take turns: one request every `every_s`, never two at once."""
    shared, own, added = (tokens // _BLOCK for tokens in (shared_tokens, own_tokens, added_tokens))
    rows = []
    for number in range(num_agents * num_turns):
        turn, agent = divmod(number, num_agents)
        count = own + turn * added
        first = shared + agent * (own + num_turns * added)
        rows.append(
            Row(
                session=agent,
                turn=turn,
                at_s=number * every_s,
                prompt_tokens=(shared + count) * _BLOCK,
                answer_tokens=100,
                blocks=(*range(shared), *range(first, first + count)),
                system_blocks=shared,
            )
        )
    return build(name, _BLOCK, rows, is_closed=False)


def forks(num_forks: int) -> Trace:
    """Sub-agents that begin with the same long history, and then take turns."""
    return agents(num_forks, shared_tokens=8_000, own_tokens=9_000, name="light_forks")


def slots(num_sessions: int) -> Trace:
    """Short chats on engines with room for a few of them, as the slots of llama.cpp."""
    return agents(num_sessions, num_turns=6, shared_tokens=400, own_tokens=2_600, name="light_slots")


def new_sessions(num_sessions: int, at_a_time: int, *, prompt_tokens: int = 1_000) -> Trace:
    """One-turn sessions under one system prompt, `at_a_time` of them together."""
    rows = [
        Row(
            session=number,
            turn=0,
            at_s=30.0 * (number // at_a_time),
            prompt_tokens=prompt_tokens + 64,
            answer_tokens=50,
            blocks=(*range(prompt_tokens // _BLOCK), *range(10**6 + 4 * number, 10**6 + 4 * number + 4)),
            system_blocks=prompt_tokens // _BLOCK,
        )
        for number in range(num_sessions)
    ]
    return build("new_sessions", _BLOCK, rows, is_closed=False)


def hot_key(num_streams: int) -> tuple[Trace, list[RequestFacts]]:
    """One request, then streams side by side, all under one bucket key; each is its own conversation."""
    trace = new_sessions(num_streams + 1, num_streams + 1)
    for number, turn in enumerate(trace.turns):
        turn.at_s = 0.0 if not number else 10.0 + 0.01 * number
        turn.answer_tokens = 2_000
    facts = facts_of(trace)
    key = facts[0].session_key
    return trace, [msgspec.structs.replace(one, session_key=key, obeys_load_bound=True) for one in facts]
