"""Adds the gateway's salt to a request.

Engines hash the salt with the first block of a prompt, so prompts with different salts share nothing in the
prefix cache. A client's own value is overridden (see `body_members`).

Which engine heeds which member in which API is listed here. In an API where it heeds none, a request would
share a cache with all tenants: it is refused, unless the configuration says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.errors import Forbidden, UnsupportedMediaType
from gateway.values import Api
from gateway.wire.body_members import with_member
from gateway.wire.routes import COUNT_PATHS

_SALT: Final = b"cache_salt"
# Not `messages`: vLLM has the field since its pull request 49498 of 2026, SGLang has none. Who does not know
# the field drops it unnoticed.
_HEEDED: Final = {
    "torch": {Api.CHAT: _SALT, Api.COMPLETIONS: _SALT, Api.RESPONSES: _SALT, Api.MESSAGES: _SALT},
    "vllm": {
        Api.CHAT: _SALT,
        Api.COMPLETIONS: _SALT,
        Api.RESPONSES: _SALT,
        Api.EMBEDDINGS: _SALT,
        Api.RERANK: _SALT,
    },
    "sglang": {
        Api.CHAT: _SALT,
        Api.COMPLETIONS: _SALT,
        Api.RESPONSES: _SALT,
        Api.GENERATE: b"extra_key",  # its own API has its own name for it
    },
}
_CACHED: Final = frozenset(
    api.value for api in (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES, Api.GENERATE)
)
"""APIs whose prompts stay in a prefix cache and whose answers tell how much was found there."""


def parse_salted(name: str) -> tuple[str, str]:
    """Split `engine/api`. Raises ValueError if such an API has no prefix cache or does not exist."""
    engine, _, api = name.partition("/")
    if not engine or api not in _CACHED:
        raise ValueError(f"{name!r} is not an engine and an API such as vllm/messages")
    return engine, api


class CacheSalting:
    """Salts requests under one configuration."""

    def __init__(self, also_salted: Iterable[str] = (), *, shares_unsalted: bool = False) -> None:
        """`also_salted`: further pairs `engine/api` that heed `cache_salt`."""
        self._members = {
            # by value: the hash of an Enum member is slow Python code
            (engine, api.value): member
            for engine, apis in _HEEDED.items()
            for api, member in apis.items()
        }
        for name in also_salted:
            self._members.setdefault(parse_salted(name), _SALT)
        self._shares_unsalted = shares_unsalted

    def salted(
        self, engine: str, api: Api, path: str, body: bytes, salt: str, content_encoding: str | None
    ) -> bytes:
        """Return the body for an engine of this kind, with the salt added where the engine heeds one.

        `salt` consists of hex digits. Raises Forbidden where the request would use a cache of all tenants,
        UnsupportedMediaType if the body is compressed, BadRequest if it is not a JSON object.
        """
        if not body:
            return body
        member = self._members.get((engine, api._value_))
        if member is not None:
            if content_encoding is not None and content_encoding.strip().lower() not in ("", "identity"):
                raise UnsupportedMediaType(
                    "compressed bodies are not accepted here: send the body uncompressed"
                )
            return with_member(body, member, b'"%b"' % salt.encode("ascii"))
        if api._value_ in _CACHED and path not in COUNT_PATHS and not self._shares_unsalted:
            raise Forbidden(
                f"the caches of tenants are kept apart here, which {engine} is not known to do in this API "
                f"({api._value_}): use another API, or see authentication.also_salted and unsalted"
            )
        return body
