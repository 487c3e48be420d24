"""Readers of public trace formats: Mooncake JSON lines and the compact run-length format.

Mooncake (FAST'25 artefact): one object a line with `timestamp` in ms, `input_length`, `output_length`,
`hash_ids` of 512-token blocks, and in prepared slices `session_id` and `turn`. Compact: a first line
{"block": tokens}, then per line `s` session, `k` turn, `t` seconds, `in` and `out` tokens, `think` seconds,
`sys` leading blocks of the system prompt, `h` block ids run-length coded as [first, count, ...].

Invariant: a line that does not fit raises ValueError with its number. Nothing is guessed, except the sessions
of a trace without any (`_derive_sessions`); then `Trace.notes` says so.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from gateway.replay.trace import Row, Trace, build

_MOONCAKE_BLOCK_TOKENS = 512


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int | None = None
    turn: int = 0


class _CompactLine(msgspec.Struct, frozen=True):
    s: int
    k: int
    t: float
    prompt: int = msgspec.field(name="in")
    answer: int = msgspec.field(name="out")
    h: list[int]
    think: float | None = None
    sys: int = 0


class _Header(msgspec.Struct, frozen=True):
    block: int | None = None
    h: list[int] | None = None


def read_trace(path: Path, *, name: str | None = None) -> Trace:
    """Read a trace file; its first line tells the format. Raises ValueError for anything else."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path}: the trace is empty")
    try:
        header = msgspec.json.decode(lines[0], type=_Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}, line 1: not a JSON object: {error}") from error
    label = name or path.name.split(".")[0]
    if header.block is not None and header.h is None:
        if header.block <= 0:
            raise ValueError(f"{path}, line 1: block must be above 0")
        return _read_compact(path, label, header.block, lines[1:])
    return _read_mooncake(path, label, lines)


def _read_compact(path: Path, name: str, block_tokens: int, lines: list[bytes]) -> Trace:
    decoder = msgspec.json.Decoder(_CompactLine)
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            item = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if len(item.h) % 2:
            raise ValueError(f"{path}, line {number}: h must hold pairs of first id and count")
        blocks: list[int] = []
        for first, count in zip(item.h[::2], item.h[1::2], strict=True):
            blocks.extend(range(first, first + count))
        rows.append(
            Row(
                session=item.s,
                turn=item.k,
                at_s=item.t,
                prompt_tokens=item.prompt,
                answer_tokens=item.answer,
                blocks=blocks,
                system_blocks=item.sys,
                think_s=item.think,
            )
        )
    return build(name, block_tokens, rows, is_closed=any(row.think_s is not None for row in rows))


def _read_mooncake(path: Path, name: str, lines: list[bytes]) -> Trace:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows: list[Row] = []
    numbers: dict[str | int | None, int] = {}
    has_sessions = True
    for number, line in enumerate(lines, start=1):
        try:
            item = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        has_sessions = has_sessions and item.session_id is not None
        rows.append(
            Row(
                session=numbers.setdefault(item.session_id, len(numbers)),
                turn=item.turn,
                at_s=item.timestamp / 1000.0,
                prompt_tokens=item.input_length,
                answer_tokens=item.output_length,
                blocks=item.hash_ids,
            )
        )
    rows.sort(key=lambda row: row.at_s)
    full = [tuple(row.blocks[: row.prompt_tokens // _MOONCAKE_BLOCK_TOKENS]) for row in rows]
    _find_system_prompts(rows, full)
    if not has_sessions:
        _derive_sessions(rows, full)
    notes = "" if has_sessions else "sessions derived from prefix chains"
    return build(name, _MOONCAKE_BLOCK_TOKENS, rows, is_closed=False, notes=notes)


def _find_system_prompts(rows: list[Row], full: list[tuple[int, ...]]) -> None:
    """Take leading blocks that at least 20 requests and 1 % of all share for the system prompt."""
    counts: Counter[tuple[int, ...]] = Counter()
    for chain in full:
        counts.update(chain[:size] for size in range(1, min(len(chain), 64) + 1))
    least = max(20.0, 0.01 * len(rows))
    for row, chain in zip(rows, full, strict=True):
        size = 0
        while size < min(len(chain), 64) and counts[chain[: size + 1]] >= least:
            size += 1
        row.system_blocks = size


def _derive_sessions(rows: list[Row], full: list[tuple[int, ...]]) -> None:
    """Make each request the next turn of the latest one whose full blocks are a prefix of its own."""
    ends: dict[tuple[int, ...], int] = {}
    next_turn: Counter[int] = Counter()
    num_sessions = 0
    for index, (row, chain) in enumerate(zip(rows, full, strict=True)):
        shortest = row.system_blocks + 1
        parent = next(
            (ends[c] for size in range(len(chain), shortest - 1, -1) if (c := chain[:size]) in ends), None
        )
        if parent is None:
            row.session = num_sessions
            num_sessions += 1
        else:
            row.session = rows[parent].session
        row.turn = next_turn[row.session]
        next_turn[row.session] += 1
        if len(chain) >= shortest:
            ends[chain] = index
