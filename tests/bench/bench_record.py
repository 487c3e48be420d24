"""What one finished request costs in step 7: counting it, and its access line.

    python tests/bench/bench_record.py

Prints the best of seven repetitions in µs of CPU time of the thread, which a busy machine disturbs least.
"""

from __future__ import annotations

import os
import sys
import time
import timeit
from pathlib import Path
from typing import cast

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "cuda")]

from gateway.downstream.request import ClientRequest
from gateway.observability.logs import AccessLog
from gateway.observability.metrics import GatewayMetrics
from gateway.request.answer_observer import AnswerObserver
from gateway.request.made_objects import MadeObjects
from gateway.request.recorder import Recorder
from gateway.request.turn import Placement, Turn, TurnOutcome
from gateway.sessions.memory import MemoryStore
from gateway.values import Affinity, Api, BackendId, Decision, KeySource, RequestFacts, SessionKey, Usage
from gateway.wire.facts import FactsParser
from gateway.wire.routes import Route
from gateway.wire.settings import KeySettings

NUM_RUNS = 20_000


def finished_turn() -> Turn:
    """A later turn's answer, without its binding: what the store costs is not the question here."""
    backend_id = BackendId("backend-1")
    decision = Decision(
        backend_id=backend_id,
        affinity=Affinity.HIT,
        reason="home",
        ranked=(),
        key_source=KeySource.HEADER,
        expected_cached_tokens=1_100,
    )
    facts = RequestFacts(
        api=Api.CHAT, session_key=SessionKey("a" * 32), key_source=KeySource.HEADER, model="model"
    )
    observer = AnswerObserver(Api.CHAT, is_stream=True, limit_bytes=0, on_first_token=lambda: None)
    observer.usage = Usage(prompt_tokens=1_200, completion_tokens=80, cached_tokens=1_100)
    return Turn(
        request=cast("ClientRequest", None),  # nothing of it is recorded
        route=Route(api=Api.CHAT, path="/v1/chat/completions"),
        request_id="req-1",
        engine_request_id="req-1",
        started_s=1.0,
        facts=facts,
        placement=Placement(decision=decision, affinity=Affinity.HIT, num_attempts=1),
        outcome=TurnOutcome(status=200, sent_s=1.001, first_token_s=1.1, observer=observer),
    )


def cost_us(recorder: Recorder) -> float:
    turn = finished_turn()

    def record() -> None:
        recorder.record(turn, 2.0)

    return min(timeit.repeat(record, number=NUM_RUNS, repeat=7, timer=time.thread_time)) / NUM_RUNS * 1e6


def main() -> None:
    parser = FactsParser(KeySettings(), b"secret", max_decoded_bytes=1)
    store = MemoryStore()
    sink = os.open(os.devnull, os.O_WRONLY)
    log = AccessLog(lambda data: os.write(sink, data))
    for name, logs_requests in (("counted", False), ("counted and logged", True)):
        recorder = Recorder(GatewayMetrics(), store, MadeObjects(store, store, parser), parser, log)
        recorder.logs_requests = logs_requests
        print(f"{name:20} {cost_us(recorder):6.2f} µs")


if __name__ == "__main__":
    main()
