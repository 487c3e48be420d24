"""All metrics of one gateway process, in one class, on its own registry.

Prometheus conventions: base units, `_total` for counters, bounded labels only (backend names, enums, status
codes; never a session, prompt, path or model that a client made up). What changes per request is counted
as it happens through cached children (a `labels()` call costs four times the increment); what is a state
(in-flight, bindings, backend states) is read when Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)
OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)

StateSource = Callable[[], Iterable[Metric]]


class GatewayMetrics:
    """Counters and histograms of the request path, and the text that Prometheus reads."""

    def __init__(self) -> None:
        # `_created` series double the page to say when each counter was made
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it untyped
        self.registry = CollectorRegistry()
        self._children: dict[tuple[object, ...], Any] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        self.requests = counter("homing_requests", "Client requests by API and status", "api", "status")
        self.errors = counter("homing_errors", "Requests that ended in an error", "source", "code")
        self.affinity = counter(
            "homing_affinity", "What became of a request's affinity", "affinity", "key_source"
        )
        self.moves = counter("homing_session_moves", "Sessions that changed their home", "reason")
        self.retries = counter("homing_retries", "Attempts moved to another backend", "code")
        self.upstream_errors = counter(
            "homing_upstream_errors", "Failed attempts by backend", "backend", "code"
        )
        self.client_gone = counter("homing_client_disconnects", "Requests whose client left early", "api")
        self.prompt_tokens = counter("homing_prompt_tokens", "Prompt tokens reported by engines", "backend")
        self.cached_tokens = counter(
            "homing_cached_tokens", "Prompt tokens that engines found in their cache", "backend"
        )
        self.expected_tokens = counter(
            "homing_expected_cached_tokens", "Prompt tokens routing expected to be cached", "backend"
        )
        self.completion_tokens = counter(
            "homing_completion_tokens", "Tokens generated, as engines report", "backend"
        )
        self.usage_unknown = counter(
            "homing_usage_unknown", "Answers without usage or without cached tokens", "what"
        )
        self.time_to_first_token = histogram(
            "homing_time_to_first_token_seconds",
            "From request received to first token, by turn",
            TTFT_BUCKETS_S,
            "turn",
        )
        self.duration = histogram(
            "homing_request_duration_seconds", "Whole request", DURATION_BUCKETS_S, "api"
        )
        self.overhead = histogram(
            "homing_gateway_overhead_seconds",
            "From request read to first byte sent upstream, the gateway's own part",
            OVERHEAD_BUCKETS_S,
        )

    def child(self, metric: Counter | Histogram, *labels: str) -> Any:
        """The series for these label values, made once."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels) if labels else metric
        return child

    def count(self, metric: Counter, *labels: str, by: float = 1.0) -> None:
        self.child(metric, *labels).inc(by)

    def observe(self, metric: Histogram, value: float, *labels: str) -> None:
        self.child(metric, *labels).observe(value)

    def value(self, metric: Counter, *labels: str) -> float:
        """What one counter says now; 0 for a series that was never counted."""
        child = self._children.get((metric, *labels))
        return float(child._value.get()) if child is not None else 0.0

    def totals(self, metric: Counter) -> dict[str, float]:
        """Sums of a counter over its first label."""
        sums: dict[str, float] = {}
        for key, child in self._children.items():
            if key[0] is metric:
                sums[str(key[1])] = sums.get(str(key[1]), 0.0) + child._value.get()
        return sums

    def add_state(self, source: StateSource) -> None:
        """Read these gauges from their owner at each scrape."""
        self.registry.register(_StateCollector(source))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _StateCollector(Collector):
    """Adapts a function to prometheus_client's collector protocol."""

    def __init__(self, source: StateSource) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return ()  # do not collect at registration: parts of the gateway may not be up yet

    def collect(self) -> Iterable[Metric]:
        return self._source()


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def state_counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)
