"""A simulated engine: prefix cache, one prefill at a time, decode with many.

    prefill   fixed + a · (u + q · u · (c + u/2))     u tokens to compute behind c found in the cache
    decode    n · (d0 + d1 · running)

A request is admitted when there is a free slot and room in KV memory. The prompt is cached when its prefill
starts, the answer when it ends. The cache is the leaf-first LRU that the gateway's shadow assumes (tested
against a block-level LRU), but it is filled by what really ran, in the order in which it ran.

Limits: prefills are not interleaved in chunks, decode does not slow prefill, no offload and no transfer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Speed and size of an engine; the defaults are those of the traces study."""

    prefill_s_per_token: float = 1e-4
    attention_per_token: float = 1.9e-5
    prefill_fixed_s: float = 0.01
    decode_s: float = 0.015
    decode_s_per_running: float = 0.00012
    max_running: int = 256
    cache_tokens: int = 2_000_000

    def prefill_s(self, uncached: int, cached: int) -> float:
        return self.prefill_fixed_s + self.prefill_s_per_token * (
            uncached + self.attention_per_token * uncached * (cached + 0.5 * uncached)
        )

    def decode_of(self, tokens: int, running: int) -> float:
        return tokens * (self.decode_s + self.decode_s_per_running * running)


@dataclass(slots=True)
class Engine:
    """State of one engine. `life` grows when it dies: then its cache starts empty."""

    name: str
    slot: int
    is_alive: bool = True
    is_draining: bool = False
    since_s: float = 0.0
    life: int = 1
    queue: deque[int] = field(default_factory=deque)
    prefilling: int = -1
    running: int = 0
    kv_tokens: int = 0
    live: set[int] = field(default_factory=set)

    def die(self) -> list[int]:
        """Lose everything. Returns the requests that were here, by number. Changes the engine."""
        lost = sorted(self.live)
        self.live.clear()
        self.queue.clear()
        self.prefilling, self.running, self.kv_tokens = -1, 0, 0
        self.is_alive = False
        self.life += 1
        return lost
