"""The writer's queue is bounded, head first and never blocks the engine; the planner's arithmetic."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from engine.tier_chains import BLOCK_BYTES, Rows, chain_of, disk_tier, read_one

from engine_adapter.engine.kv.tiers.disk_tier import DiskTier
from engine_adapter.engine.kv.tiers.disk_writer import DiskWriter
from engine_adapter.engine.kv.tiers.load_planner import MIN_PREFILL_TOKENS, RETRY_AFTER, LoadPlanner
from engine_adapter.engine.kv.tiers.tier_block import Tier, TierBlock


class StuckTier:
    """A disk that answers only when released."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        self.may_write = threading.Event()
        self.find, self.clear, self.close = tier.find, tier.clear, tier.close

    def append(self, block: TierBlock, row: Rows) -> bool:
        assert self.may_write.wait(30)
        return self.tier.append(block, row)


def test_a_slow_disk_drops_the_tail_and_keeps_the_head(tmp_path: Path) -> None:
    """A full queue refuses what follows, and what follows that; when it has emptied, the chain goes on."""
    stuck = StuckTier(disk_tier(tmp_path))
    writer = DiskWriter(stuck, max_queued_bytes=5 * BLOCK_BYTES)  # type: ignore[arg-type]  # a fake
    chain, rows = chain_of(1, 8)
    assert writer.offer(chain, rows) == 5
    assert writer.num_dropped == 3
    assert not writer.has_room
    assert writer.offer(chain[6:], rows[6:]) == 0  # its parent was dropped
    assert all(writer.knows(block.block_hash) for block in chain[:5])
    stuck.may_write.set()
    assert writer.flush(30)
    assert writer.offer(chain[6:], rows[6:]) == 0
    assert writer.offer(chain, rows) == 8
    assert writer.flush(30)
    assert writer.num_written == 8
    assert [read_one(stuck.tier, block) for block in chain] == [row.tobytes() for row in rows]
    writer.close()


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    """An orderly end loses nothing."""
    writer = DiskWriter(disk_tier(tmp_path))
    chain, rows = chain_of(1, 200)
    assert writer.offer(chain, rows) == 200
    writer.close()
    writer.close()
    tier = disk_tier(tmp_path)
    assert len(tier) == 200
    tier.close()


def test_a_stuck_disk_does_not_keep_the_worker_from_ending(tmp_path: Path) -> None:
    """Closing stops waiting after its limit and unlocks the folder."""
    stuck = StuckTier(disk_tier(tmp_path))
    writer = DiskWriter(stuck)  # type: ignore[arg-type]  # a fake
    writer.offer(*chain_of(1, 3))
    writer.close(timeout_s=0.01)
    stuck.may_write.set()
    disk_tier(tmp_path).close()


def test_clearing_drops_what_is_queued(tmp_path: Path) -> None:
    """Neither queued nor written blocks are left, whatever the writer was doing."""
    tier = disk_tier(tmp_path)
    writer = DiskWriter(tier)
    for seed in range(20):
        writer.offer(*chain_of(seed, 50))
        writer.clear()
        assert len(tier) == 0
    assert writer.offer(*chain_of(1, 3)) == 3
    writer.close()


def test_what_was_not_measured_is_tried() -> None:
    """A planner that knows nothing loads, so that it learns."""
    planner = LoadPlanner()
    assert planner.pays(100, {Tier.DISK: 10**12})
    planner.observe_prefill(1000, 1.0)
    assert planner.pays(100, {Tier.DISK: 10**12})


@pytest.mark.parametrize(
    ("read_bytes_per_s", "pays"), [(10_000.0, True), (1001.0, True), (999.0, False), (10.0, False)]
)
def test_the_quicker_way_is_taken(read_bytes_per_s: float, pays: bool) -> None:
    """100 tokens take 1 s to compute here; 1,000 bytes are loaded if that is quicker."""
    planner = LoadPlanner()
    planner.observe_prefill(100, 1.0)
    planner.observe_read(Tier.DISK, int(read_bytes_per_s * 10), 10.0)
    assert planner.pays(100, {Tier.DISK: 1000}) is pays
    assert planner.pays(100, {Tier.HOST: 1000})


def test_a_tier_that_was_too_slow_is_tried_again() -> None:
    """Every so many refusals one load goes through, and a better measurement opens the tier."""
    planner = LoadPlanner()
    planner.observe_prefill(100, 1.0)
    planner.observe_read(Tier.DISK, 10, 1.0)
    answers = [planner.pays(100, {Tier.DISK: 1000}) for _ in range(2 * RETRY_AFTER)]
    assert answers.count(True) == 2
    for _ in range(20):
        planner.observe_read(Tier.DISK, 10_000_000, 1.0)
    assert planner.pays(100, {Tier.DISK: 1000})


def test_a_tier_that_did_not_answer_counts_as_slow_at_once() -> None:
    """One timeout outweighs a good average: the next requests do not wait for it too."""
    planner = LoadPlanner()
    planner.observe_prefill(100, 1.0)
    planner.observe_read(Tier.DISK, 10**9, 1.0)
    assert planner.pays(100, {Tier.DISK: 1000})
    planner.observe_timeout(Tier.DISK, 1000, 10.0)
    assert not planner.pays(100, {Tier.DISK: 1000})


def test_small_steps_and_empty_reads_say_nothing() -> None:
    """A step of a few tokens measures its fixed cost, and nothing read measures nothing."""
    planner = LoadPlanner()
    planner.observe_prefill(MIN_PREFILL_TOKENS - 1, 1.0)
    planner.observe_prefill(1000, 0.0)
    planner.observe_read(Tier.DISK, 0, 1.0)
    assert planner.prefill_tokens_per_s is None
    assert planner.read_bytes_per_s == {}
