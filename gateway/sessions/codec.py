"""The format of a session's value in Redis, and its validation.

Only the Lua scripts write values; this module reads them. A malformed value counts as absent: Redis may be
shared, restored from a backup or written by another version. Only the form of a backend's name is checked
here; whether it exists is checked when it is looked up in the fleet. No address is ever read from Redis.
"""

from __future__ import annotations

import re

from gateway.sessions.records import Record
from gateway.values import BackendId

MAX_VALUE_BYTES = 140  # the longest that can be written is 125
MAX_EPOCH = 10**18 - 1
MAX_TOKENS = 10**12 - 1
MAX_TURNS = 10**9 - 1
_VALUE = re.compile(rb"1 (\d+) (\d+) (\d+) (\d+) ([A-Za-z0-9._-]{1,64})", re.ASCII)
_BACKEND_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def decode_reply(reply: object, now_s: float) -> Record | None:
    """Decode a script's `{value, ttl_ms}`, with the expiry on the caller's clock; `None` if malformed."""
    match reply:
        case [bytes() as value, int() as ttl_ms] if len(value) <= MAX_VALUE_BYTES and ttl_ms >= 0:
            fields = _VALUE.fullmatch(value)
        case _:
            return None
    if fields is None:
        return None
    version, epoch, context_tokens, num_turns = (int(fields[group]) for group in range(1, 5))
    backend_id = BackendId(fields[5].decode("ascii"))
    return Record(backend_id, epoch, version, now_s + ttl_ms / 1000, context_tokens, num_turns)


def is_storable(backend_id: BackendId, epoch: int, context_tokens: int) -> bool:
    """Whether `decode_reply` would accept this home after it is written."""
    return (
        _BACKEND_ID.fullmatch(backend_id) is not None
        and 0 <= epoch <= MAX_EPOCH
        and 0 <= context_tokens <= MAX_TOKENS
    )
