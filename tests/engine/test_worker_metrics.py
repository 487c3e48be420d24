"""The Prometheus page: one snapshot per scrape, vLLM's names, the process's own start."""

from __future__ import annotations

import time
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.engine.core.stats import EngineStats
from engine_adapter.engine.kv.tiers.tier_config import TierStats
from engine_adapter.server.metrics import WorkerMetrics, process_start_wall_s

STATS = EngineStats(
    num_blocks_free=5,
    num_blocks_cached=3,
    num_blocks_used=2,
    num_blocks_pinned=1,
    num_blocks_total=11,
    block_size=16,
    bytes_per_token=10,
    num_running=2,
    num_waiting=4,
    num_queried_tokens=100,
    num_hit_tokens=60,
    num_preemptions=7,
    num_evictions=8,
    num_collisions=0,
    num_prompt_tokens=120,
    num_generated_tokens=30,
    num_pins=1,
    num_integrity_failures=0,
)


def scrape(metrics: WorkerMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.page().decode())
    samples = [sample for family in families for sample in family.samples]
    return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples}


def test_each_scrape_reads_the_engine_once() -> None:
    """All engine gauges of one page come from one snapshot, so the block states add up."""
    reads: list[EngineStats] = []

    def read() -> EngineStats:
        reads.append(STATS)
        return STATS

    metrics = WorkerMetrics("tiny", read)
    reads.clear()
    values = scrape(metrics)
    assert len(reads) == 1
    states = [
        values[f"homing_worker_kv_blocks[('state', '{s}')]"] for s in ("free", "cached", "used", "pinned")
    ]
    assert states == [5, 3, 2, 1]
    assert sum(states) == STATS.num_blocks_total


def test_vllms_names_are_there() -> None:
    """What a dashboard or router made for vLLM reads."""
    values = scrape(WorkerMetrics("tiny", lambda: STATS))
    label = "[('model_name', 'tiny')]"
    assert values[f"vllm:num_requests_running{label}"] == 2
    assert values[f"vllm:num_requests_waiting{label}"] == 4
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 3 / 11
    assert values[f"vllm:prefix_cache_queries_total{label}"] == 100
    assert values[f"vllm:prefix_cache_hits_total{label}"] == 60
    assert values[f"vllm:num_preemptions_total{label}"] == 7
    assert values["vllm:cache_config_info[('block_size', '16'), ('num_gpu_blocks', '11')]"] == 1
    assert f"vllm:time_to_first_token_seconds_count{label}" in values


def test_each_tier_has_its_own_numbers() -> None:
    """A worker with a disk tier shows its sizes and counts under the tier's label; one without shows none."""
    disk = TierStats(
        num_blocks=7,
        num_bytes=700,
        max_bytes=1000,
        num_hit_tokens=48,
        num_loaded_bytes=300,
        num_stored_blocks=9,
        num_evicted_blocks=2,
        num_damaged_blocks=1,
        num_dropped_blocks=4,
        num_write_errors=3,
    )
    values = scrape(WorkerMetrics("tiny", lambda: replace(STATS, tiers={"disk": disk})))
    names = ("blocks", "bytes", "hit_tokens_total", "damaged_blocks_total", "dropped_blocks_total")
    assert [values[f"homing_worker_tier_{name}[('tier', 'disk')]"] for name in names] == [7, 700, 48, 1, 4]
    assert not any("tier" in name for name in scrape(WorkerMetrics("tiny", lambda: STATS)))


def test_the_start_time_is_this_process_s() -> None:
    """It is in the past, changes only with the process, and is on the page."""
    started_s = process_start_wall_s()
    assert 0 < time.time() - started_s < 24 * 3600
    assert abs(process_start_wall_s() - started_s) < 2
    assert scrape(WorkerMetrics("tiny", lambda: STATS))["process_start_time_seconds[]"] == started_s
