"""Backends that sent `Retry-After`: how the header is parsed and until when it holds.

Pure: the caller passes the time. A backend that is cooling down gets no new sessions while another can take
them. Its own sessions still go there, because their cache is there, and their clients get its `Retry-After`
if it refuses.
"""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime

from gateway.values import BackendId

MAX_RETRY_AFTER_S = 365 * 86_400.0
"""Longer requests are cut to this."""


def parse_retry_after(value: bytes, now_wall_s: float) -> float | None:
    """Return the seconds that a `Retry-After` header asks for (RFC 9110, 10.2.3), None if malformed."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - now_wall_s
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


class Cooldowns:
    """Until when each backend cools down. At most one entry per backend."""

    def __init__(self, max_cooldown_s: float) -> None:
        self.max_cooldown_s = max_cooldown_s
        self._until_s: dict[BackendId, float] = {}

    def note(self, backend_id: BackendId, seconds: float, now_s: float) -> None:
        """Note what a backend asked for; a later answer replaces an earlier one."""
        self._until_s[backend_id] = now_s + min(seconds, self.max_cooldown_s)

    def cooling(self, now_s: float) -> list[BackendId]:
        """Return the backends cooling down now, and forget the others. Costs one test when there are none."""
        if not self._until_s:
            return []
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        return list(self._until_s)
