"""Options of the fleet's shell: how engines are asked about themselves."""

from __future__ import annotations

import msgspec


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scrapes and drains."""

    scrape_interval_s: float = 2.0
    """Time between reads of a backend's metrics (load, cache size, start time)."""
    scrape_limit_bytes: int = 8 * 1024 * 1024
    drain_deadline_s: float = 600.0
    """Default time after which a drained backend's remaining bindings are dropped."""

    def __post_init__(self) -> None:
        if self.scrape_interval_s <= 0 or self.drain_deadline_s < 0:
            raise ValueError("scrape_interval_s must be above 0 and drain_deadline_s at least 0")
