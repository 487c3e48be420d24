"""What one placement costs, µs of CPU in a hot loop, by fleet size and case.

    python tests/bench/bench_routing_decide.py

Columns: decide; reserve; first token and release. Then for requests entered in batches: noting all three, and
what taking a batch costs per request. Prints medians of `--repeat` calls after as many warm-up calls; asserts
no time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from routing.routing_worlds import backend, bind, fleet, names, ready_router, request

from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.values import Binding, RequestFacts, Usage

_SYSTEM = "You are a helpful assistant with tools"
_BATCH = 64  # events: two of each request
Case = Callable[[int], tuple[RequestFacts, Binding | None]]


def _history(session: str, turns: int) -> tuple[str, ...]:
    return tuple(f"{session} message {number}" for number in range(2 * turns + 1))


def _bound_case(router: Router, num_sessions: int, turns: int) -> Case:
    """Sessions with a history at their homes; every call is the next turn of one of them."""
    prepared = []
    for number in range(num_sessions):
        facts = request(f"s{number}", prompt=_SYSTEM, texts=_history(f"s{number}", turns))
        decision = router.decide(facts, None, 1000.0)
        held = router.reserve(facts, decision, 1000.0)
        router.release(
            held, 1000.0, Usage(prompt_tokens=400, completion_tokens=90, cached_tokens=0), completed=True
        )
        following = request(f"s{number}", prompt=_SYSTEM, texts=_history(f"s{number}", turns + 1))
        prepared.append((following, bind(decision, context_tokens=490)))
    return lambda index: prepared[index % num_sessions]


def _new_case(prefix: str) -> Case:
    prepared = [
        (request(f"{prefix}{n}", prompt=_SYSTEM, texts=_history(f"{prefix}{n}", 0)), None)
        for n in range(4000)
    ]
    return lambda index: prepared[index % len(prepared)]


def _keyless_case() -> Case:
    prepared = [(request(texts=(f"question {number}",)), None) for number in range(4000)]
    return lambda index: prepared[index % len(prepared)]


def _load(router: Router, num_backends: int) -> None:
    """Put some seconds of waiting work on every backend, so that no session takes the short way."""
    for number in range(num_backends * 4):
        facts = request(f"load{number}", texts=(f"a long document {number}",), size=400_000)
        router.reserve(facts, router.decide(facts, None, 1000.0), 1000.0)


def measure(router: Router, case: Case, repeat: int) -> list[float]:
    """Return medians in µs: decide, reserve, first token and release; then the same noted, and the rest of it
    taken in batches, per request."""
    spans: list[list[float]] = [[] for _ in range(5)]
    noted: list[Reservation] = []
    usage = Usage(prompt_tokens=500, completion_tokens=90, cached_tokens=400)
    for index in range(4 * repeat):
        now_s = 1000.0 + index * 0.01
        facts, binding = case(index)
        in_batches = index >= 2 * repeat
        start = thread_time_ns()
        decision = router.decide(facts, binding, now_s)
        decided = thread_time_ns()
        held = (router.note_sent if in_batches else router.reserve)(facts, decision, now_s)
        reserved = thread_time_ns()
        router.first_token(held, now_s)
        (router.note_ended if in_batches else router.release)(held, now_s, usage, completed=True)
        ended = thread_time_ns()
        if in_batches:
            spans[3].append((ended - decided) / 1000)
            noted += (held, held)
            if len(noted) >= _BATCH:
                start = thread_time_ns()
                router.take(noted)
                spans[4].append((thread_time_ns() - start) / 1000 / len(noted) * 2)
                noted = []
        elif index >= repeat:
            spans[0].append((decided - start) / 1000)
            spans[1].append((reserved - decided) / 1000)
            spans[2].append((ended - reserved) / 1000)
    router.take(noted)
    return [statistics.median(span) for span in spans]


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of one placement")
    parser.add_argument("--repeat", type=int, default=4000)
    parser.add_argument("--policy", default="homing")
    parser.add_argument("--backends", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    options = parser.parse_args()
    columns = ("decide", "reserve", "release", "note both", f"take({_BATCH})")
    print(f"{'backends':>8} {'case, µs':<24}" + "".join(f"{column:>10}" for column in columns))
    for num_backends in options.backends:
        for name in (
            "bound, 3 turns",
            "bound, 50 turns",
            "bound, busy fleet",
            "new session",
            "new, slow start",
            "new, busy fleet",
            "no key",
        ):
            slow_start_s = 600.0 if "slow" in name else 0.0
            router = ready_router(num_backends, policy=options.policy, slow_start_s=slow_start_s)
            if slow_start_s:
                rows = [
                    backend(n, since_s=400.0 + 590.0 * (i % 2)) for i, n in enumerate(names(num_backends))
                ]
                router.observe_view(fleet(*rows, generation=2), 1000.0)
            if "busy" in name:
                _load(router, num_backends)
            if name.startswith("bound"):
                case = _bound_case(router, 500, 50 if "50" in name else 3)
            else:
                case = _keyless_case() if name == "no key" else _new_case("n")
            medians = measure(router, case, options.repeat)
            print(f"{num_backends:>8} {name:<24}" + "".join(f"{median:>10.1f}" for median in medians))


if __name__ == "__main__":
    main()
