"""Adds the gateway's `cache_salt` to a request.

Engines hash the salt with the first block of a prompt, so prompts with different salts share nothing in the
prefix cache. A client's own value is overridden (see `body_members`).
"""

from __future__ import annotations

from typing import Final

from gateway.errors import UnsupportedMediaType
from gateway.values import Api
from gateway.wire.body_members import with_member

SALTED_ENGINES: Final = frozenset({"torch", "vllm", "sglang"})
"""Engines that support the field. Others refuse unknown fields, or ignore it and isolate nothing."""

# keyed by value: the hash of an Enum member is slow Python code
_MEMBER_OF: Final = {
    Api.CHAT.value: b"cache_salt",
    Api.COMPLETIONS.value: b"cache_salt",
    Api.RESPONSES.value: b"cache_salt",
    Api.MESSAGES.value: b"cache_salt",
    Api.GENERATE.value: b"extra_key",  # SGLang's own API
}


def with_cache_salt(api: Api, body: bytes, salt: str, content_encoding: str | None) -> bytes:
    """Return the body with the salt added; unchanged if it is empty or the API has no such field.

    `salt` consists of hex digits. Raises UnsupportedMediaType if the body is compressed, BadRequest if it is
    not a JSON object. Copies the body once, O(bytes).
    """
    member = _MEMBER_OF.get(api._value_)
    if member is None or not body:
        return body
    if content_encoding is not None and content_encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("compressed bodies are not accepted here: send the body uncompressed")
    return with_member(body, member, b'"%b"' % salt.encode("ascii"))
