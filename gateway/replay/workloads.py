"""Workloads for the simulator: more traffic out of one trace, closed-loop agent users, synthetic chats.

Everything is a function of its arguments and a seed. The synthetic traces are our own; their shapes follow
the traces study (section 2), so that results can be compared with it.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from gateway.replay.trace import Row, Trace, TraceTurn, build, link
from gateway.values import Message

_MASK = (1 << 62) - 1
_ODD = 0x9E3779B97F4A7C15


def _renamed(chain: tuple[Message, ...], copy: int, shared: frozenset[int]) -> tuple[Message, ...]:
    """Give the private segments of a copy their own names; shared prompts stay shared."""
    if copy == 0:
        return chain
    return tuple(
        message
        if message.chain_hash in shared
        else Message(
            chain_hash=(message.chain_hash * _ODD + copy) & _MASK | 1 << 62, num_bytes=message.num_bytes
        )
        for message in chain
    )


def superpose(trace: Trace, copies: int, *, seed: int = 1, jitter_s: float = 120.0) -> Trace:
    """Play an open trace several times at once, private text renamed and each session shifted a little."""
    chance = random.Random(seed)
    width = max(turn.session for turn in trace.turns) + 1
    turns: list[TraceTurn] = []
    for copy in range(copies):
        shifts = [chance.uniform(-jitter_s, jitter_s) if copy else 0.0 for _ in range(width)]
        turns.extend(
            replace(
                turn,
                session=turn.session + copy * width,
                at_s=max(0.0, turn.at_s + shifts[turn.session]),
                chain=_renamed(turn.chain, copy, trace.shared),
                followed_by=-1,
            )
            for turn in trace.turns
        )
    turns.sort(key=lambda turn: (turn.at_s, turn.session, turn.turn))
    return link(replace(trace, turns=turns))


def agents(
    trace: Trace,
    users: int,
    seconds: float,
    *,
    seed: int = 1,
    think_cap_s: float = 900.0,
    max_context_tokens: int = 200_000,
) -> Trace:
    """Closed-loop users, each running agent sessions back to back with real think times.

    A user's first session starts at a random turn, so that the fleet begins in a steady state.
    """
    chance = random.Random(seed)
    pool = _sessions_within(trace, max_context_tokens)
    played: list[int] = [-1] * len(pool)
    order: list[int] = []
    turns: list[TraceTurn] = []
    next_session = 0
    for _ in range(users):
        clock, is_first = chance.uniform(0.0, 120.0), True
        while clock < seconds:
            if not order:
                order = chance.sample(range(len(pool)), len(pool))
            pick = order.pop()
            played[pick] += 1
            session = pool[pick]
            skip = chance.randrange(len(session)) if is_first else 0
            is_first = False
            for number, turn in enumerate(session[skip:]):
                chain = _renamed(turn.chain, played[pick], trace.shared)
                think_s = min(turn.think_s or 0.0, think_cap_s)
                turns.append(
                    _as_turn_of(next_session, number, turn, at_s=clock, think_s=think_s, chain=chain)
                )
                clock += think_s + 0.015 * turn.answer_tokens + 1.0
                if clock > seconds:
                    break
            next_session += 1
            clock += 10.0
    turns.sort(key=lambda turn: (turn.at_s, turn.session, turn.turn))
    return link(replace(trace, name="agent", turns=turns, is_closed=True))


def _sessions_within(trace: Trace, max_context_tokens: int) -> list[list[TraceTurn]]:
    """Return the turns of each session whose prompts all fit."""
    sessions: dict[int, list[TraceTurn]] = {}
    for turn in sorted(trace.turns, key=lambda turn: (turn.session, turn.turn)):
        sessions.setdefault(turn.session, []).append(turn)
    return [
        turns
        for turns in sessions.values()
        if max(turn.prompt_tokens for turn in turns) <= max_context_tokens
    ]


def _as_turn_of(
    session: int, number: int, turn: TraceTurn, *, at_s: float, think_s: float, chain: tuple[Message, ...]
) -> TraceTurn:
    """Return a copy of the turn in another session, not yet linked to its neighbours."""
    return replace(
        turn,
        session=session,
        turn=number,
        at_s=at_s,
        think_s=think_s,
        chain=chain,
        follows=-1,
        followed_by=-1,
        answer_cached_tokens=0,
    )


def chat(
    sessions: int,
    seconds: float,
    *,
    seed: int = 1,
    name: str = "chat",
    num_prompts: int = 30,
    zipf: float = 1.1,
    block_tokens: int = 16,
    prompt_tokens: tuple[int, int] = (200, 4000),
    mean_turns: float = 5.0,
    question_tokens: float = 50.0,
    grows: bool = False,
) -> Trace:
    """Chats over Zipf-distributed system prompts (or documents), geometric turns, log-normal lengths.

    `grows`: the rate of new chats grows from nothing, instead of being the same all the time.
    """
    chance = random.Random(seed)
    weights = [1.0 / rank**zipf for rank in range(1, num_prompts + 1)]
    prompts = _random_prompts(chance, num_prompts, prompt_tokens, block_tokens)
    next_block = prompts[-1].stop
    rows: list[Row] = []
    for session, prompt in enumerate(chance.choices(prompts, weights, k=sessions)):
        at_s = chance.uniform(0.0, seconds)
        if grows:
            at_s = math.sqrt(at_s * seconds)
        context, blocks = len(prompt) * block_tokens, list(prompt)
        turn = 0
        while True:
            context += int(chance.lognormvariate(math.log(question_tokens), 0.8)) + 1
            need = context // block_tokens - len(blocks)
            blocks.extend(range(next_block, next_block + need))
            next_block += max(0, need)
            answer = int(min(2000.0, chance.lognormvariate(5.2, 0.7))) + 1
            think_s = min(900.0, chance.lognormvariate(3.0, 1.0)) if turn else 0.0
            rows.append(
                Row(
                    session=session,
                    turn=turn,
                    at_s=at_s,
                    prompt_tokens=context,
                    answer_tokens=answer,
                    blocks=tuple(blocks),
                    system_blocks=len(prompt),
                    think_s=think_s,
                )
            )
            context += answer
            at_s += think_s + 4.0
            turn += 1
            if chance.random() < 1.0 / mean_turns:
                break
    return build(name, block_tokens, rows, is_closed=True)


def _random_prompts(
    chance: random.Random, num_prompts: int, prompt_tokens: tuple[int, int], block_tokens: int
) -> list[range]:
    """Return the block ids of system prompts whose sizes are log-uniform between two bounds."""
    low, high = (math.log(bound) for bound in prompt_tokens)
    prompts: list[range] = []
    next_block = 0
    for _ in range(num_prompts):
        count = int(math.exp(chance.uniform(low, high))) // block_tokens
        prompts.append(range(next_block, next_block + count))
        next_block += count
    return prompts


def documents(sessions: int, seconds: float, *, seed: int = 1) -> Trace:
    """Questions about shared documents of 2K-40K tokens: sessions share text and have few turns."""
    return chat(
        sessions,
        seconds,
        seed=seed,
        name="documents",
        num_prompts=max(8, sessions // 2),
        zipf=0.7,
        block_tokens=64,
        prompt_tokens=(2000, 40_000),
        mean_turns=1.6,
        question_tokens=300.0,
    )


def apps(sessions: int, seconds: float, *, seed: int = 1) -> Trace:
    """Many applications with few turns: 400 system prompts of 2K-8K tokens, 1.5 turns a session."""
    return chat(
        sessions,
        seconds,
        seed=seed,
        name="apps",
        num_prompts=400,
        zipf=0.8,
        block_tokens=64,
        prompt_tokens=(2000, 8000),
        mean_turns=1.5,
    )


def ramp(sessions: int, seconds: float, *, seed: int = 1) -> Trace:
    """A morning: long chats that begin on an idle fleet, more and more of them."""
    return chat(
        sessions,
        seconds,
        seed=seed,
        name="ramp",
        prompt_tokens=(2000, 8000),
        question_tokens=300.0,
        grows=True,
    )
