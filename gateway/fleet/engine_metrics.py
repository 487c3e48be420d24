"""Health path and metric names of each engine, and a small parser for their metrics.

Engines expose hundreds of series; the gateway needs seven numbers. So the parser makes one pass, reads only
lines that begin with a wanted name, and sums each series over its labels (an engine may report per model or
per data-parallel rank). It never raises: a number that cannot be parsed is absent, and absent never means 0.

Names: vLLM v1 (`vllm/v1/metrics/loggers.py`), SGLang (`srt/metrics/collector.py`), llama.cpp server,
TensorRT-LLM as the Gateway API inference extension reads it. Our own worker uses vLLM's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDialect:
    """Paths and metric names of one engine. An empty name: the engine does not report it."""

    health_path: str = "/health"
    metrics_path: str = "/metrics"
    sleep_path: str = ""  # answers with `is_sleeping`, where it is served
    running: str = ""
    waiting: str = ""
    kv_usage: str = ""  # share of the KV cache in use, 0..1
    prefix_queries: str = ""  # tokens looked up, counter
    prefix_hits: str = ""  # tokens found, counter
    capacity_tokens: str = ""  # gauge in tokens
    sleep_state: str = ""  # a series per `sleep_state`, 1 for the present one; `awake` is one of them
    cache_config: str = ""  # info metric with labels block_size, num_gpu_blocks, kv_cache_size_tokens


_VLLM = EngineDialect(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    kv_usage="vllm:kv_cache_usage_perc",
    prefix_queries="vllm:prefix_cache_queries_total",
    prefix_hits="vllm:prefix_cache_hits_total",
    cache_config="vllm:cache_config_info",
    sleep_path="/is_sleeping",
    sleep_state="vllm:engine_sleep_state",
)

DIALECTS: Mapping[str, EngineDialect] = {  # one for each of `settings.ENGINES`
    "torch": _VLLM,
    "vllm": _VLLM,
    "sglang": EngineDialect(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_usage="sglang:token_usage",
        prefix_queries="sglang:prompt_tokens_total",
        prefix_hits="sglang:cached_tokens_total",
        capacity_tokens="sglang:max_total_num_tokens",
    ),
    "llamacpp": EngineDialect(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        prefix_queries="llamacpp:prompt_tokens_total",
        prefix_hits="llamacpp:prompt_tokens_cached_total",
    ),
    "trtllm": EngineDialect(
        metrics_path="/prometheus/metrics",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        kv_usage="trtllm_kv_cache_utilization",
    ),
    "openai": EngineDialect(health_path="/v1/models", metrics_path=""),
}

_WORKER_BLOCKS = "homing_worker_kv_blocks"
_RANK = re.compile(r'[{,](?:engine|dp_rank)="([0-9]{1,6})"')
_LABEL = re.compile(r'\b([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """The result of one scrape. None: the engine does not report it (never 0 by default)."""

    start_time_s: float | None = None  # wall clock; a change means a new process, so a cold cache
    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    kv_capacity_tokens: int | None = None
    kv_block_tokens: int | None = None  # prompts are cached in whole blocks of this size
    is_asleep: bool | None = None  # None: not told
    blocks: Mapping[str, int] | None = None  # state → count, from workers that report it


def parse_metrics(text: str, dialect: EngineDialect, rank: int | None = None) -> EngineReport:
    """Read one Prometheus text exposition. O(lines); unknown lines are skipped.

    `rank`: of several, only the series of this one count, and those that name none.
    """
    wanted = {
        name: field
        for field, name in (
            ("num_running", dialect.running),
            ("num_waiting", dialect.waiting),
            ("kv_usage", dialect.kv_usage),
            ("prefix_queries", dialect.prefix_queries),
            ("prefix_hits", dialect.prefix_hits),
            ("capacity", dialect.capacity_tokens),
            ("start_time_s", "process_start_time_seconds"),
        )
        if name
    }
    sums: dict[str, float] = {}
    blocks: dict[str, int] = {}
    capacity: int | None = None
    block_tokens: int | None = None
    is_asleep: bool | None = None
    for line in text.splitlines():
        name = line[: _name_end(line)]
        if rank is not None and (found := _RANK.search(line)) and int(found[1]) != rank:
            continue
        if name in wanted:
            value = _value(line)
            if value is not None:
                sums[wanted[name]] = sums.get(wanted[name], 0.0) + value
        elif name == dialect.cache_config and name:
            labels = dict(_LABEL.findall(line))
            capacity = (capacity or 0) + _capacity_of(labels) or capacity
            block_tokens = max(block_tokens or 0, _count(labels, "block_size")) or None
        elif name == dialect.sleep_state and name:
            if dict(_LABEL.findall(line)).get("sleep_state") == "awake":
                # of several ranks one that sleeps is enough: each request needs all
                is_asleep = bool(is_asleep) or _value(line) == 0.0
        elif name == _WORKER_BLOCKS:
            value = _value(line)
            state = dict(_LABEL.findall(line)).get("state")
            if value is not None and state:
                blocks[state] = blocks.get(state, 0) + int(value)
    if "capacity" in sums:
        capacity = int(sums["capacity"])
    sums.pop("capacity", None)
    return EngineReport(
        kv_capacity_tokens=capacity or None,
        kv_block_tokens=block_tokens,
        is_asleep=is_asleep,
        blocks=blocks or None,
        **sums,
    )


def _name_end(line: str) -> int:
    brace, space = line.find("{"), line.find(" ")
    if brace < 0:
        return max(space, 0)
    return brace if space < 0 or brace < space else space


def _value(line: str) -> float | None:
    rest = line[line.rfind("}") + 1 :] if "{" in line else line[_name_end(line) :]
    fields = rest.split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return value if value == value and abs(value) != float("inf") else None


def _capacity_of(labels: Mapping[str, str]) -> int:
    """Return the tokens that fit, or 0 if they are not told.

    Blocks times their size is too much for models with several kinds of layers, whose blocks are shared out
    among the kinds. So an engine that tells the tokens themselves is believed.
    """
    told = _count(labels, "kv_cache_size_tokens")
    return told or _count(labels, "block_size") * _count(labels, "num_gpu_blocks")


def _count(labels: Mapping[str, str], name: str) -> int:
    try:
        return max(0, int(labels[name]))
    except (KeyError, ValueError):
        return 0
