"""transformers' own `generate`: it keeps KV within a call and nothing between calls."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from bench.engine.stopwatch import Generate, Stopwatch, serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Progress(transformers.StoppingCriteria):
    """Is asked after each token whether to stop: never, but the stopwatch hears of it."""

    def __init__(self, watch: Stopwatch, num_prompt_tokens: int) -> None:
        self._watch, self._num_prompt_tokens = watch, num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        num_sequences, length = input_ids.shape
        self._watch.progress([length - self._num_prompt_tokens] * num_sequences)
        return torch.zeros(num_sequences, dtype=torch.bool)


def make(options: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    torch.set_num_threads(options["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=DTYPES[options["dtype"]]
    )
    model.eval()
    # Greedy, and no token ends the text: every engine shall compute the same number.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(prompts: list[list[int]], num_tokens: int, watch: Stopwatch) -> None:
        ids = torch.tensor(prompts)
        criteria = transformers.StoppingCriteriaList([_Progress(watch, ids.shape[1])])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                stopping_criteria=criteria,
            )
        watch.num_cached_tokens = 0

    return generate, {"weights": options["dtype"], "version": f"transformers {transformers.__version__}"}


if __name__ == "__main__":
    serve(make)
