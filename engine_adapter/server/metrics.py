"""The worker's Prometheus page: vLLM's metric names where they fit, our own elsewhere.

Decides names, labels and buckets. The engine's gauges are read from one snapshot per scrape, so the block
gauges of one scrape add up (free + cached + used + pinned = total). Labels are bounded: the model name and
fixed words. It does not know the contents of requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_adapter.engine.core.stats import EngineStats
from engine_adapter.engine.kv.sequence import FinishReason
from engine_adapter.engine.kv.tiers.tier_config import TierStats

# vLLM's bucket bounds, so that its dashboards work here too.
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0),
)
TOKEN_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

FINISH_REASONS = tuple(reason.value for reason in FinishReason)


class WorkerMetrics:
    """Counters of one worker process, in their own registry."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, read_stats))
        self._model_name = model_name
        self.prompt_tokens_cached = Counter(
            "vllm:prompt_tokens_cached",
            "Prompt tokens of finished requests that were reused.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name=model_name)
        self.request_success = self._success_by_reason()
        self.time_to_first_token_s = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS_S
        )
        self.inter_token_latency_s = self._histogram(
            "inter_token_latency_seconds", "Time between two token deliveries.", TOKEN_BUCKETS_S
        )
        self.e2e_request_latency_s = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S
        )
        self.request_queue_time_s = self._histogram(
            "request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS_S
        )
        self.request_prefill_time_s = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS_S
        )
        self.request_decode_time_s = self._histogram(
            "request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS_S
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", TOKEN_COUNT_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", TOKEN_COUNT_BUCKETS
        )
        started = Gauge(
            "process_start_time_seconds", "Start of the process, seconds since 1970.", registry=self.registry
        )
        started.set(process_start_wall_s())

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)
        return metric.labels(model_name=self._model_name)

    def _success_by_reason(self) -> dict[str, Counter]:
        success = Counter(
            "vllm:request_success",
            "Finished requests by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        return {
            reason: success.labels(model_name=self._model_name, finished_reason=reason)
            for reason in FINISH_REASONS
        }

    def page(self) -> bytes:
        """The metrics in the text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads one snapshot of the engine per scrape."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        gauges = {
            "vllm:num_requests_running": ("Requests in the running batch.", stats.num_running),
            "vllm:num_requests_waiting": ("Requests waiting for the batch.", stats.num_waiting),
            "homing_worker_pins": ("Pinned prefixes.", stats.num_pins),
            "vllm:kv_cache_usage_perc": (
                "Share of KV blocks that are used or pinned, 0 to 1.",
                stats.kv_usage,
            ),
        }
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up.", stats.num_queried_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens found.", stats.num_hit_tokens),
            "vllm:num_preemptions": ("Sequences returned to the queue.", stats.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens received.", stats.num_prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", stats.num_generated_tokens),
            "homing_worker_evictions": ("Cached blocks evicted.", stats.num_evictions),
            "homing_worker_integrity_failures": (
                "Idle checks that found a block unaccounted for.",
                stats.num_integrity_failures,
            ),
            "homing_worker_hash_collisions": ("Equal hashes of different blocks.", stats.num_collisions),
        }
        for name, (help_text, value) in gauges.items():
            yield self._labelled(GaugeMetricFamily(name, help_text, labels=["model_name"]), value)
        for name, (help_text, value) in counters.items():
            yield self._labelled(CounterMetricFamily(name, help_text, labels=["model_name"]), value)
        yield self._blocks(stats)
        yield from _tier_families(stats)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the KV memory.", labels=["block_size", "num_gpu_blocks"]
        )
        config.add_metric([str(stats.block_size), str(stats.num_blocks_total)], 1)
        yield config

    def _labelled(self, family: Metric, value: float) -> Metric:
        family.add_metric([self._model_name], value)  # type: ignore[attr-defined]  # both families have it
        return family

    def _blocks(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "homing_worker_kv_blocks", "KV blocks by state; the states add up to the total.", labels=["state"]
        )
        family.add_metric(["free"], stats.num_blocks_free)
        family.add_metric(["cached"], stats.num_blocks_cached)
        family.add_metric(["used"], stats.num_blocks_used)
        family.add_metric(["pinned"], stats.num_blocks_pinned)
        return family


_TIER_GAUGES = {
    "blocks": ("KV blocks in the tier.", lambda tier: tier.num_blocks),
    "bytes": ("Bytes of KV in the tier.", lambda tier: tier.num_bytes),
    "capacity_bytes": ("Bytes the tier may use.", lambda tier: tier.max_bytes),
    "read_bytes_per_second": ("Measured rate of loads.", lambda tier: tier.read_bytes_per_s or 0),
}
_TIER_COUNTERS = {
    "hit_tokens": ("Prompt tokens loaded instead of computed.", lambda tier: tier.num_hit_tokens),
    "loaded_bytes": ("Bytes loaded into device blocks.", lambda tier: tier.num_loaded_bytes),
    "stored_blocks": ("Blocks stored.", lambda tier: tier.num_stored_blocks),
    "evicted_blocks": ("Blocks evicted for space.", lambda tier: tier.num_evicted_blocks),
    "damaged_blocks": ("Blocks whose bytes had changed.", lambda tier: tier.num_damaged_blocks),
    "dropped_blocks": ("Blocks not stored: the writer was behind.", lambda tier: tier.num_dropped_blocks),
    "write_errors": ("Writes that failed.", lambda tier: tier.num_write_errors),
}


def _tier_families(stats: EngineStats) -> Iterator[Metric]:
    """Yield one family per metric, labelled by tier; none if there are no tiers."""
    kinds: tuple[tuple[type[Metric], dict[str, tuple[str, Callable[[TierStats], float]]]], ...] = (
        (GaugeMetricFamily, _TIER_GAUGES),
        (CounterMetricFamily, _TIER_COUNTERS),
    )
    for kind, numbers in kinds if stats.tiers else ():
        for name, (help_text, read) in numbers.items():
            family = kind(f"homing_worker_tier_{name}", help_text, labels=["tier"])  # type: ignore[call-arg]  # both take it
            for tier, values in stats.tiers.items():
                family.add_metric([tier], read(values))  # type: ignore[attr-defined]  # both have it
            yield family


def process_start_wall_s() -> float:
    """Start time of this process: from Linux if available, else now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot_s = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()
    return boot_s + ticks / os.sysconf("SC_CLK_TCK")
