"""Giving a request the `cache_salt` that the gateway wants: the one rewrite of a body.

Engines hash the salt with the first block of a prompt, so that prompts of different salts share nothing in
the prefix cache. The member is added at the very end of the object: every JSON parser that these engines use
takes the last of members with one name, so a client's own value loses however it was spelled, and all other
bytes stay as they were received.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import BadRequest, UnsupportedMediaType
from gateway.values import Api

SALTED_ENGINES: Final = frozenset({"torch", "vllm", "sglang"})
"""Engines that know the field; others are strict about unknown ones, or ignore it and isolate nothing."""

# by value: the hash of an Enum member is Python code
_MEMBER_OF: Final = {
    Api.CHAT.value: b"cache_salt",
    Api.COMPLETIONS.value: b"cache_salt",
    Api.RESPONSES.value: b"cache_salt",
    Api.MESSAGES.value: b"cache_salt",
    Api.GENERATE.value: b"extra_key",  # SGLang's own API
}
_BLANKS: Final = b" \t\r\n"


def with_cache_salt(api: Api, body: bytes, salt: str, content_encoding: str | None) -> bytes:
    """Return the body with the salt, or as it is where the API has no such field or there is no body.

    `salt` is hex digits. Raises UnsupportedMediaType for a compressed body, BadRequest for no JSON object.
    One copy of the body, O(bytes).
    """
    member = _MEMBER_OF.get(api._value_)
    if member is None or not body:
        return body
    if content_encoding is not None and content_encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("Compressed requests are not accepted here: send the body as it is.")
    end = body.rstrip(_BLANKS)
    if end[-1:] != b"}":
        raise BadRequest("the body is not a JSON object")
    is_empty = end[:-1].rstrip(_BLANKS)[-1:] == b"{"
    return b'%b%b"%b":"%b"}' % (end[:-1], b"" if is_empty else b",", member, salt.encode("ascii"))
