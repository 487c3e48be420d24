"""The spans of a request: one of the server kind, and below it one of the client kind per attempt.

Names follow OpenTelemetry's conventions for HTTP and for generative AI (`gen_ai.…`, semantic conventions
1.40) where they have one; what only this gateway knows is `homing.…`. Never in a span: prompts, keys, raw
session ids, query strings. The trace of the client goes on through us: backends get our attempt as parent.

Imports OpenTelemetry; imported only when tracing is on. A kept trace costs about 0.1 ms of CPU.
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from gateway.errors import GatewayError, shown
from gateway.request.tracing import RawHeaders, TracingSettings
from gateway.request.turn import Turn
from gateway.values import Api, Backend

_CONTEXT_HEADERS: Final = (b"traceparent", b"tracestate")
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_OPERATIONS: Final = {
    Api.CHAT: "chat",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.GENERATE: "text_completion",
    Api.EMBEDDINGS: "embeddings",
}


def make_provider(settings: TracingSettings) -> TracerProvider:
    """The SDK's own provider, sending in batches from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    attributes = {SERVICE_VERSION: importlib.metadata.version("homing")}
    if settings.service_name is not None:
        attributes[SERVICE_NAME] = settings.service_name
    resource = Resource.create(attributes)  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "homing"}))
    sampler: Sampler | None = None  # OTEL_TRACES_SAMPLER decides
    if settings.sample_ratio is not None:
        sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
    return provider


class SpanTracing:
    """Makes spans with one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("homing")

    def begin(self, api: Api, method: str, path: str, raw_headers: RawHeaders) -> RequestSpans:
        parent = _PROPAGATOR.extract(_context_of(raw_headers), context=Context())
        span = self._tracer.start_span(
            f"{method} {api.value}",  # bounded, unlike paths with ids in them
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )
        return RequestSpans(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class RequestSpans:
    """One request's spans, under way."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._attempt: Span | None = None  # the one under way
        context = span.get_span_context()
        self.trace_id = format(context.trace_id, "032x") if context.trace_flags.sampled else None

    def begin_attempt(self, backend: Backend | None, raw_headers: RawHeaders) -> RawHeaders:
        attributes: dict[str, AttributeValue] = {}
        if backend is not None:
            attributes = {"homing.backend": backend.backend_id, "gen_ai.provider.name": backend.engine}
        attempt = self._tracer.start_span(
            "attempt",
            context=trace.set_span_in_context(self._span, Context()),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        self._attempt = attempt
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(attempt, Context()))
        kept = [header for header in raw_headers if header[0].lower() not in _CONTEXT_HEADERS]
        return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]

    def fail_attempt(self, error: GatewayError) -> None:
        self._end_attempt(None, error)

    def finish(self, turn: Turn) -> None:
        self._end_attempt(turn.outcome.status, turn.outcome.error)
        span = self._span
        if span.is_recording():
            span.set_attributes(_attributes_of(turn))
            _note_end(span, turn.outcome.status, turn.outcome.error)
        span.end()

    def _end_attempt(self, status: int | None, error: GatewayError | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            _note_end(attempt, status, error)
            attempt.end()


def _note_end(span: Span, status: int | None, error: GatewayError | None) -> None:
    if status:
        span.set_attribute("http.response.status_code", status)
    if error is not None:
        span.set_attribute("error.type", error.code)
    elif status is not None and status >= 500:
        span.set_attribute("error.type", str(status))
    # a client's own mistake is no error of the server's (OpenTelemetry, HTTP spans)
    if (error is not None and error.source != "downstream") or (status is not None and status >= 500):
        span.set_status(StatusCode.ERROR)


def _attributes_of(turn: Turn) -> dict[str, AttributeValue]:
    facts, decision, usage = turn.facts, turn.placement.decision, turn.outcome.usage
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(turn.api),
        "gen_ai.request.model": shown(facts.model) if facts.model is not None else None,
        "gen_ai.request.stream": facts.is_stream,
        "homing.request_id": turn.request_id,
        "homing.tenant": turn.tenant.name,
        "homing.key_source": facts.key_source.value,
        "homing.session": facts.session_key[:12] if facts.session_key is not None else None,
        "homing.attempts": turn.placement.num_attempts,
    }
    if decision is not None:
        found |= {
            "homing.backend": decision.backend_id,
            "homing.affinity": turn.placement.affinity.value,
            "homing.reason": turn.placement.moved_reason or decision.reason,
            "homing.expected_cached_tokens": decision.expected_cached_tokens,
        }
    if turn.outcome.sent_s is not None:
        found["homing.overhead_s"] = turn.outcome.sent_s - turn.started_s
    if turn.outcome.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = turn.outcome.first_token_s - turn.started_s
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    if turn.outcome.observer is not None and turn.outcome.observer.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = (turn.outcome.observer.finish_reason[:40],)
    return {name: value for name, value in found.items() if value is not None}


def _context_of(raw_headers: RawHeaders) -> dict[str, str]:
    return {
        name.lower().decode(): value.decode("latin-1")
        for name, value in raw_headers
        if name.lower() in _CONTEXT_HEADERS
    }
