"""The format of a session's value in Redis, and its validation.

Only the Lua scripts write values; this module reads them. A malformed value counts as absent: Redis may be
shared, restored from a backup or written by another version. The scripts get the rule as constants from here:
were they to accept a value that is refused here, its session could not be bound until the value expires.

Only the form of a backend's name is checked here; whether it exists is checked when it is looked up in the
fleet. No address is ever read from Redis.
"""

from __future__ import annotations

import re

from gateway.redis_link.lua import Script, load_script
from gateway.sessions.records import Record
from gateway.values import MAX_NAME_LENGTH, NAME_CHARACTERS, NAME_PATTERN, BackendId

VERSION_DIGITS, EPOCH_DIGITS, TOKENS_DIGITS, TURNS_DIGITS = 16, 18, 12, 9
_WIDTHS = (VERSION_DIGITS, EPOCH_DIGITS, TOKENS_DIGITS, TURNS_DIGITS)
MAX_EPOCH = 10**EPOCH_DIGITS - 1
MAX_TOKENS = 10**TOKENS_DIGITS - 1
MAX_TURNS = 10**TURNS_DIGITS - 1
_NUMBERS = " ".join(rf"(\d{{1,{width}}})" for width in _WIDTHS)
_VALUE = re.compile(rf"1 {_NUMBERS} ({NAME_PATTERN})".encode(), re.ASCII)
_BACKEND_ID = re.compile(NAME_PATTERN, re.ASCII)
_RULE: dict[str, str | int] = {
    # Lua's patterns have no {1,16}: lengths are compared
    "VALUE": f"^1 (%d+) (%d+) (%d+) (%d+) ([A-Za-z0-9][{NAME_CHARACTERS}]*)$",
    "MAX_VALUE_BYTES": len("1     ") + sum(_WIDTHS) + MAX_NAME_LENGTH,
    "VERSION_DIGITS": VERSION_DIGITS,
    "EPOCH_DIGITS": EPOCH_DIGITS,
    "TOKENS_DIGITS": TOKENS_DIGITS,
    "TURNS_DIGITS": TURNS_DIGITS,
    "MAX_NAME_LENGTH": MAX_NAME_LENGTH,
}


def load_binding_script(name: str) -> Script:
    """Read a script that reads or writes bindings, with this rule."""
    return load_script(name, "binding", constants=_RULE)


def decode_reply(reply: object, now_s: float) -> Record | None:
    """Decode a script's `{value, ttl_ms}`, with the expiry on the caller's clock; `None` if malformed."""
    match reply:
        case [bytes() as value, int() as ttl_ms] if ttl_ms >= 0:
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
