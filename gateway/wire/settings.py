"""Options of the wire layer: which parts of a request name a session, and which headers travel.

The defaults recognise the session identities of all clients and gateways we know of, so that moving to
Homing needs no client change. Invariant: a settings object that was built is valid (patterns compile,
names are lower case, no source is unknown). Knows nothing of how the options are used.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

import msgspec

from gateway.wire.defaults import (
    FIELDS_WITH_ANOTHER_MEANING,
    IGNORED_PATTERN,
    IGNORED_VALUES,
    NEVER_A_SESSION,
    SESSION_BODY_FIELDS,
    SESSION_HEADERS,
    VOLATILE_TEXT,
)

Source = Literal["header", "body", "response_id", "prompt_cache_key", "cookie", "fingerprint"]
"""Places that may name a session. `prompt_group` and `none` are what is left when all of them fail."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")


def _compiles(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from error


class Normaliser(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of volatile text: what `pattern` matches in a system prompt is hashed as `replacement`."""

    name: str
    """Name of this kind, for error messages."""
    pattern: str
    """Regular expression over the text of a system prompt."""
    replacement: str = ""
    """What is hashed instead."""

    def __post_init__(self) -> None:
        _compiles(f"normaliser {self.name!r}", self.pattern)


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the affinity key of a request comes from."""

    sources: tuple[Source, ...] = get_args(Source)
    """Places to look, best first; the first usable value wins. Leave one out to switch it off."""

    headers: tuple[str, ...] = SESSION_HEADERS
    """Request headers that name a session, best first."""

    header_qualifiers: tuple[str, ...] = ("x-claude-code-agent-id",)
    """Headers that name a sub-agent inside the session; their value becomes part of the key."""

    body_fields: tuple[str, ...] = SESSION_BODY_FIELDS
    """JSON fields that name a session, best first; one dot reaches into an object."""

    cookie_name: str | None = None
    """Cookie that names a session; none by default."""

    ignored_values: tuple[str, ...] = IGNORED_VALUES
    """Values that count as absent, whatever their case."""

    ignored_pattern: str = IGNORED_PATTERN
    """Regular expression; a value that matches it as a whole counts as absent."""

    max_key_length: int = 256
    """Longest usable value in bytes; a longer one counts as absent."""

    fingerprint_min_bytes: int = 32
    """A first user turn shorter than this ("hi") is no fingerprint: too many conversations begin with it."""

    normalisers: tuple[Normaliser, ...] = tuple(
        Normaliser(name=name, pattern=pattern, replacement=replacement)
        for name, pattern, replacement in VOLATILE_TEXT
    )
    """Volatile text to ignore when system prompts are compared; forwarded bytes are never changed. An
    expression runs over every new prompt: begin it with plain letters, or it costs 20-100 ns a character."""

    ignores_dates: bool = True
    """Dates and clock times in system prompts do not count either."""

    auxiliary_headers: tuple[str, ...] = ("x-openwebui-task", "x-homing-auxiliary")
    """A request with one of these follows its session's binding but never makes or moves one."""

    auxiliary_prompts: tuple[str, ...] = ("### Task:\n",)
    """Beginnings of one-message prompts of the same kind (Open WebUI's titles, tags, follow-ups)."""

    max_items: int = 200_000
    """JSON items in one body up to which messages are looked at one by one; beyond, only names are read."""

    max_prefix_messages: int = 512
    """Messages of one prompt that take part in prefix matching, from the first."""

    prompt_memo_entries: int = 4096
    """System prompts whose hashes are remembered, so that one is normalised once and not per request."""

    conversation_memo_bytes: int = 64 << 20
    """Memory for what is known of conversations, about 2 KB for one of ten messages, so that a turn costs
    what is new in it. 0: every turn is read from its first message."""

    def __post_init__(self) -> None:
        for option in ("headers", "header_qualifiers", "auxiliary_headers"):
            _are_header_names(option, getattr(self, option))
        _are_unique("sources", self.sources)
        _are_unique("body_fields", self.body_fields)
        for field in self.body_fields:
            if not all(field.split(".")) or field.count(".") > 1:
                raise ValueError(f"body_fields: {field!r} is neither `name` nor `name.name`")
            if field.partition(".")[0] in FIELDS_WITH_ANOTHER_MEANING:
                raise ValueError(f"body_fields: {field!r} is part of the request itself, never a session")
        _compiles("ignored_pattern", self.ignored_pattern)
        for option in ("max_key_length", "max_items", "max_prefix_messages", "prompt_memo_entries"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1")
        for option in ("fingerprint_min_bytes", "conversation_memo_bytes"):
            if getattr(self, option) < 0:
                raise ValueError(f"{option} must not be negative")
        if self.cookie_name is not None and not re.fullmatch(
            r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", self.cookie_name
        ):
            raise ValueError(f"cookie_name {self.cookie_name!r} is not a cookie name")


class HeaderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which client headers reach a backend."""

    stripped_headers: tuple[str, ...] = ("x-data-parallel-rank",)
    """Client headers that never reach a backend: they steer the engine and are not the client's to set."""

    trust_forwarded_headers: bool = False
    """Pass `Forwarded`, `X-Forwarded-*` and `X-Real-IP` on; only behind a proxy that sets them itself."""

    def __post_init__(self) -> None:
        for name in self.stripped_headers:
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"stripped_headers: {name!r} is not a lower-case header name")


def _are_header_names(option: str, names: tuple[str, ...]) -> None:
    _are_unique(option, names)
    for name in names:
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{option}: {name!r} is not a lower-case header name")
        if name in NEVER_A_SESSION:
            raise ValueError(f"{option}: {name!r} names a request, a person or a place, never a session")


def _are_unique(option: str, values: tuple[str, ...]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{option} names one entry twice")
