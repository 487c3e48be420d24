"""The engine's gauges and counters at one moment, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.engine.kv.tiers.tier_config import TierStats
from engine_adapter.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Block gauges are exclusive: free + cached + used + pinned = total."""

    num_blocks_free: int
    num_blocks_cached: int  # reclaimable: has content, but no holder
    num_blocks_used: int  # held by running sequences
    num_blocks_pinned: int
    num_blocks_total: int
    block_size: int
    bytes_per_token: int
    num_running: int
    num_waiting: int
    num_queried_tokens: int  # prompt tokens of admitted requests
    num_hit_tokens: int  # of these, found in the cache
    num_preemptions: int
    num_evictions: int
    num_collisions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_pins: int
    num_integrity_failures: int  # idle checks that found a block unaccounted for; above 0 means a bug
    tiers: dict[str, TierStats] = field(default_factory=dict)  # of the configured tiers

    @property
    def kv_usage(self) -> float:
        """Share of blocks that cannot be reclaimed now (used or pinned)."""
        return (self.num_blocks_used + self.num_blocks_pinned) / self.num_blocks_total


def collect_stats(
    scheduler: Scheduler,
    *,
    num_prompt_tokens: int,
    num_generated_tokens: int,
    bytes_per_token: int,
    num_pins: int,
    num_integrity_failures: int,
    tiers: dict[str, TierStats],
) -> EngineStats:
    """Read the gauges. Changes nothing."""
    blocks = scheduler.blocks
    counts = blocks.pool.counts()
    return EngineStats(
        num_blocks_free=counts.free,
        num_blocks_cached=counts.cached,
        num_blocks_used=counts.used,
        num_blocks_pinned=counts.pinned,
        num_blocks_total=counts.total,
        block_size=blocks.block_size,
        bytes_per_token=bytes_per_token,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_queried_tokens=blocks.num_queried_tokens,
        num_hit_tokens=blocks.num_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_evictions=blocks.eviction_log.num_evictions,
        num_collisions=blocks.prefix_cache.num_collisions,
        num_prompt_tokens=num_prompt_tokens,
        num_generated_tokens=num_generated_tokens,
        num_pins=num_pins,
        num_integrity_failures=num_integrity_failures,
        tiers=tiers,
    )
