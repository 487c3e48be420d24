"""What every engine's worker program has in common: jobs in on stdin, measurements out on stdout.

A worker runs in its engine's own environment, so this file needs the standard library only. One job is a
batch of prompts (token ids) and how many tokens to generate for each. An engine says after each step how
many tokens every prompt has got; from that alone the stopwatch takes two spans, each in wall and in CPU time
of the whole process:

    start ── first ──► every prompt has its first token ── decode ──► the first prompt has all its tokens

so decoding is measured only while the whole batch decodes. It knows no engine and no model.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int, "Stopwatch"], None]


class Stopwatch:
    """Times one job. Engines call `progress` after each step."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._start = _now()
        self._first: tuple[float, float] | None = None
        self._last = self._start
        self._num_at_first = self._num_at_last = 0
        self._is_over = False
        self.num_cached_tokens: int | None = None  # of all prompts, where the engine tells

    def progress(self, counts: list[int]) -> None:
        """Take note of how many tokens each prompt has so far. Changes: the marks."""
        if self._is_over or min(counts) < 1:
            return
        moment = _now()
        if self._first is None:
            self._first, self._num_at_first = moment, sum(counts)
        self._last, self._num_at_last = moment, sum(counts)
        self._is_over = max(counts) >= self._num_tokens

    def result(self) -> dict[str, float | int | None]:
        """Return both spans in seconds.

        Raises:
            RuntimeError: some prompt never got a token.
        """
        if self._first is None:
            raise RuntimeError("a prompt got no token")
        return {
            "first_s": self._first[0] - self._start[0],
            "first_cpu_s": self._first[1] - self._start[1],
            "decode_s": self._last[0] - self._first[0],
            "decode_cpu_s": self._last[1] - self._first[1],
            "num_decoded_tokens": self._num_at_last - self._num_at_first,
            "num_cached_tokens": self.num_cached_tokens,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def read_options() -> dict[str, Any]:
    """Return what the benchmark passed: model, num_threads, dtype, reuses, max_model_len."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    return options


def serve(make: Callable[[dict[str, Any]], tuple[Generate, dict[str, Any]]]) -> None:
    """Build the engine, say what it is, then run jobs until stdin ends.

    Libraries print where they like, so everything but our answers goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = _now()
    generate, facts = make(read_options())
    load_s, load_cpu_s = (end - begin for begin, end in zip(start, _now(), strict=True))
    answers.write(json.dumps({**facts, "load_s": load_s, "load_cpu_s": load_cpu_s}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        watch = Stopwatch(job["num_tokens"])
        generate(job["prompts"], job["num_tokens"], watch)
        answers.write(json.dumps(watch.result()) + "\n")
