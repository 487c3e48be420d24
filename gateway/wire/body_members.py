"""Adds a member to the JSON object of a request. All other bytes stay as received.

It is added at the end: the JSON parsers of the engines that it is for (pydantic-core, msgspec) use the last
of several members with the same name, so it overrides a client's own value in any spelling.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import BadRequest

_BLANKS: Final = b" \t\r\n"


def with_member(body: bytes, name: bytes, value: bytes) -> bytes:
    """Return the body with one more member; `name` and `value` are JSON without need of escapes.

    Raises BadRequest if it does not end like an object. Copies the body once, O(bytes).
    """
    end = body.rstrip(_BLANKS)
    if end[-1:] != b"}":
        raise BadRequest("the body is not a JSON object")
    is_empty = end[:-1].rstrip(_BLANKS)[-1:] == b"{"
    return b'%b%b"%b":%b}' % (end[:-1], b"" if is_empty else b",", name, value)
