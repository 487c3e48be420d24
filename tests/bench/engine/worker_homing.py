"""Our engine under the benchmark, with or without prefix caching; everything else as it comes by default.

As in the other engines, no limit on a step's time: the server's would have early sequences of a batch end
before the last one begins.
"""

from __future__ import annotations

import itertools
from typing import Any

from bench.engine.stopwatch import Generate, Stopwatch, serve

from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.sequence import EngineRequest, FinishReason
from engine_adapter.engine.model.sampling import SamplingParams


def make(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    config = EngineConfig(
        dtype=options["dtype"],
        num_threads=options["num_threads"],
        enable_prefix_caching=options["reuses"],
    )
    engine = LLMEngine.from_path(options["model"], config)
    numbers = itertools.count()

    def generate(prompts: list[list[int]], num_tokens: int, watch: Stopwatch) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        counts, cached = {}, {}
        for prompt in prompts:
            name = str(next(numbers))
            counts[name] = 0
            engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work:
            for output in engine.step():
                if output.finish_reason not in (None, FinishReason.LENGTH):
                    raise RuntimeError(f"request ended with {output.finish_reason}: {output.error}")
                counts[output.request_id] = output.num_output_tokens
                cached[output.request_id] = output.num_cached_tokens
            watch.progress(list(counts.values()))
        watch.num_cached_tokens = sum(cached.values())

    return generate, {"weights": options["dtype"], "version": "this commit"}


if __name__ == "__main__":
    serve(make)
