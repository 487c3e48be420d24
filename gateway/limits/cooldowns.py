"""Backends that asked to be left alone for a while: what a `Retry-After` says and until when it holds.

Pure: time comes in. A backend that rests gets no new sessions while another can take them; its own sessions
still come, because their history lies there, and their clients are told its `Retry-After` if it refuses.
"""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime

from gateway.values import BackendId

MAX_RETRY_AFTER_S = 365 * 86_400.0
"""What asks for more asks for ever."""


def parse_retry_after(value: bytes, now_wall_s: float) -> float | None:
    """Return the seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3), None for nonsense."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - now_wall_s
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


class Cooldowns:
    """Until when each backend rests. At most one entry per backend that ever asked for it."""

    def __init__(self, max_cooldown_s: float) -> None:
        self.max_cooldown_s = max_cooldown_s
        self._until_s: dict[BackendId, float] = {}

    def note(self, backend_id: BackendId, seconds: float, now_s: float) -> None:
        """Take in what a backend asked for; a later answer replaces an earlier one."""
        self._until_s[backend_id] = now_s + min(seconds, self.max_cooldown_s)

    def cooling(self, now_s: float) -> list[BackendId]:
        """Return who rests now, and forget who no longer does. Costs one test when nobody does."""
        if not self._until_s:
            return []
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        return list(self._until_s)
