"""Traces: what the spans of a request say, how the client's trace goes on, and that they arrive by OTLP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fakes.backend import reset, respond
from fakes.gateway_world import GatewayWorld
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.config.config import ConfigError, parse_config

ROOT = Path(__file__).parents[2]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=kept"}


class Collector:
    """A real OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest()
                request.ParseFromString(body)
                collector.requests.append(request)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self, kind: Span.SpanKind.ValueType) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.kind == kind
        ]

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {one.key: one.value.string_value for one in attributes}


def attributes(span: Span) -> dict[str, object]:
    """Attribute → value, whatever its type."""
    found: dict[str, object] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = getattr(one.value, kind) if kind else None
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one:
        yield one


def world(collector: Collector, num_backends: int = 1, **tracing: object) -> GatewayWorld:
    return GatewayWorld(num_backends, tracing={"is_enabled": True, "endpoint": collector.endpoint, **tracing})


async def test_a_request_is_one_server_span_and_one_span_per_attempt(collector: Collector) -> None:
    """The decision, the tokens and the outcome are attributes; the attempt is a child of the request."""
    async with world(collector, service_name="edge") as one:
        assert (await one.chat("alice", text="the secret prompt")).status_code == 200
    (server,) = collector.spans(Span.SPAN_KIND_SERVER)
    (client,) = collector.spans(Span.SPAN_KIND_CLIENT)
    assert client.parent_span_id == server.span_id
    said = attributes(server)
    assert said["http.request.method"] == "POST"
    assert said["url.path"] == "/v1/chat/completions"
    assert said["http.response.status_code"] == 200
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "fake-model"
    assert said["homing.backend"] == "b0"
    assert said["homing.affinity"] == "new"
    assert said["homing.key_source"] == "header"
    assert attributes(client)["gen_ai.provider.name"] == "vllm"
    assert collector.resource()["service.name"] == "edge"
    everything = b"".join(request.SerializeToString() for request in collector.requests)
    assert b"secret" not in everything
    assert b"alice" not in everything


async def test_the_clients_trace_goes_on(collector: Collector) -> None:
    """W3C context: our span is the client's child, and the backend is told our attempt as its parent."""
    async with world(collector) as one:
        await one.chat("s", headers=CONTEXT)
        sent = dict(one.backends[0].requests[0].headers)
    (server,) = collector.spans(Span.SPAN_KIND_SERVER)
    (client,) = collector.spans(Span.SPAN_KIND_CLIENT)
    assert server.trace_id.hex() == TRACE_ID
    assert server.parent_span_id.hex() == PARENT_ID
    assert sent["traceparent"] == f"00-{TRACE_ID}-{client.span_id.hex()}-01"
    assert sent["tracestate"] == "vendor=kept"


async def test_a_client_that_does_not_want_a_trace_gets_none(collector: Collector) -> None:
    """An unsampled context is passed on as such, and nothing is sent to the collector."""
    async with world(collector) as one:
        await one.chat("s", headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
        sent = dict(one.backends[0].requests[0].headers)
    assert not collector.requests
    assert sent["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert sent["traceparent"].endswith("-00")


async def test_a_broken_context_begins_a_new_trace(collector: Collector) -> None:
    """What is no trace context is not passed on as one."""
    async with world(collector) as one:
        await one.chat("s", headers={"traceparent": "00-nonsense"})
        sent = dict(one.backends[0].requests[0].headers)
    (server,) = collector.spans(Span.SPAN_KIND_SERVER)
    assert server.parent_span_id == b""
    assert sent["traceparent"].split("-")[1] == server.trace_id.hex()


async def test_a_failover_shows_both_attempts(collector: Collector) -> None:
    """The failed attempt carries the error, the other one the answer; the request itself succeeded."""
    async with world(collector, num_backends=2) as one:
        home = int((await one.chat("s")).headers["x-homing-backend"].removeprefix("b"))
        one.backends[home].script(reset(), reset())  # the second, where a kept connection was tried first
        assert (await one.chat("s")).status_code == 200
    failed = [span for span in collector.spans(Span.SPAN_KIND_CLIENT) if span.status.code == 2]
    assert len(failed) == 1
    assert attributes(failed[0])["error.type"] == "upstream_reset"
    worker_reports = [
        span
        for span in collector.spans(Span.SPAN_KIND_CLIENT)
        if span.parent_span_id == failed[0].parent_span_id
    ]
    assert len(worker_reports) == 2
    assert not [span for span in collector.spans(Span.SPAN_KIND_SERVER) if span.status.code == 2]


async def test_buckets_and_access_lines_name_the_trace(collector: Collector) -> None:
    """An OpenMetrics page shows, in the bucket that the request fell into, its trace as exemplar."""
    async with world(collector) as one:
        one.backends[0].script(respond(b"{}"))
        await one.chat("s", headers=CONTEXT)
        accept = {"accept": "application/openmetrics-text"}
        page = (await one.client.get("/metrics", headers=accept)).text
    lines = [line for line in page.splitlines() if TRACE_ID in line]
    assert len(lines) == 1
    assert lines[0].startswith('homing_request_duration_seconds_bucket{api="chat",')


async def test_a_collector_that_is_away_costs_no_request(collector: Collector) -> None:
    """Spans are sent from a thread of their own; when nobody takes them they are lost, and nothing else."""
    gone = f"http://127.0.0.1:{1}/v1/traces"
    async with GatewayWorld(1, tracing={"is_enabled": True, "endpoint": gone}) as one:
        async with asyncio.timeout(10):
            assert (await one.chat("s")).status_code == 200


def test_off_imports_nothing() -> None:
    """A gateway without tracing loads neither the SDK's spans nor ours (redis-py loads its metrics)."""
    code = (
        "import sys; from gateway.process.gateway import Gateway; "
        "from gateway.config.config import parse_config;"
        "Gateway(parse_config({}));"
        "sys.exit('gateway.request.otel_spans' in sys.modules or 'opentelemetry.sdk.trace' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("bad", [{"sample_ratio": 1.5}, {"endpoint": "collector:4317"}, {"ratio": 1}])
def test_mistakes_are_found_at_start(bad: dict[str, object]) -> None:
    """A ratio out of range, an endpoint that is no URL, an unknown key."""
    with pytest.raises(ConfigError, match="tracing"):
        parse_config({"tracing": bad})
