"""Ids that were not taken for a session's, for people who ask why. Bounded; part of the journal."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Final

from gateway.values import IgnoredId, SessionKey

MAX_SESSIONS_KEPT: Final = 16


class IgnoredIdStory:
    """One id that was ignored, by the key that it would have been."""

    __slots__ = ("last_seen_s", "num_requests", "sessions")

    def __init__(self) -> None:
        self.num_requests: Counter[str] = Counter()  # by reason
        self.sessions: deque[SessionKey] = deque(maxlen=MAX_SESSIONS_KEPT)  # the newest last
        self.last_seen_s = 0.0


class IgnoredIds:
    """The ids ignored last."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._stories: OrderedDict[SessionKey, IgnoredIdStory] = OrderedDict()

    def note(self, ignored: IgnoredId, session: SessionKey | None, now_s: float) -> None:
        """Take in one request. `session` is the key that it was given instead. Changes the memory."""
        story = self._stories.get(ignored.key)
        if story is None:
            story = self._stories[ignored.key] = IgnoredIdStory()
            if len(self._stories) > self._max_ids:
                self._stories.popitem(last=False)
        story.num_requests[ignored.reason] += 1
        story.last_seen_s = now_s
        if session is not None and session not in story.sessions:
            story.sessions.append(session)

    def story(self, key: SessionKey) -> IgnoredIdStory | None:
        return self._stories.get(key)
