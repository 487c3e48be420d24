"""Settings of the tiers below the device, and their counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Both tiers are off by default. A worker on a CPU gains from the disk only."""

    host_bytes: int = 0  # memory for blocks that left the device; 0 is off
    disk_path: Path | None = None  # a folder that no other worker uses; None is off
    disk_bytes: int = 16 << 30  # space that it may use

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def is_enabled(self) -> bool:
        return self.host_bytes > 0 or self.disk_path is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Gauges and counters of one tier."""

    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_hit_tokens: int  # prompt tokens that were loaded instead of computed
    num_loaded_bytes: int
    num_stored_blocks: int
    num_evicted_blocks: int
    num_damaged_blocks: int  # failed their checksum: forgotten and recomputed
    num_dropped_blocks: int = 0  # not stored because the writer was behind or the disk failed
    num_write_errors: int = 0
    read_bytes_per_s: float | None = None  # from the tier into device blocks; None until measured
