"""A trace: requests in time, each a chain of prompt segments, shared with other requests or its own.

Public traces give a prompt as ids of fixed-size blocks. All chains go into one path-compressed prefix tree. A
*segment* is a maximal run of blocks that no request leaves in the middle, so that block arithmetic stays
exact while chains stay short. Segments become the `Message`s that the router sees, with a boundary wherever
two prompts part or one ends. No gateway can know more. A real client's messages are cut at the same places,
except where two prompts share only a part of one message.

Invariant: two chains share a segment exactly if they share the whole prompt up to its end. This also repairs
traces whose ids hash the tokens of a block without its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.values import Message

BYTES_PER_TOKEN = 4  # text bytes that a token stands for in every simulated prompt


@dataclass(slots=True, kw_only=True)
class TraceTurn:
    """One request of a trace."""

    session: int
    turn: int
    at_s: float  # arrival; in closed traces only that of first turns counts
    think_s: float | None = None  # client's delay after the previous answer, closed traces only
    prompt_tokens: int
    answer_tokens: int
    chain: tuple[Message, ...] = ()  # the full blocks of the prompt
    num_system_messages: int = 0  # leading segments that are the system prompt
    answer_cached_tokens: int = 0  # the part of the answer that the next turn repeats in full blocks
    follows: int = -1  # index of the session's turn before this one, or -1
    followed_by: int = -1

    @property
    def chain_tokens(self) -> int:
        return sum(message.num_bytes for message in self.chain) // BYTES_PER_TOKEN


@dataclass(slots=True, kw_only=True)
class Trace:
    """Turns in order of arrival."""

    name: str
    block_tokens: int
    turns: list[TraceTurn]
    is_closed: bool  # True: a turn is sent `think_s` after the last answer. False: at `at_s` or after it
    shared: frozenset[int] = frozenset()  # chain hashes used by more than one session
    notes: str = ""

    @property
    def duration_s(self) -> float:
        return max((turn.at_s for turn in self.turns), default=0.0)

    @property
    def num_sessions(self) -> int:
        return len({turn.session for turn in self.turns})


@dataclass(slots=True, kw_only=True)
class Row:
    """One request as a reader found it, before prompts are compared."""

    session: int
    turn: int
    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: Sequence[int]
    system_blocks: int = 0
    think_s: float | None = None


@dataclass(slots=True)
class _Edge:
    blocks: list[int]
    children: dict[int, _Edge] = field(default_factory=dict)
    segment: int = -1


def _common(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix. Bisects, because slices compare at C speed."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixTree:
    """Path-compressed trie over block ids. Insert all chains first, then ask for segments."""

    def __init__(self) -> None:
        self._root: dict[int, _Edge] = {}
        self._num_segments = 0

    def insert(self, blocks: list[int]) -> None:
        level, position = self._root, 0
        while position < len(blocks):
            edge = level.get(blocks[position])
            if edge is None:
                level[blocks[position]] = _Edge(blocks[position:])
                return
            rest = blocks[position : position + len(edge.blocks)]
            common = _common(edge.blocks, rest)
            if common < len(edge.blocks):
                lower = _Edge(edge.blocks[common:], edge.children)
                edge.blocks = edge.blocks[:common]
                edge.children = {lower.blocks[0]: lower}
            position += common
            level = edge.children

    def segments(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Return (segment id, number of blocks) along a chain that was inserted."""
        level, position, found = self._root, 0, []
        while position < len(blocks):
            edge = level[blocks[position]]
            if edge.segment < 0:
                edge.segment = self._num_segments
                self._num_segments += 1
            found.append((edge.segment, len(edge.blocks)))
            position += len(edge.blocks)
            level = edge.children
        return found


def build(name: str, block_tokens: int, rows: list[Row], *, is_closed: bool, notes: str = "") -> Trace:
    """Build a trace of rows: compare all prompts and link the turns of each session."""
    rows = sorted(rows, key=lambda row: (row.at_s, row.session, row.turn))
    tree = PrefixTree()
    full = [list(row.blocks[: row.prompt_tokens // block_tokens]) for row in rows]
    for row, blocks in zip(rows, full, strict=True):
        tree.insert(blocks[: row.system_blocks])  # a boundary where the system prompt ends
        tree.insert(blocks)
    turns = []
    for row, blocks in zip(rows, full, strict=True):
        segments = tree.segments(blocks)
        system, left = 0, row.system_blocks
        while system < len(segments) and left >= segments[system][1]:
            left -= segments[system][1]
            system += 1
        chain = tuple(
            Message(chain_hash=segment + 1, num_bytes=count * block_tokens * BYTES_PER_TOKEN)
            for segment, count in segments
        )
        turns.append(
            TraceTurn(
                session=row.session,
                turn=row.turn,
                at_s=row.at_s,
                think_s=row.think_s,
                prompt_tokens=row.prompt_tokens,
                answer_tokens=row.answer_tokens,
                chain=chain,
                num_system_messages=system,
            )
        )
    return link(Trace(name=name, block_tokens=block_tokens, turns=turns, is_closed=is_closed, notes=notes))


def link(trace: Trace) -> Trace:
    """Fill the derived fields: neighbours, cached answers, shared segments. Changes the trace."""
    last: dict[int, int] = {}
    turns = trace.turns
    for index in sorted(range(len(turns)), key=lambda i: (turns[i].session, turns[i].turn)):
        turn = turns[index]
        turn.follows = last.get(turn.session, -1)
        if turn.follows >= 0:
            turns[turn.follows].followed_by = index
            _reveal_answer(turns[turn.follows], turn, trace.block_tokens)
        last[turn.session] = index
    owner: dict[int, int] = {}
    shared: set[int] = set()
    for turn in turns:
        for message in turn.chain:
            if owner.setdefault(message.chain_hash, turn.session) != turn.session:
                shared.add(message.chain_hash)
    trace.shared = frozenset(shared)
    return trace


def _reveal_answer(turn: TraceTurn, following: TraceTurn, block_tokens: int) -> None:
    """Set what part of the answer can be reused: the blocks that the next prompt repeats."""
    size = len(turn.chain)
    if following.chain[:size] != turn.chain:
        return
    written = (turn.prompt_tokens + turn.answer_tokens) // block_tokens * block_tokens
    turn.answer_cached_tokens = max(0, min(written, following.chain_tokens) - turn.chain_tokens)


def unbounded_hits(trace: Trace) -> list[int]:
    """Return the cached tokens of each turn with one cache that never evicts."""
    held: dict[int, int] = {}  # chain hash -> bytes of that segment
    hits = []
    for turn in trace.turns:
        hit = 0
        for message in turn.chain:
            got = held.get(message.chain_hash, 0)
            hit += got
            if got < message.num_bytes:
                break
        hits.append(min(hit // BYTES_PER_TOKEN, turn.prompt_tokens - 1))
        for message in turn.chain:
            held[message.chain_hash] = message.num_bytes
        if turn.answer_cached_tokens and turn.followed_by >= 0:
            _hold_answer(held, turn, trace.turns[turn.followed_by])
    return hits


def _hold_answer(held: dict[int, int], turn: TraceTurn, following: TraceTurn) -> None:
    left = turn.answer_cached_tokens * BYTES_PER_TOKEN
    for message in following.chain[len(turn.chain) :]:
        part = min(left, message.num_bytes)
        if part <= 0:
            return
        held[message.chain_hash] = max(held.get(message.chain_hash, 0), part)
        left -= part
