"""Traces: readers of both formats, prefix trees, derived sessions, workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replay import workloads
from gateway.replay.readers import read_trace
from gateway.replay.trace import BYTES_PER_TOKEN, PrefixTree, Row, build, unbounded_hits


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=20))
def test_segments_are_shared_exactly_where_prefixes_are(chains: list[list[int]]) -> None:
    """Two chains share a segment if and only if they agree up to its end; lengths add up."""
    tree = PrefixTree()
    for chain in chains:
        tree.insert(chain)
    found = [tree.segments(chain) for chain in chains]
    for chain, segments in zip(chains, found, strict=True):
        assert sum(length for _, length in segments) == len(chain)
    for left, left_segments in zip(chains, found, strict=True):
        for right, right_segments in zip(chains, found, strict=True):
            shared = 0
            for segment, counterpart in zip(left_segments, right_segments, strict=False):
                if segment != counterpart:
                    break
                shared += segment[1]
            common = 0
            while common < min(len(left), len(right)) and left[common] == right[common]:
                common += 1
            assert shared == common


def test_mooncake_lines_are_read_and_sessions_derived(tmp_path: Path) -> None:
    """Without session ids a request continues the latest one whose full blocks are its prefix."""
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 1024, "output_length": 5, "hash_ids": [8, 9]},
    )
    trace = read_trace(path)
    assert [(turn.session, turn.turn) for turn in trace.turns] == [(0, 0), (0, 1), (1, 0)]
    assert trace.notes
    assert unbounded_hits(trace) == [0, 1024, 0]


def test_compact_lines_are_read(tmp_path: Path) -> None:
    """Run-length coded blocks, system prompts and think times come out; the answer's blocks are known."""
    path = write(
        tmp_path / "t.jsonl",
        {"block": 16},
        {"s": 4, "k": 0, "t": 1.0, "in": 64, "out": 40, "think": 0.0, "sys": 2, "h": [0, 2, 10, 2]},
        {"s": 4, "k": 1, "t": 3.0, "in": 128, "out": 9, "think": 2.5, "sys": 2, "h": [0, 2, 10, 6]},
    )
    trace = read_trace(path)
    first, second = trace.turns
    assert (trace.is_closed, second.think_s, first.num_system_messages) == (True, 2.5, 1)
    assert sum(message.num_bytes for message in second.chain) == 128 * BYTES_PER_TOKEN
    assert first.answer_cached_tokens == 32
    assert unbounded_hits(trace) == [0, 96]


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (["", " "], "empty"),
        (["not json"], "line 1"),
        ([{"block": 0}], "line 1"),
        ([{"block": 16}, {"s": 1}], "line 2"),
        ([{"block": 16}, {"s": 1, "k": 0, "t": 0, "in": 9, "out": 9, "h": [1]}], "line 2"),
        ([{"timestamp": 0, "input_length": 9}], "line 1"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[object], number: str) -> None:
    """A trace that does not fit its format is refused with the line."""
    with pytest.raises(ValueError, match=number):
        read_trace(write(tmp_path / "t.jsonl", *lines))


def rows() -> list[Row]:
    found = []
    for session in range(3):
        for turn in range(3):
            blocks = [0, *(100 * session + number for number in range(1, 3 + turn))]
            found.append(
                Row(session=session, turn=turn, at_s=session + turn * 5.0, prompt_tokens=16 * len(blocks),
                    answer_tokens=16, blocks=blocks, system_blocks=1, think_s=3.0)
            )  # fmt: skip
    return found


def test_copies_share_the_system_prompt_and_nothing_else() -> None:
    """Superposed copies keep shared prompts shared and give private text its own names."""
    trace = build("t", 16, rows(), is_closed=False)
    twice = workloads.superpose(trace, 2, jitter_s=1.0)
    assert len(twice.turns) == 2 * len(trace.turns)
    assert twice.num_sessions == 6
    private = [{m.chain_hash for m in turn.chain[1:]} for turn in twice.turns]
    by_session: dict[int, set[int]] = {}
    for turn, hashes in zip(twice.turns, private, strict=True):
        by_session.setdefault(turn.session, set()).update(hashes)
    for session, hashes in by_session.items():
        assert all(hashes.isdisjoint(other) for key, other in by_session.items() if key != session)
    assert len({turn.chain[0].chain_hash for turn in twice.turns}) == 1


def test_agents_run_sessions_back_to_back() -> None:
    """A closed loop of users keeps turns in order and within the time asked for."""
    trace = build("t", 16, rows(), is_closed=True)
    loop = workloads.agents(trace, 4, 60.0, seed=2)
    assert loop.is_closed
    assert loop.duration_s <= 60.0
    for turn in loop.turns:
        if turn.follows >= 0:
            before = loop.turns[turn.follows]
            assert (before.session, before.turn + 1) == (turn.session, turn.turn)


@pytest.mark.parametrize("make", [workloads.chat, workloads.documents, workloads.apps])
def test_synthetic_workloads_are_functions_of_their_seed(make: object) -> None:
    """The same seed gives the same trace, another one another."""
    assert callable(make)
    first, same, other = make(40, 60.0, seed=1), make(40, 60.0, seed=1), make(40, 60.0, seed=2)
    assert first.turns == same.turns
    assert first.turns != other.turns
