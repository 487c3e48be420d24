"""Options of the session store.

Invariant: contradictory settings cannot be built; the error names the option.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.redis_link.settings import RedisSettings, require_positive


class SessionsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How bindings of sessions to backends are stored."""

    store: Literal["memory", "redis"] = "memory"
    """`memory`: in this process. `redis`: shared; required for more than one worker or replica."""

    ttl_s: float = 3600.0
    """A session that is unused for this long is forgotten."""

    objects_ttl_s: float = 2_592_000.0
    """For this long after its last use it is known which backend made a file, an upload, a batch or a
    conversation, and for which tenant. Responses count as sessions."""

    max_objects: int = 200_000
    """Memory store only: beyond this many of these objects, the least recently used is forgotten."""

    max_sessions: int = 1_000_000
    """Memory store only: beyond this many, the least recently used is forgotten. About 350 bytes each."""

    redis: RedisSettings = RedisSettings()

    def __post_init__(self) -> None:
        require_positive(ttl_s=self.ttl_s, max_sessions=self.max_sessions)
        require_positive(objects_ttl_s=self.objects_ttl_s, max_objects=self.max_objects)
