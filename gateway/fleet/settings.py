"""Options of the fleet's shell: how engines are asked about themselves."""

from __future__ import annotations

import msgspec

from gateway.fleet.discovery_settings import DiscoverySettings


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scrapes and drains."""

    scrape_limit_bytes: int = 8 * 1024 * 1024
    """Most bytes of a metrics page or model list that are read of a backend."""
    drain_deadline_s: float = 600.0
    """Default time after which a drained backend's remaining bindings are dropped."""
    prewarm_sessions: int = 0
    """How many of a drained backend's largest sessions are computed at their new homes before they come back.
    0 is off. While it is on, the last request of recent sessions is kept in memory."""
    prewarm_memory_bytes: int = 64 * 1024 * 1024
    """Most memory for those requests; the longest unused go first."""
    prewarm_per_s: float = 2.0
    """Replays per second: they compete with live requests at the new homes."""
    discovery: DiscoverySettings = DiscoverySettings()
    """Sources of backends that come and go by themselves, beside the list `backends`."""

    def __post_init__(self) -> None:
        if self.drain_deadline_s < 0:
            raise ValueError("drain_deadline_s must be at least 0")
        if min(self.prewarm_sessions, self.prewarm_memory_bytes) < 0 or self.prewarm_per_s <= 0:
            raise ValueError("prewarm options must not be negative, and prewarm_per_s above 0")
