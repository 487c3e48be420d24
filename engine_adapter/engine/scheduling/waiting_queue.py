"""Decides which waiting request is served next: by priority, then by tenant, then by arrival.

Fairness between tenants follows the virtual token counter (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024): each tenant has a counter of the tokens computed for it, and the tenant with the
smallest counter goes first. A tenant that returns after a pause starts at the smallest counter of the waiting
tenants, so idle time earns no credit. With one tenant the order is first come, first served.

A preempted sequence keeps its arrival order, so it goes before younger ones of its tenant. Priorities are
strict: a steady stream of high-priority requests starves lower ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.engine.kv.sequence import Sequence


class WaitingQueue:
    """Waiting sequences, in service order. O(n log n) to iterate; the queue is bounded and short."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._served_tokens: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._by_id.values(), key=self._service_key))

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.cache_salt
        if tenant not in self._num_waiting:
            active = [self._served_tokens.get(other, 0.0) for other in self._num_waiting]
            floor = min(active, default=0.0)
            self._served_tokens[tenant] = max(self._served_tokens.get(tenant, 0.0), floor)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        self._by_id[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._by_id[sequence.request_id]
        tenant = sequence.request.cache_salt
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
        if not self._by_id:
            self._served_tokens.clear()  # fairness only concerns requests that wait at the same time

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens computed for a tenant; has an effect only while requests wait."""
        if self._by_id:
            self._served_tokens[tenant] = self._served_tokens.get(tenant, 0.0) + num_tokens

    def _service_key(self, sequence: Sequence) -> tuple[int, float, int]:
        request = sequence.request
        return (request.priority, self._served_tokens.get(request.cache_salt, 0.0), sequence.arrival_order)
