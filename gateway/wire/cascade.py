"""Finds the affinity key of a request: tries the configured sources in order and uses the first usable value.

The order is `sources` in the settings. A session id gives the same key from a header, the body or a cookie;
response ids, cache buckets and fingerprints have their own domains. Invariant: a bucket, a key that many
conversations may share, is marked as one, because routing must not let it overload its home. Knows nothing
about prompts except the bytes of a fingerprint that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.values import Api, KeySource, SessionKey
from gateway.wire.bodies import ABSENT, Body
from gateway.wire.keys import (
    HeaderScan,
    IdentityFinder,
    KeyHasher,
    Marks,
    Scope,
    length_prefixed,
    object_id_in,
    to_bytes,
)
from gateway.wire.objects import CONVERSATION
from gateway.wire.settings import KeySettings

_OUTSIDE: Final = ("header", "cookie")  # sources that are not in the body
_MAX_KNOWN: Final = 16_384  # at about 400 bytes
_MAX_KNOWN_BYTES: Final = 300


class Key(msgspec.Struct, frozen=True, gc=False):
    """The affinity key of a request."""

    session_key: SessionKey
    source: KeySource
    is_bucket: bool
    name: str = ""  # of the header, field or cookie that it is from


class Identity(msgspec.Struct, frozen=True, gc=False):
    """What the names in a request come to."""

    key: Key | None
    answer_key: SessionKey | None  # of the stored answer that it builds on, whatever else it names itself by
    is_auxiliary: bool
    object_keys: tuple[SessionKey, ...] = ()  # of other objects of engines that it names
    names_request: bool = False  # it says how the engine shall name it


class Names(msgspec.Struct, frozen=True, gc=False):
    """Everything in a request that may identify its session."""

    headers: HeaderScan
    body: Body
    tenant: str
    scope: Scope


# vLLM and SGLang name a request by these, and abort or mix up two of the same name.
_ENGINE_NAMES: Final = ("request_id", "rid")
_UNSET: Final = (b"", b"null", b'""')


class KeyCascade:
    """Finds the key of a request."""

    def __init__(self, settings: KeySettings, hasher: KeyHasher, finder: IdentityFinder) -> None:
        self._hasher = hasher
        self._finder = finder
        self._header_names = settings.headers
        self._cookie_name = settings.cookie_name or ""
        first_names = [field.partition(".")[0] for field in settings.body_fields]
        own_names = ("previous_response_id", "conversation", "prompt_cache_key", *_ENGINE_NAMES)
        self.body_names = tuple(dict.fromkeys([*first_names, *own_names]))
        position = {name: index for index, name in enumerate(self.body_names)}
        self._fields = [
            (field, position[name]) for field, name in zip(settings.body_fields, first_names, strict=True)
        ]
        self._response_position = position["previous_response_id"]
        self._conversation_position = position["conversation"]
        self._bucket_position = position["prompt_cache_key"]
        by_source: dict[str, Callable[[Names], Key | None]] = {
            "header": self._by_header,
            "body": self._by_body,
            "response_id": self._by_response_id,
            "prompt_cache_key": self._by_bucket,
            "cookie": self._by_cookie,
        }
        self._known: dict[tuple[Marks, Scope], Identity] = {}  # of requests that only headers name
        self.uses_fingerprint = "fingerprint" in settings.sources
        self._order = [by_source[source] for source in settings.sources if source in by_source]
        # of a body that names nothing, as most
        self._nothing = (ABSENT,) * len(self.body_names)
        self._engine_names = tuple(position[name] for name in _ENGINE_NAMES)
        self._order_outside = [by_source[source] for source in settings.sources if source in _OUTSIDE]

    def identify(self, api: Api, marks: Marks, body: Body, tenant: str, scope: Scope) -> Identity:
        """Return what the names of a request come to, fingerprint aside. Changes only a bounded memo."""
        if body.names and body.names != self._nothing:
            names = Names(self._finder.scan(marks), body, tenant, scope)
            is_response = api is Api.RESPONSES
            return Identity(
                key=self.find(names),
                answer_key=self.answer_key(names) if is_response else None,
                is_auxiliary=names.headers.is_auxiliary,
                object_keys=self._conversation_keys(names) if is_response else (),
                names_request=self.names_request(body),
            )
        identity = self._known.get((marks, scope))
        if identity is None:
            names = Names(self._finder.scan(marks), body, tenant, scope)
            identity = Identity(self.find(names), None, names.headers.is_auxiliary)
            if sum([len(value) for _, value in marks]) <= _MAX_KNOWN_BYTES:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[marks, scope] = identity
        return identity

    def names_request(self, body: Body) -> bool:
        """Whether the body says how the engine shall name the request."""
        return bool(body.names) and any(bytes(body.names[at]) not in _UNSET for at in self._engine_names)

    def find(self, names: Names) -> Key | None:
        """Return the key of the first source that has a usable value, fingerprint aside."""
        for look in self._order_outside if names.body.names == self._nothing else self._order:
            key = look(names)
            if key is not None:
                return key
        return None

    def fingerprint(self, scope: Scope, system: bytes, opening: bytes) -> Key:
        """Return the key of a conversation that nobody named: what its system prompt is and how it began.

        Two people may begin with the same words, so this key is a bucket.
        """
        key = self._hasher.hex_key(b"fingerprint:", scope, length_prefixed(system, opening))
        return Key(SessionKey(key), KeySource.FINGERPRINT, is_bucket=True)

    def _by_header(self, names: Names) -> Key | None:
        found = self._finder.best_header(names.headers)
        if found is None:
            return None
        rank, value = found
        return self._session(names, value, KeySource.HEADER, self._header_names[rank])

    def _by_body(self, names: Names) -> Key | None:
        for field, position in self._fields:
            value = self._value(names, field, position)
            if value is not None:
                return self._session(names, value, KeySource.BODY, field)
        return None

    def _by_cookie(self, names: Names) -> Key | None:
        value = names.headers.cookie
        return None if value is None else self._session(names, value, KeySource.COOKIE, self._cookie_name)

    def answer_key(self, names: Names) -> SessionKey | None:
        """Return the key of the stored response that a request continues, whatever its session key is.

        Access to the response depends on it, so an id that could name no session has a key all the same.
        """
        value = _object_id(names, self._response_position)
        return None if value is None else self._hasher.response_key(names.tenant, value)

    def _conversation_keys(self, names: Names) -> tuple[SessionKey, ...]:
        """Return the key that the conversation of a response has if an engine keeps it."""
        value = _object_id(names, self._conversation_position)
        return () if value is None else (self._hasher.object_key(names.tenant, CONVERSATION.name, value),)

    def _by_response_id(self, names: Names) -> Key | None:
        if self._value(names, "previous_response_id", self._response_position) is None:
            return None
        key = self.answer_key(names)
        return None if key is None else Key(key, KeySource.RESPONSE_ID, is_bucket=False)

    def _by_bucket(self, names: Names) -> Key | None:
        value = self._value(names, "prompt_cache_key", self._bucket_position)
        if value is None:
            return None
        key = self._hasher.hex_key(b"bucket:", names.scope, value)
        return Key(SessionKey(key), KeySource.PROMPT_CACHE_KEY, is_bucket=True)

    def _value(self, names: Names, field: str, position: int) -> bytes | None:
        values = names.body.names
        if not values or values[position] is ABSENT:
            return None
        return self._finder.from_field(field, bytes(values[position]))

    def _session(self, names: Names, value: bytes, source: KeySource, name: str) -> Key:
        qualifier = names.headers.qualifier
        if qualifier:
            key = self._hasher.hex_key(b"part:", names.scope, length_prefixed(value, qualifier))
        else:
            key = self._hasher.hex_key(b"session:", names.scope, value)
        return Key(SessionKey(key), source, is_bucket=False, name=name)


def _object_id(names: Names, position: int) -> bytes | None:
    """Return the id that a field gives to an engine's object, None if it gives none. What no engine would
    take for an id gives one all the same, which nothing has."""
    value = bytes(names.body.names[position])
    if value in _UNSET:
        return None
    text = object_id_in(value)
    return value if text is None else to_bytes(text)
