"""Finds the session id in headers, cookie and body, and turns it into a key.

Invariant: a blank, overlong or non-string value or an unfilled template is never a key, because it would put
all its senders on one backend. Raw ids do not leave this module: a key is a keyed hash scoped by tenant and
model, so equal ids of two tenants differ and nobody outside can compute a key. Knows nothing about backends
or bindings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from gateway.values import SessionKey
from gateway.wire.header_names import HeaderNames
from gateway.wire.settings import KeySettings

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING: Final = msgspec.json.Decoder(str)
_BY_RANK: Final = itemgetter(0)
_AUXILIARY: Final = "auxiliary="  # followed by the only value that counts, if not all do

_SESSION_MARK: Final = "_session_"  # Claude Code, older bodies: user_<hash>_account_<id>_session_<uuid>
_NO_ID: Final = re.compile(r"[\s{}\"]")


Marks = tuple[tuple[int | str, bytes], ...]
"""Headers that may say who a request belongs to, in order of arrival: (rank or other role, value)."""


class HeaderScan(msgspec.Struct, gc=False):
    """What the marks of a request say."""

    candidates: list[tuple[int, bytes]]  # (rank of the header, value), in order of arrival
    qualifier: bytes = b""
    cookie: bytes | None = None
    is_auxiliary: bool = False


class Scope(NamedTuple):
    """Tenant and model of a request, ready for hashing."""

    encoded: bytes
    seed: int  # start of this scope's hash chains: 64 bits that outsiders cannot predict


class KeyHasher:
    """Turns ids into keys: blake2b with a secret key, 128 bits.

    The scope is length-prefixed, so tenant "ab" with model "c" differs from "a" with "bc". The domain
    separates kinds of ids, so a response id is never mistaken for a session id.
    """

    def __init__(self, secret: bytes, *, max_scopes: int = 4096) -> None:
        # blake2b takes at most 64 bytes of key; a longer secret is hashed first, as HMAC does (RFC 2104).
        self._secret = secret if len(secret) <= 64 else blake2b(secret).digest()
        self._scopes: dict[tuple[str, str | None], Scope] = {}
        self._max_scopes = max_scopes

    def scope(self, tenant: str, model: str | None) -> Scope:
        """Return the scope of a tenant and model. Changes only a bounded memo."""
        found = self._scopes.get((tenant, model))
        if found is None:
            if len(self._scopes) >= self._max_scopes:
                self._scopes.clear()  # bounded, because model names come from clients
            encoded = length_prefixed(to_bytes(tenant), to_bytes(model or ""))
            seed = blake2b(b"prefix:" + encoded, key=self._secret, digest_size=8).digest()
            found = Scope(encoded, int.from_bytes(seed, "little"))
            self._scopes[tenant, model] = found
        return found

    def hex_key(self, domain: bytes, scope: Scope, value: bytes) -> str:
        """Return 32 hex digits for a value; `domain` ends with a colon and is one of a few constants."""
        return blake2b(domain + scope.encoded + value, key=self._secret, digest_size=16).hexdigest()

    def secret_json(self) -> bytes:
        """Return a JSON string that nobody outside can know."""
        return b'"%b"' % blake2b(b"marker:", key=self._secret, digest_size=16).hexdigest().encode()

    def object_key(self, tenant: str, kind: str, object_id: bytes) -> SessionKey:
        """Return the key of an object that an engine keeps, of any kind but a response."""
        value = length_prefixed(kind.encode(), object_id)
        return SessionKey(self.hex_key(b"object:", self.scope(tenant, None), value))

    def response_key(self, tenant: str, response_id: bytes) -> SessionKey:
        """Return the session key of all requests that refer to one response of the Responses API."""
        return SessionKey(self.hex_key(b"response:", self.scope(tenant, None), response_id))


def length_prefixed(*parts: bytes) -> bytes:
    """Join parts so that no two lists of parts give the same bytes."""
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def to_bytes(text: str) -> bytes:
    """Encode any str, including lone surrogates, which JSON escapes can contain."""
    return text.encode("utf-8", "surrogatepass")


class IdentityFinder:
    """Finds the raw id of a session in headers, cookie and body fields."""

    def __init__(self, settings: KeySettings) -> None:
        # The role of each relevant header: the rank of a session header, or another role.
        roles: dict[bytes, int | str] = {name.encode(): rank for rank, name in enumerate(settings.headers)}
        roles |= {name.encode(): _AUXILIARY + value for name, value in settings.auxiliary_marks()}
        roles |= {name.encode(): "qualifier" for name in settings.header_qualifiers}
        if settings.cookie_name is not None:
            roles[b"cookie"] = "cookie"
            self._cookie_prefix = settings.cookie_name.encode() + b"="
        self._roles: HeaderNames[int | str | None] = HeaderNames(roles.get)
        self._ignored = frozenset(to_bytes(value.lower()) for value in settings.ignored_values)
        self._ignored_pattern = re.compile(to_bytes(settings.ignored_pattern))
        self._max_length = settings.max_key_length

    def marks(self, raw_headers: Sequence[tuple[bytes, bytes]]) -> Marks:
        """Pick the headers of interest, in one pass. O(headers)."""
        roles = self._roles
        return tuple([(role, value) for name, value in raw_headers if (role := roles[name]) is not None])

    def scan(self, marks: Marks) -> HeaderScan:
        """Collect all that headers say."""
        found = HeaderScan([])
        for role, value in marks:
            if isinstance(role, int):
                found.candidates.append((role, value))
            else:
                self._note(found, role, value)
        return found

    def best_header(self, found: HeaderScan) -> tuple[int, bytes] | None:
        """Return rank and usable value of the best header. The first value of a repeated header counts."""
        candidates = found.candidates
        if len(candidates) > 1:
            candidates = sorted(candidates, key=_BY_RANK)
        for rank, value in candidates:
            usable = self.usable(value)
            if usable is not None:
                return rank, usable
        return None

    def usable(self, value: bytes) -> bytes | None:
        """Return the id inside `value`, or None if it cannot name a session."""
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] == 0x22:
            value = value[1:-1].strip()
        if not value or len(value) > self._max_length or value.lower() in self._ignored:
            return None
        return None if self._ignored_pattern.fullmatch(value) else value

    def from_field(self, field: str, value: bytes) -> bytes | None:
        """Return the id in a JSON field, given the JSON bytes of the field's first name."""
        _, _, member = field.partition(".")
        if member and value[:1] == b"{":
            value = _member(value, member)
        elif member:
            return None
        text = session_part(value) if field == "metadata.user_id" else _string(value)
        return None if text is None else self.usable(to_bytes(text))

    def _note(self, found: HeaderScan, kind: str, value: bytes) -> None:
        if kind == "cookie":
            found.cookie = found.cookie or self._cookie_value(value)
            return
        usable = self.usable(value)
        if usable is None:
            return
        if kind.startswith(_AUXILIARY):
            wanted = kind[len(_AUXILIARY) :]
            found.is_auxiliary |= not wanted or usable.lower() == wanted.encode()
        else:
            found.qualifier = usable

    def _cookie_value(self, header: bytes) -> bytes | None:
        for pair in header.split(b";"):
            pair = pair.strip()
            if pair.startswith(self._cookie_prefix):
                return self.usable(pair[len(self._cookie_prefix) :])
        return None


def session_part(value: bytes) -> str | None:
    """Return the session part of Anthropic's `metadata.user_id`, never the user or the device.

    Claude Code sends `user_…_account_…_session_<uuid>`, an object as a string, or an object.
    """
    if value[:1] == b"{":
        return _string(_member(value, "session_id"))
    text = _string(value)
    if text is None:
        return None
    if text.lstrip().startswith("{"):
        return _string(_member(to_bytes(text), "session_id"))
    _, mark, session = text.rpartition(_SESSION_MARK)
    return session if mark and not _NO_ID.search(session) else None


def object_id_in(value: bytes) -> str | None:
    """Return the id of an engine's object as engines read it: a string, or the `id` of an object."""
    return _string(_member(value, "id") if value[:1] == b"{" else value)


def _member(value: bytes, name: str) -> bytes:
    try:
        found = _OBJECT.decode(value).get(name)
    except (msgspec.DecodeError, RecursionError):
        return b""
    return b"" if found is None else bytes(found)


def _string(value: bytes) -> str | None:
    if value[:1] != b'"':
        return None  # 123, true, 1.5, null, [] and {} are not ids
    try:
        return _STRING.decode(value)
    except msgspec.DecodeError:
        return None
