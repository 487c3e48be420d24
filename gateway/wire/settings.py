"""Options of the wire layer: which parts of a request name a session, and which headers are forwarded.

The defaults recognise the session ids of all clients and gateways that we know, so moving to Homing needs no
change in clients. Invariant: a settings object is valid once it is built (patterns compile, names are lower
case, sources are known). Knows nothing about how the options are used.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

import msgspec

from gateway.wire.defaults import (
    AUXILIARY_HEADERS,
    AUXILIARY_PROMPTS,
    AUXILIARY_SYSTEM_PROMPTS,
    FIELDS_WITH_ANOTHER_MEANING,
    HEADER_QUALIFIERS,
    IGNORED_PATTERN,
    IGNORED_VALUES,
    NEVER_A_SESSION,
    SESSION_BODY_FIELDS,
    SESSION_HEADERS,
    VOLATILE_TEXT,
)

Source = Literal["header", "body", "response_id", "prompt_cache_key", "cookie", "fingerprint"]
"""Places that may name a session. If all fail, the source is `prompt_group` or `none`."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")


def _compiles(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from error


class Normaliser(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of volatile text. Matches of `pattern` in a system prompt are hashed as `replacement`."""

    name: str
    """Name of this kind, used in error messages."""
    pattern: str
    """Regular expression, applied to the text of a system prompt."""
    replacement: str = ""
    """Text to hash instead."""

    def __post_init__(self) -> None:
        _compiles(f"normaliser {self.name!r}", self.pattern)


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the affinity key of a request comes from."""

    sources: tuple[Source, ...] = get_args(Source)
    """Places to look for a key, best first. The first usable value wins. Leave a source out to disable it."""

    headers: tuple[str, ...] = SESSION_HEADERS
    """Request headers that name a session, best first."""

    header_qualifiers: tuple[str, ...] = HEADER_QUALIFIERS
    """Headers that name a sub-agent within the session. Their value becomes part of the key."""

    body_fields: tuple[str, ...] = SESSION_BODY_FIELDS
    """JSON fields that name a session, best first. `a.b` is member `b` of object `a`."""

    cookie_name: str | None = None
    """Cookie that names a session. Default: none."""

    ignored_values: tuple[str, ...] = IGNORED_VALUES
    """Values that count as absent. Case is ignored."""

    ignored_pattern: str = IGNORED_PATTERN
    """Regular expression. A value that it matches completely counts as absent."""

    max_key_length: int = 256
    """Maximum length of a value in bytes. A longer one counts as absent."""

    fingerprint_min_bytes: int = 32
    """Minimum length of the user's first words for a fingerprint. Too many conversations begin with "hi":
    these get theirs from their second turn on, with the first answer and what the user said next."""

    normalisers: tuple[Normaliser, ...] = tuple(
        Normaliser(name=name, pattern=pattern, replacement=replacement)
        for name, pattern, replacement in VOLATILE_TEXT
    )
    """Volatile text to ignore when system prompts are compared. Forwarded bytes are never changed. Each
    expression runs over every new prompt: start it with literal letters, or it costs 20-100 ns a
    character."""

    ignores_dates: bool = True
    """Whether to ignore dates and clock times in system prompts, too."""

    auxiliary_headers: tuple[str, ...] = AUXILIARY_HEADERS
    """Headers of auxiliary requests, each a name, or `name=value` (in lower case) if only that value says so.
    Such a request follows its session's binding but never makes or moves one."""

    auxiliary_prompts: tuple[str, ...] = AUXILIARY_PROMPTS
    """How one-message prompts of auxiliary requests begin (titles, tags, follow-ups, graders)."""

    auxiliary_system_prompts: tuple[str, ...] = AUXILIARY_SYSTEM_PROMPTS
    """How a line of a system prompt begins that only auxiliary requests have. Such a request is one as long
    as no answer is in it."""

    max_items: int = 200_000
    """Maximum number of JSON items in a body whose messages are read one by one. In larger bodies only the
    names are read."""

    max_prefix_messages: int = 512
    """Number of messages of a prompt, from the first, that are used for prefix matching."""

    prompt_memo_entries: int = 4096
    """Number of system prompts whose hashes are kept, so that they need not be normalised for every
    request."""

    conversation_memo_bytes: int = 64 << 20
    """Memory for what is known of conversations, about 2 KB for one of ten messages, so that a turn costs
    what is new in it. 0: every turn is read from its first message."""

    def __post_init__(self) -> None:
        for option in ("headers", "header_qualifiers"):
            _are_header_names(option, getattr(self, option))
        _are_header_names("auxiliary_headers", tuple([name for name, _ in self.auxiliary_marks()]))
        for name, value in self.auxiliary_marks():
            if value != value.lower():
                raise ValueError(f"auxiliary_headers: {name!r} must have a lower-case value, not {value!r}")
        _are_unique("sources", self.sources)
        _are_unique("body_fields", self.body_fields)
        for field in self.body_fields:
            if not all(field.split(".")) or field.count(".") > 1:
                raise ValueError(f"body_fields: {field!r} must have the form `name` or `name.name`")
            if field.partition(".")[0] in FIELDS_WITH_ANOTHER_MEANING:
                raise ValueError(f"body_fields: {field!r} has another meaning and cannot name a session")
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
            raise ValueError(f"cookie_name: {self.cookie_name!r} is not a valid cookie name")

    def auxiliary_marks(self) -> list[tuple[str, str]]:
        """Return `auxiliary_headers` as names and values; an empty value stands for any."""
        return [
            (name, value) for name, _, value in (entry.partition("=") for entry in self.auxiliary_headers)
        ]


class HeaderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which client headers are forwarded to backends."""

    stripped_headers: tuple[str, ...] = ("x-data-parallel-rank",)
    """Client headers that are never forwarded, because they control the engine."""

    trust_forwarded_headers: bool = False
    """Forward `Forwarded`, `X-Forwarded-*` and `X-Real-IP`. Use it only behind a proxy that sets them
    itself."""

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
            raise ValueError(
                f"{option}: {name!r} cannot name a session: it names a request, person or address"
            )


def _are_unique(option: str, values: tuple[str, ...]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{option} has a duplicate entry")
