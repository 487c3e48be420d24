"""Finds ids that name no session: ids that never repeat, and ids that many conversations share.

A client may send a fresh id with every request (a request id in a session header), or one id for all its
users (a constant, an account). The first scatters the turns of every conversation and fills the session
table; the second puts everything on one backend. Both show when keys are compared with prompts.

*Never repeats*: a turn continues a prompt seen before (all its messages but the last few are that prompt),
and its key was never seen before. What counts is that the key is new, not that it differs: sessions that use
the same words have keys of their own. If nearly all follow-ups that a tenant sends under one header or field
look so, its new keys are not taken for sessions. Keys that were known before stay what they are.

*Shared*: many conversations came under one key. They are told apart by their openers: a conversation begins
with one, or an opener comes back after others. Clients that compact their history, or send only its last
turns, change their opener but never return to an old one. The conversation with most turns is the session;
only the others lose the id. So the helpers and sub-agents of a client cannot take its home away, however many
there are.

A request whose id is ignored is treated as one without: the fingerprint of its conversation is its key. This
is decided once for each new key, and for each conversation under a shared one, and holds while the key is
remembered. A key that only its session has used for a while is not shared any more.

Requests that cannot bind (counts of tokens, titles, embeddings) are no turns of a conversation: they neither
count here nor are judged.

Invariant: bounded memory, O(1) per request, no clock. Only keys that a client named are judged, and what one
tenant sends, or sends under one name, is no evidence against another. Keys that came once cannot push out of
memory those that came twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.values import IgnoredId, KeySource, RequestFacts, SessionKey

NEVER_REPEATS: Final = "never_repeats"
SHARED: Final = "shared"

_MAX_ADDED: Final = 8  # messages that one turn adds: answer, tool calls, their results, the next question
_MAX_SOURCES: Final = 4_096  # pairs of tenant and header or field
_QUIET_TURNS: Final = 4  # times the limit of conversations: so many turns without others prove a session
_JUDGED: Final = frozenset((KeySource.HEADER, KeySource.BODY, KeySource.COOKIE))

Source = tuple[str, str]
"""A tenant, and the name of the header, field or cookie that its keys come from."""


class KeyWatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a session key is not trusted."""

    is_enabled: bool = True
    """Whether keys are judged at all."""
    max_conversations_per_key: int = 16
    """A key with more conversations than this is a session for the longest of them only."""
    unstable_share: float = 0.9
    """A tenant's header or field with at least this share of new keys in its follow-up turns names requests,
    not sessions."""
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

    def note(self, *, is_changed: bool, memory: int) -> None:
        """Count one follow-up. Old ones fade, because clients get mended."""
        if self.num_follow_ups >= memory:
            self.num_follow_ups *= 0.5
            self.num_changed *= 0.5
        self.num_follow_ups += 1
        self.num_changed += is_changed


class _KeyRecord:
    """The conversations seen under one key, by their openers."""

    __slots__ = ("conversations", "ignored", "is_ignored", "latest", "num_quiet", "recent", "turns")

    def __init__(self) -> None:
        self.is_ignored = False  # new under a source whose keys never repeat
        self.conversations: set[int] = set()
        self.latest: int | None = None
        self.recent: OrderedDict[int, None] = OrderedDict()  # openers seen in follow-ups only
        self.turns: OrderedDict[int, int] = OrderedDict()  # follow-ups of each opener, the latest last
        self.ignored: OrderedDict[int, None] = OrderedDict()  # conversations that lost the id
        self.num_quiet = 0  # turns of the session since another conversation came

    def note(self, opener: int, *, is_follow_up: bool, limit: int) -> None:
        """Count one turn. An opener is a conversation if one begins with it, or if it returns after others.

        A sliding window or a compacted history never returns to an old opener.
        """
        if is_follow_up:
            self.turns[opener] = self.turns.pop(opener, 0) + 1
            _trim(self.turns, 4 * limit)
        if len(self.conversations) <= limit:
            if not is_follow_up or (opener in self.recent and opener != self.latest):
                self.conversations.add(opener)
                self.recent.pop(opener, None)
            elif opener not in self.conversations:
                self.recent[opener] = None
                _trim(self.recent, 4 * limit)
        self.latest = opener

    def names(self, opener: int, *, limit: int) -> bool:
        """Whether the key names this conversation. Changes what is remembered of a shared key."""
        if len(self.conversations) <= limit:
            return True
        openers = [each for each in self.turns if each not in self.ignored]
        if opener == max(openers, key=self.turns.__getitem__, default=None):
            self.num_quiet += 1
            if self.num_quiet >= _QUIET_TURNS * limit:
                self.conversations = {opener}
                self.turns = OrderedDict({opener: self.turns[opener]})
                self.num_quiet = 0
            return True
        self.num_quiet = 0
        self.ignored[opener] = None
        self.ignored.move_to_end(opener)
        _trim(self.ignored, 4 * limit)
        return False


class KeyWatch:
    """Judges the key of each request. Remembers prompts and keys, and forgets the least recently seen."""

    def __init__(self, settings: KeyWatchSettings) -> None:
        self._settings = settings
        self._prompts: OrderedDict[int, None] = OrderedDict()
        self._new_keys: OrderedDict[SessionKey, _KeyRecord] = OrderedDict()  # came once
        self._known_keys: OrderedDict[SessionKey, _KeyRecord] = OrderedDict()
        self._sources: OrderedDict[Source, _SourceRecord] = OrderedDict()
        self.num_shared = 0  # requests whose key was shared
        self.num_unstable = 0  # requests whose key was replaced because it never repeats

    def reconfigure(self, settings: KeyWatchSettings) -> None:
        """Use these limits from now on. Keeps what is remembered."""
        self._settings = settings

    def is_suspect(self, tenant: str, name: str, key: SessionKey) -> bool:
        """Whether `judge` may ignore this key, and will want to know the conversation's fingerprint."""
        record = self._known_keys.get(key) or self._new_keys.get(key)
        if record is None:
            return self._never_repeats(self._sources.get((tenant, name)))
        return record.is_ignored or len(record.conversations) > self._settings.max_conversations_per_key

    def judge(self, facts: RequestFacts) -> RequestFacts:
        """Return the facts with a key that can be trusted. Changes what is remembered."""
        key = facts.session_key
        if (
            key is None
            or facts.key_source not in _JUDGED
            or len(facts.prefix) < 2
            or not facts.sets_binding
            or not self._settings.is_enabled
        ):
            return facts
        limit = self._settings.max_conversations_per_key
        record, is_new = self._meet(key)
        if is_new:
            record.is_ignored = self._never_repeats(self._sources.get((facts.tenant, facts.key_name)))
        is_suspect = record.is_ignored or len(record.conversations) > limit
        self._note_source(facts, is_new=is_new)
        opener = facts.prefix[1].chain_hash
        record.note(opener, is_follow_up=facts.is_follow_up, limit=limit)
        if not is_suspect:
            return facts  # its fingerprint was not looked for
        if record.is_ignored:
            self.num_unstable += 1
            return _without_id(facts, key, NEVER_REPEATS)
        if not record.names(opener, limit=limit):
            self.num_shared += 1
            return _without_id(facts, key, SHARED)
        return facts

    def _never_repeats(self, source: _SourceRecord | None) -> bool:
        settings = self._settings
        return (
            source is not None
            and source.num_follow_ups >= settings.min_follow_ups
            and source.num_changed >= settings.unstable_share * source.num_follow_ups
        )

    def _meet(self, key: SessionKey) -> tuple[_KeyRecord, bool]:
        """Return what is known of a key, and whether it is new. Changes the memory."""
        record = self._known_keys.get(key)
        if record is not None:
            self._known_keys.move_to_end(key)
            return record, False
        record = self._new_keys.pop(key, None)
        is_new = record is None
        record = record or _KeyRecord()
        table = self._new_keys if is_new else self._known_keys
        table[key] = record
        if len(table) > self._settings.memory_entries:
            _trim(table, self._settings.memory_entries)
        return record, is_new

    def _note_source(self, facts: RequestFacts, *, is_new: bool) -> None:
        """Count one turn for its source."""
        source = (facts.tenant, facts.key_name)
        record = self._sources.get(source)
        if record is None:
            record = self._sources[source] = _SourceRecord()
            _trim(self._sources, _MAX_SOURCES)
        prompt = facts.prefix
        if facts.is_follow_up and self._is_known(facts):
            record.note(is_changed=is_new, memory=4 * self._settings.min_follow_ups)
        prompts = self._prompts
        prompts[prompt[-1].chain_hash] = None
        prompts.move_to_end(prompt[-1].chain_hash)
        if len(prompts) > self._settings.memory_entries:
            _trim(prompts, self._settings.memory_entries)

    def _is_known(self, facts: RequestFacts) -> bool:
        """Whether the prompt goes on from one that came before."""
        before = facts.prefix[-_MAX_ADDED - 1 : -1]
        return not self._prompts.keys().isdisjoint([message.chain_hash for message in before])


def _without_id(facts: RequestFacts, key: SessionKey, reason: str) -> RequestFacts:
    """Return the facts as if the client had sent no id."""
    if facts.fingerprint is not None:
        source = KeySource.FINGERPRINT
    else:
        source = KeySource.PROMPT_GROUP if facts.prompt_key is not None else KeySource.NONE
    return replace(
        facts,
        session_key=facts.fingerprint,
        key_source=source,
        key_name="",
        obeys_load_bound=source is not KeySource.NONE,
        ignored_id=IgnoredId(key, reason),
    )


def _trim(table: OrderedDict[Any, Any], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
