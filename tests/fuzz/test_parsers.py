"""Every parser of foreign bytes gives a value or its own error, whatever it is fed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from fuzz.mutations import corpus, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config.config import ConfigError, load_config
from gateway.errors import GatewayError
from gateway.fleet.engine_metrics import DIALECTS, parse_metrics
from gateway.replay.recording import replay
from gateway.sessions.codec import decode_reply
from gateway.values import Api
from gateway.wire.answers import observe_json
from gateway.wire.body_members import with_member
from gateway.wire.facts import FactsParser
from gateway.wire.settings import KeySettings
from gateway.wire.sse import SseObserver

GOLDEN = Path(__file__).parents[1] / "golden" / "sse"
RECORDING = b"\n".join((GOLDEN.parent / "decisions.jsonl").read_bytes().splitlines()[:25])
STREAMS = [path.read_bytes() for path in sorted(GOLDEN.glob("*.sse"))]
BODIES = corpus("bodies")
APIS = list(Api)

NUM_EXAMPLES = int(os.environ.get("HOMING_FUZZ_EXAMPLES", "400"))
bounded = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize="HOMING_FUZZ_EXAMPLES" not in os.environ,  # CI sees the same inputs every time
    suppress_health_check=list(HealthCheck),
)
PARSER = FactsParser(KeySettings(), b"secret")


@bounded
@given(mutated(BODIES), st.sampled_from(APIS), st.sampled_from((None, "gzip", "zstd", "br", "deflate", "x")))
def test_request_facts(body: bytes, api: Api, encoding: str | None) -> None:
    """Facts, or an error that blames the client."""
    facts = refused = None
    try:
        facts = PARSER.parse(api, [(b"x-session-id", body[:40])], body, content_encoding=encoding)
    except GatewayError as error:
        refused = error.status
    assert facts is not None or refused in range(400, 500)


@bounded
@given(mutated(STREAMS), st.sampled_from(APIS), st.integers(1, 200))
def test_event_streams(stream: bytes, api: Api, chunk_bytes: int) -> None:
    """Nothing is raised, and what is seen does not depend on how the stream is cut."""
    whole, cut = SseObserver(api), SseObserver(api)
    whole.feed(stream)
    for start in range(0, len(stream), chunk_bytes):
        cut.feed(stream[start : start + chunk_bytes])
    assert (whole.usage, whole.finish_reason, whole.response_id) == (
        cut.usage,
        cut.finish_reason,
        cut.response_id,
    )


@bounded
@given(mutated(BODIES), st.sampled_from(APIS))
def test_answers(body: bytes, api: Api) -> None:
    """An answer that cannot be read has no usage; it is still the client's."""
    observe_json(api, body)


@bounded
@given(mutated(corpus("configurations")))
def test_configurations(tmp_path: Path, text: bytes) -> None:
    """A configuration, or one line that says what is wrong."""
    path = tmp_path / "homing.yaml"
    path.write_bytes(text)
    try:
        told = repr(load_config(path))
    except ConfigError as error:
        told = str(error)
    assert "\n" not in told


@bounded
@given(mutated(corpus("metric_pages")), st.sampled_from(sorted(DIALECTS)))
def test_metric_pages(page: bytes, engine: str) -> None:
    """An engine's page gives a report, with gaps where it cannot be read."""
    parse_metrics(page.decode("utf-8", "replace"), DIALECTS[engine])


@bounded
@given(mutated(corpus("redis_values")), st.integers(-10, 10**9))
def test_redis_values(value: bytes, ttl_ms: int) -> None:
    """A binding or nothing; and never a backend name that could be an address."""
    record = decode_reply([value, ttl_ms], 0.0)
    if record is not None:
        assert "/" not in record.backend_id
        assert ":" not in record.backend_id


@bounded
@given(mutated([RECORDING]))
def test_recordings(recording: bytes) -> None:
    """A damaged recording gives mismatches, or an error that names its line."""
    with contextlib.suppress(ValueError):
        list(replay(recording.splitlines()))


@bounded
@given(mutated(BODIES))
def test_cache_salts(body: bytes) -> None:
    """Where the salted body is JSON at all, the gateway's salt is the one that counts; else it is refused."""
    with contextlib.suppress(GatewayError, ValueError, RecursionError):
        salted = with_member(body, b"cache_salt", b'"0a1b"')
        read = json.loads(salted) if salted else None
        assert read is None or read["cache_salt"] == "0a1b"
