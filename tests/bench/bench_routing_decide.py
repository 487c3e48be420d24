"""What one placement costs: decide + reserve + first token + release, µs of CPU, by fleet size and case.

    python tests/bench/bench_routing_decide.py

Prints the median and the 99th percentile of `--repeat` calls after as many warm-up calls; asserts no time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from routing.routing_worlds import bind, ready_router, request

from gateway.routing.router import Router
from gateway.values import Binding, RequestFacts, Usage

_SYSTEM = "You are a helpful assistant with tools"
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


def measure(router: Router, case: Case, repeat: int) -> tuple[float, float, float]:
    """Return median decide, median of the whole, p99 of the whole, in µs."""
    decide_us, whole_us = [], []
    usage = Usage(prompt_tokens=500, completion_tokens=90, cached_tokens=400)
    for index in range(2 * repeat):
        now_s = 1000.0 + index * 0.01
        facts, binding = case(index)
        start = thread_time_ns()
        decision = router.decide(facts, binding, now_s)
        decided = thread_time_ns()
        held = router.reserve(facts, decision, now_s)
        router.first_token(held, now_s)
        router.release(held, now_s, usage, completed=True)
        end = thread_time_ns()
        if index >= repeat:
            decide_us.append((decided - start) / 1000)
            whole_us.append((end - start) / 1000)
    return statistics.median(decide_us), statistics.median(whole_us), sorted(whole_us)[int(0.99 * repeat)]


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of one placement")
    parser.add_argument("--repeat", type=int, default=4000)
    parser.add_argument("--policy", default="homing")
    options = parser.parse_args()
    print(f"{'backends':>8} {'case':<28} {'decide µs':>10} {'whole µs':>9} {'p99 µs':>8}")
    for num_backends in (1, 8, 64, 256, 1000):
        for name in (
            "bound, 3 turns",
            "bound, 50 turns",
            "new session",
            "no key",
            "bound, busy fleet",
            "new, busy fleet",
        ):
            router = ready_router(num_backends, policy=options.policy, slow_start_s=0.0)
            if "busy" in name:
                _load(router, num_backends)
            if name.startswith("bound"):
                case = _bound_case(router, 500, 50 if "50" in name else 3)
            else:
                case = _keyless_case() if name == "no key" else _new_case("n")
            decide, whole, p99 = measure(router, case, options.repeat)
            print(f"{num_backends:>8} {name:<28} {decide:>10.1f} {whole:>9.1f} {p99:>8.1f}")


if __name__ == "__main__":
    main()
