"""Whether and how requests are traced, and the two hooks that a traced request has on its way.

OpenTelemetry is an extra: nothing of it is imported unless `tracing.is_enabled`, and a request that is not
traced costs one test of an attribute. What spans look like is decided in `spans`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from gateway.errors import GatewayError

if TYPE_CHECKING:
    from gateway.request.turn import Turn
    from gateway.values import Api, Backend

RawHeaders = Sequence[tuple[bytes, bytes]]


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenTelemetry traces, sent by OTLP over HTTP. Options that are null are taken from OTEL_* variables."""

    is_enabled: bool = False
    """Send traces. Needs `pip install homing[otel]`."""
    endpoint: str | None = None
    """Full URL of the collector, such as `http://collector:4318/v1/traces`."""
    sample_ratio: float | None = None
    """Share of traces to keep if the client made no sampling decision. A client's decision is followed."""
    service_name: str | None = None
    """`service.name` of the spans. Default: OTEL_SERVICE_NAME, or else `homing`."""

    def __post_init__(self) -> None:
        if self.sample_ratio is not None and not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio must be 0..1, got {self.sample_ratio}")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must be an http or https URL, got {self.endpoint!r}")


class RequestTrace(Protocol):
    """The spans of one request. Never raises; `finish` exactly once."""

    trace_id: str | None
    """As 32 hex digits, where the trace is kept; it may be looked up."""

    def begin_attempt(self, backend: Backend | None, raw_headers: RawHeaders) -> RawHeaders:
        """Begin the span of one attempt. Returns the headers with this span as parent, not the client's."""
        ...

    def fail_attempt(self, error: GatewayError) -> None:
        """End the span of the attempt under way, which another may follow."""
        ...

    def finish(self, turn: Turn) -> None:
        """End all spans with what became of the request."""
        ...


class Tracing(Protocol):
    """Makes the traces of one gateway."""

    def begin(self, api: Api, method: str, path: str, raw_headers: RawHeaders) -> RequestTrace:
        """Begin the span of a request, as a child of the client's where it sent one (W3C Trace Context)."""
        ...

    def close(self) -> None:
        """Send what is left. Blocks, for seconds when nobody takes it."""
        ...


def open_tracing(settings: TracingSettings) -> Tracing | None:
    """None when it is off. Raises ValueError when it is on and the packages are missing."""
    if not settings.is_enabled:
        return None
    try:
        spans = importlib.import_module("gateway.request.otel_spans")
    except ImportError as error:
        raise ValueError(f"tracing.is_enabled needs `pip install homing[otel]` ({error})") from error
    return cast("Tracing", spans.SpanTracing(spans.make_provider(settings)))
