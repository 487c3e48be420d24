"""Session keys that are not what they say: ids that never repeat, and ids that many conversations share.

A client may send a fresh id with every request (a request id under a session's name), or one id for all its
users (a constant, an account). The first scatters the turns of every conversation and fills the session
table, the second piles everything up on one backend. Both show in how keys and prompts go together.

*Never repeats*: a turn that continues a prompt seen before (its messages but the last few are exactly that
prompt) under a key never seen before. When nearly all follow-ups of a source look so, the source is put
aside and the *opener* is the key: the chain hash over system prompt and first message. That the key is new
is what counts, not that it differs: sessions with the same words have honest keys of their own. *Shared*:
one key under which many conversations came, told by their openers: one begins with it, or it comes back after
others. It stops being a session: such requests go by their prompt, within the load bound. Clients that
compact their history, or send only the last turns of it, change their opener, but never come back to an old
one; a fan-out of sub-agents under one id goes above the limit, rightly.

Invariant: bounded memory, O(1) per request, no clock. It judges only keys that a client named.
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
    """When a session key is not believed."""

    is_enabled: bool = True
    """Whether keys are judged at all."""
    max_conversations_per_key: int = 16
    """A key under which more conversations than this came is a bucket, not a session."""
    unstable_share: float = 0.9
    """A source whose follow-up turns nearly all bring a new key names requests, not sessions."""
    min_follow_ups: int = 50
    """Follow-up turns to see before a source is judged."""
    memory_entries: int = 20_000
    """Prompts and keys remembered, each."""

    def __post_init__(self) -> None:
        if not 0 < self.unstable_share <= 1:
            raise ValueError("unstable_share must be above 0 and at most 1")
        if min(self.max_conversations_per_key, self.min_follow_ups, self.memory_entries) < 1:
            raise ValueError("key watch limits must be at least 1")


class _SourceRecord:
    """How the follow-up turns of one source looked lately."""

    __slots__ = ("num_changed", "num_follow_ups")

    def __init__(self) -> None:
        self.num_follow_ups = 0.0
        self.num_changed = 0.0


class _KeyRecord:
    """The conversations that came under one key, by their openers."""

    __slots__ = ("conversations", "latest", "recent")

    def __init__(self) -> None:
        self.conversations: set[int] = set()
        self.latest: int | None = None
        self.recent: OrderedDict[int, None] = OrderedDict()  # seen in follow-ups alone, not yet told apart

    def note(self, opener: int, *, is_follow_up: bool, max_recent: int) -> None:
        """Take in one turn. An opener is another conversation when one begins with it, or when it comes back
        after others; a window that slides, or a compacted history, leaves its openers behind for ever."""
        if not is_follow_up or (opener in self.recent and opener != self.latest):
            self.conversations.add(opener)
            self.recent.pop(opener, None)
        elif opener not in self.conversations:
            self.recent[opener] = None
            if len(self.recent) > max_recent:
                self.recent.popitem(last=False)
        self.latest = opener


class KeyWatch:
    """Judges the key of each request; remembers prompts and keys, least recently seen forgotten first."""

    def __init__(self, settings: KeyWatchSettings) -> None:
        self._settings = settings
        self._prompts: OrderedDict[int, None] = OrderedDict()
        self._records_of_keys: OrderedDict[SessionKey, _KeyRecord] = OrderedDict()
        self._sources: dict[KeySource, _SourceRecord] = {}
        self.num_shared = 0  # requests whose key was found to be shared
        self.num_unstable = 0  # requests whose key was put aside because it never repeats

    def reconfigure(self, settings: KeyWatchSettings) -> None:
        """Judge by these limits from now on. Changes the settings, and nothing that is remembered."""
        self._settings = settings

    def judge(self, facts: RequestFacts) -> RequestFacts:
        """Return the facts with the key that may be believed. Changes what is remembered."""
        if (
            facts.key_source not in _JUDGED
            or facts.session_key is None
            or len(facts.prefix) < 2
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
        """Take in one turn; return whether its source names requests instead of sessions."""
        assert facts.session_key is not None
        record = self._sources.get(facts.key_source)
        if record is None:
            record = self._sources[facts.key_source] = _SourceRecord()
        prompt = facts.prefix
        if facts.is_follow_up and self._is_known(prompt[-_MAX_ADDED - 1 : -1]):
            if record.num_follow_ups >= 4 * self._settings.min_follow_ups:  # forget slowly: clients mend
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
        """Take in one turn; return whether too many conversations have come under its key."""
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
