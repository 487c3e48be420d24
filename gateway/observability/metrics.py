"""All metrics of the gateway, in one class. `METRICS.md` lists them with their meaning.

Prometheus conventions: base units, `_total` for counters, and only bounded labels (backend names, enums,
status codes; never a session, prompt, path or model chosen by a client). What changes per request is counted
as it happens, directly in the dicts here (see `series`). State (requests in flight, bindings, backend states)
is read from its owner when a page is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from prometheus_client import ProcessCollector

from gateway.observability.exposition import content_type_for, render
from gateway.observability.series import Counter, Gauge, Histogram, Labels, Series
from gateway.observability.worker_reports import WorkerReports

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
QUEUE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)

StateSource = Callable[[], Iterable[Series[Any]]]

_STATUS_LABELS = {status: str(status) for status in range(100, 600)}


def status_label(status: int) -> str:
    """Return a bounded label: a backend may send any three digits."""
    return _STATUS_LABELS.get(status, "other")


class GatewayMetrics:
    """Counters and histograms of the request path, and the page for Prometheus."""

    def __init__(self, worker_reports: WorkerReports | None = None) -> None:
        self._worker_reports = worker_reports
        self.requests = Counter("homing_requests", "Client requests", "api", "status", "outcome")
        self.errors = Counter("homing_errors", "Requests that ended in an error", "source", "code")
        self.affinity = Counter(
            "homing_affinity", "Requests by placement and source of the key", "affinity", "key_source"
        )
        self.moves = Counter("homing_session_moves", "Sessions that moved to another home", "reason")
        self.retries = Counter("homing_retries", "Failed attempts retried on another backend", "code")
        self.upstream_errors = Counter(
            "homing_upstream_errors", "Failed attempts by backend", "backend", "code"
        )
        self.client_gone = Counter(
            "homing_client_disconnects", "Requests whose client disconnected early", "api"
        )
        self._add_token_counters()
        self._add_histograms()
        self._counted = [series for series in vars(self).values() if isinstance(series, Series)]
        self._states: list[StateSource] = [_process_metrics]
        self._backend_ids: Collection[str] = ()

    def _add_token_counters(self) -> None:
        self.prompt_tokens = Counter("homing_prompt_tokens", "Prompt tokens reported by engines", "backend")
        self.cached_tokens = Counter(
            "homing_cached_tokens", "Prompt tokens that engines found in their cache", "backend"
        )
        self.expected_tokens = Counter(
            "homing_expected_cached_tokens", "Prompt tokens that routing expected to be cached", "backend"
        )
        self.recomputed_tokens = Counter(
            "homing_recomputed_tokens",
            "Prompt tokens computed again although a backend had cached them",
            "backend",
            "cause",
        )
        self.completion_tokens = Counter(
            "homing_completion_tokens", "Generated tokens reported by engines", "backend"
        )
        self.turn_prompt_tokens = Counter(
            "homing_turn_prompt_tokens", "Prompt tokens reported by engines, by turn of the session", "turn"
        )
        self.turn_cached_tokens = Counter(
            "homing_turn_cached_tokens", "Prompt tokens found in a cache, by turn of the session", "turn"
        )
        self.usage_unknown = Counter(
            "homing_usage_unknown", "Answers without usage or without cached tokens", "what"
        )

    def _add_histograms(self) -> None:
        self.time_to_first_token = Histogram(
            "homing_time_to_first_token_seconds",
            "Time from receiving a request to its first token, by turn of the session",
            "turn",
            bounds=TTFT_BUCKETS_S,
        )
        self.inter_token = Histogram(
            "homing_inter_token_seconds",
            "Mean time between the tokens of one streamed answer",
            bounds=INTER_TOKEN_BUCKETS_S,
        )
        self.queue_wait = Histogram(
            "homing_queue_wait_seconds",
            "How long requests waited in the queue, refused ones included",
            bounds=QUEUE_BUCKETS_S,
        )
        self.duration = Histogram(
            "homing_request_duration_seconds", "Duration of requests", "api", bounds=DURATION_BUCKETS_S
        )
        self.overhead = Histogram(
            "homing_gateway_overhead_seconds",
            "Time from receiving a request to the first byte sent upstream, without waiting in the queue",
            bounds=OVERHEAD_BUCKETS_S,
        )

    def value(self, metric: Counter, labels: Labels = ()) -> float:
        """Return a counter's value over all processes; 0 for a series that was never counted."""
        return metric[labels] + self.elsewhere(metric.name, labels)

    def elsewhere(self, name: str, labels: Labels = ()) -> float:
        """Return the sum of one series over the other processes of this machine."""
        if self._worker_reports is None:
            return 0.0
        return float(sum(cells.get(labels, 0.0) for cells in self._worker_reports.elsewhere(name)))

    def totals(self, metric: Counter, position: int = 0) -> dict[str, float]:
        """Return a counter's sums by one label, over all processes."""
        others = [] if self._worker_reports is None else self._worker_reports.elsewhere(metric.name)
        return metric.merged(others).by_label(position)

    def add_state(self, source: StateSource) -> None:
        """Call `source` for each page and add its series."""
        self._states.append(source)

    def keep_backends(self, backend_ids: Collection[str]) -> None:
        """Drop the series of backends that have left: fleets that scale produce ever new names."""
        if backend_ids != self._backend_ids:
            self._backend_ids = set(backend_ids)
            for family in self._counted:
                family.keep_backends(self._backend_ids)

    def own_families(self) -> list[Series[Any]]:
        """Return the current metrics of this process. O(series); no network I/O."""
        return [*self._counted, *(family for source in self._states for family in source())]

    def families(self) -> list[Series[Any]]:
        """Return the metrics of all processes of this machine."""
        own = self.own_families()
        if self._worker_reports is None:
            return own
        whole = self._worker_reports.add_up(own)
        for family in whole:
            family.keep_backends(self._backend_ids)
        return whole

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Render the page in the format that the scraper accepts. Returns the page and its content type."""
        content_type = content_type_for(accept)
        return render(self.families(), content_type), content_type


_PROCESS = ProcessCollector(registry=None)  # created once, because its construction reads the boot time


def _process_metrics() -> Iterable[Series[Any]]:
    """The standard `process_…` metrics: memory, CPU, descriptors."""
    for metric in _PROCESS.collect():
        family: Series[float] = (
            Counter(metric.name, metric.documentation)
            if metric.type == "counter"
            else Gauge(
                metric.name,
                metric.documentation,
                is_summed=not metric.name.endswith(("max_fds", "start_time_seconds")),
            )
        )
        family[()] = metric.samples[0].value
        yield family
