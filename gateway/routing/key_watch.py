"""Finds session keys that name no session: ids that never repeat, and ids that many conversations share.

A client may send a fresh id with every request (a request id in a session header), or one id for all its
users (a constant, an account). The first scatters the turns of every conversation and fills the session
table; the second puts everything on one backend. Both show when keys are compared with prompts.

*Never repeats*: a turn continues a prompt seen before (all its messages but the last few are that prompt),
and its key was never seen before. If nearly all follow-ups of a source look so, the source is ignored and the
*opener* becomes the key: the chain hash over system prompt and first message. What counts is that the key is
new, not that it differs: sessions that use the same words have keys of their own.

*Shared*: many conversations came under one key. They are told apart by their openers: a conversation begins
with one, or an opener comes back after others. Requests with a shared key are placed by their prompt, within
the load bound. Clients that compact their history, or send only its last turns, change their opener but never
return to an old one. Sub-agents that fan out under one id can exceed the limit; they are many conversations.

Requests that cannot bind (counts of tokens, titles, embeddings) are no turns of a conversation: they neither
count here nor are judged.

Invariant: bounded memory, O(1) per request, no clock. Only keys that a client named are judged.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gateway.values import KeySource, Message, RequestFacts, SessionKey

_MAX_ADDED = 8  # messages that one turn adds: answer, tool calls, their results, the next question
_K = TypeVar("_K")
_V = TypeVar("_V")
_JUDGED = frozenset((KeySource.HEADER, KeySource.BODY, KeySource.COOKIE))


class KeyWatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a session key is not trusted."""

    is_enabled: bool = True
    """Whether keys are judged at all."""
    max_conversations_per_key: int = 16
    """A key with more conversations than this is a bucket, not a session."""
    unstable_share: float = 0.9
    """A source with at least this share of new keys in its follow-up turns names requests, not sessions."""
    min_follow_ups: int = 50
    """Follow-up turns needed before a source is judged."""
    memory_entries: int = 20_000
    """Prompts and keys remembered, each."""

    def __post_init__(self) -> None:
        if not 0 < self.unstable_share <= 1:
            raise ValueError("unstable_share must be above 0 and at most 1")
        if min(self.max_conversations_per_key, self.min_follow_ups, self.memory_entries) < 1:
            raise ValueError("key watch limits must be at least 1")


class _SourceRecord:
    """Recent follow-up turns of one source."""

    __slots__ = ("num_changed", "num_follow_ups")

    def __init__(self) -> None:
        self.num_follow_ups = 0.0
        self.num_changed = 0.0


class _KeyRecord:
    """The conversations seen under one key, by their openers."""

    __slots__ = ("conversations", "latest", "recent")

    def __init__(self) -> None:
        self.conversations: set[int] = set()
        self.latest: int | None = None
        self.recent: OrderedDict[int, None] = OrderedDict()  # openers seen in follow-ups only

    def note(self, opener: int, *, is_follow_up: bool, max_recent: int) -> None:
        """Count one turn. An opener is a conversation if one begins with it, or if it returns after others.

        A sliding window or a compacted history never returns to an old opener.
        """
        if not is_follow_up or (opener in self.recent and opener != self.latest):
            self.conversations.add(opener)
            self.recent.pop(opener, None)
        elif opener not in self.conversations:
            self.recent[opener] = None
            if len(self.recent) > max_recent:
                self.recent.popitem(last=False)
        self.latest = opener


class KeyWatch:
    """Judges the key of each request. Remembers prompts and keys, and forgets the least recently seen."""

    def __init__(self, settings: KeyWatchSettings) -> None:
        self._settings = settings
        self._prompts: OrderedDict[int, None] = OrderedDict()
        self._records_of_keys: OrderedDict[SessionKey, _KeyRecord] = OrderedDict()
        self._sources: dict[KeySource, _SourceRecord] = {}
        self.num_shared = 0  # requests whose key was shared
        self.num_unstable = 0  # requests whose key was replaced because it never repeats

    def reconfigure(self, settings: KeyWatchSettings) -> None:
        """Use these limits from now on. Keeps what is remembered."""
        self._settings = settings

    def judge(self, facts: RequestFacts) -> RequestFacts:
        """Return the facts with a key that can be trusted. Changes what is remembered."""
        if (
            facts.key_source not in _JUDGED
            or facts.session_key is None
            or len(facts.prefix) < 2
            or not facts.sets_binding
            or not self._settings.is_enabled
        ):
            return facts
        opener = facts.prefix[1].chain_hash
        is_unstable = self._note_source(facts)
        is_shared = self._is_shared(facts, opener)
        if is_unstable:
            self.num_unstable += 1
            key = SessionKey(f"{opener & (2**64 - 1):032x}")
            return replace(facts, session_key=key, key_source=KeySource.FINGERPRINT)
        if is_shared:
            self.num_shared += 1
            return replace(facts, session_key=None, sets_binding=False, obeys_load_bound=True)
        return facts

    def _note_source(self, facts: RequestFacts) -> bool:
        """Count one turn; return whether its source names requests instead of sessions."""
        assert facts.session_key is not None
        record = self._sources.get(facts.key_source)
        if record is None:
            record = self._sources[facts.key_source] = _SourceRecord()
        prompt = facts.prefix
        if facts.is_follow_up and self._is_known(prompt[-_MAX_ADDED - 1 : -1]):
            if record.num_follow_ups >= 4 * self._settings.min_follow_ups:  # fade: clients get fixed
                record.num_follow_ups *= 0.5
                record.num_changed *= 0.5
            record.num_follow_ups += 1
            record.num_changed += facts.session_key not in self._records_of_keys
        self._remember(self._prompts, prompt[-1].chain_hash, None)
        return (
            record.num_follow_ups >= self._settings.min_follow_ups
            and record.num_changed >= self._settings.unstable_share * record.num_follow_ups
        )

    def _is_known(self, messages: tuple[Message, ...]) -> bool:
        return not self._prompts.keys().isdisjoint([message.chain_hash for message in messages])

    def _is_shared(self, facts: RequestFacts, opener: int) -> bool:
        """Count one turn; return whether too many conversations have come under its key."""
        assert facts.session_key is not None
        record = self._records_of_keys.get(facts.session_key) or _KeyRecord()
        limit = self._settings.max_conversations_per_key
        if len(record.conversations) <= limit:
            record.note(opener, is_follow_up=facts.is_follow_up, max_recent=4 * limit)
        self._remember(self._records_of_keys, facts.session_key, record)
        return len(record.conversations) > limit

    def _remember(self, table: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        table[key] = value
        table.move_to_end(key)
        while len(table) > self._settings.memory_entries:
            table.popitem(last=False)
