"""One running engine, seen from the benchmark: send a job, get its measurement, within a time limit.

Invariant: a worker that dies, hangs or sends invalid output raises `EngineFailed` and is stopped; it never
stops the benchmark. It does not know what the numbers mean.
"""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import Any

from bench.engine.engines import Engine, log_of, start
from bench.engine.workload import Kind, Step

START_TIMEOUT_S = 180.0
JOB_TIMEOUT_S = 240.0


class EngineFailed(Exception):
    """The worker program did not answer; the message names its log."""


class RunningEngine:
    """A worker process. `facts` is what it said about itself."""

    def __init__(self, engine: Engine, cache: Path, options: dict[str, object]) -> None:
        """Start it and wait until its model is loaded.

        Raises:
            EngineFailed: it did not come up.
        """
        self.engine = engine
        self._log = log_of(engine, cache)
        self._process = start(engine, cache, options)
        self.facts = self._read(START_TIMEOUT_S)

    def measure(self, step: Step) -> dict[str, Any]:
        """Run one step, after its history where the engine reuses.

        Raises:
            EngineFailed: no answer.
        """
        if step.history is not None and self.engine.reuses:
            self.run([step.history], 1)
        spans = self.run(step.prompts, step.num_tokens)
        is_decode = step.kind is Kind.DECODE
        span = "decode" if is_decode else "first"
        return {
            "wall_s": spans[f"{span}_s"],
            "cpu_s": spans[f"{span}_cpu_s"],
            "num_tokens": spans["num_decoded_tokens"] if is_decode else sum(map(len, step.prompts)),
            "num_cached_tokens": spans["num_cached_tokens"],
            "peak_bytes": spans["peak_bytes"],
        }

    def can(self, step: Step) -> bool:
        """Whether the engine takes part in this step."""
        if self.engine.only_chat and step.kind is not Kind.TTFT:
            return False
        limit = self.engine.max_prompt_tokens
        is_short = limit is None or len(step.prompts[0]) <= limit
        return is_short and len(step.prompts) <= self.engine.max_sequences

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Have one job done and return both spans.

        Raises:
            EngineFailed: no answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("has ended") from error
        return self._read(JOB_TIMEOUT_S)

    def stop(self) -> None:
        """End the process: closing its input is enough for a healthy one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise self._failed("has ended" if ready else f"gave no answer in {timeout_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> EngineFailed:
        self._process.kill()
        self._process.wait()
        print(f"log: {self._log}", flush=True)  # the report is read elsewhere and names no path
        return EngineFailed(f"its program {what}; its log is {self._log.name}")
